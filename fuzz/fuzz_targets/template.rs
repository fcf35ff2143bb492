//! Fed: the source of a chat template. Oracle: compiling and rendering a few conversations never panics, ends within libFuzzer's time, and gives a
//! text within its bound or an error that is not empty.
#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rcompile_fuzz::{repository, start};
use rcompile_template::{NaiveDate, OUTPUT_BYTES_MAX, Template, TemplateInput};
use serde_json::{Value, json};

static TOKENS: LazyLock<BTreeMap<String, String>> =
    LazyLock::new(|| [("bos_token".to_string(), "<s>".to_string()), ("eos_token".to_string(), "</s>".to_string())].into());

/// What `rcompile-models` gives a template.
const FUEL: u64 = 50_000;

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let template = match Template::with_fuel(source, FUEL) {
        Ok(template) => template,
        Err(e) => return assert!(!e.message.is_empty()),
    };
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1.5}}}]});
    let conversations: [(Value, Option<Value>); 3] = [
        (json!([{"role": "user", "content": "Hello there."}]), None),
        (
            json!([{"role": "system", "content": "S"}, {"role": "user", "content": "é {{ x }}\n"}, call, {"role": "tool", "content": "7"}]),
            Some(json!([tool])),
        ),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "<think>b</think> c"}]),
            None,
        ),
    ];
    for (messages, tools) in conversations {
        let now = NaiveDate::from_ymd_opt(2026, 1, 1).and_then(|day| day.and_hms_opt(0, 0, 0));
        let input = TemplateInput {
            messages,
            tools,
            add_generation_prompt: true,
            special_tokens: &TOKENS,
            extra: Some(json!({"flag": true})),
            now,
        };
        match template.render(&input) {
            Ok(text) => assert!(text.len() <= OUTPUT_BYTES_MAX),
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
});

/// Templates in the ways of well-known models, one per feature, and that of the bundled model.
fn seeds() -> Vec<Vec<u8>> {
    let bundled: Value = serde_json::from_slice(&std::fs::read(repository("models/demo/model/tokenizer_config.json")).unwrap()).unwrap();
    let bundled = bundled["chat_template"].as_str().unwrap_or_default();
    let list = [
        bundled,
        "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}",
        "{%- if tools %}\n{{- '# Tools' }}{%- for tool in tools %}{{ tool | tojson(indent=4) }}\n{%- endfor %}{% endif %}",
        "{% set ns = namespace(i=0, last=messages[-1]['role']) %}{% for m in messages[::-1] %}{% set ns.i = ns.i + 1 %}{{ loop.index0 }}{{ ns.i }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% macro f(a, b='x') -%}{{ a ~ b | trim | upper }}{%- endmacro %}{{ f(messages[0]['content']) }}{% generation %}{{ 'a'.split(',')[0].strip() }}{% endgeneration %}",
        "{{ strftime_now('%d %b %Y %H:%M') }}{{ raise_exception('no') if messages | length > 5 }}{{ '%s-%05.2f' | format('a', 1.5) }}{{ '{:>5}'.format('y') }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ range(3) | list }}{{ [1,2,3] | batch(2) | list }}{{ 'ab' | indent(2) | replace('a', 'b') }}",
        "{% if messages[0].content is string and messages is iterable and x is not defined %}{{ messages[0].content.startswith('H') }}{{ {'a': 1}.items() | list }}{% else %}{{ {'a': [1, 2.5, none, true]} | tojson }}{% endif %}",
        "{%- for m in messages if m.role != 'tool' -%}{% with c = m.content %}{{ c[:3] }}{{ c is mapping }}{% endwith %}{%- else -%}none{%- endfor -%}{# comment #}{% raw %}{{ }}{% endraw %}{% filter upper %}a{% endfilter %}{% continue %}",
        "{% set ns = namespace() %}{{ {'a': {}} ~ '{#' }}{% raw %}{% endraw ' %}{% endraw %}{% set ns.x | default([ns], true) %}a{% endset %}{{ ns }}",
    ];
    list.into_iter().map(|s| s.as_bytes().to_vec()).collect()
}
