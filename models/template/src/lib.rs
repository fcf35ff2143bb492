//! Chat templates: compiling and rendering them as the reference library does, within bounds.
//!
//! In: the Jinja source of a model (untrusted) and a conversation as JSON. Out: the prompt text. The crate that checks models and the
//! runtime of executables both use this one.
//!
//! Like the reference: `trim_blocks` and `lstrip_blocks`, loop controls, Python's methods on strings and maps,
//! `raise_exception`, `strftime_now`, `tojson` in the style of `json.dumps`, and `{% generation %}` as a plain block.
//! Values print as there but for floats from 1e16 on and below 1e-4, which have no exponent; `loop.last` is not known in loops over the
//! letters of a text, and methods are not `defined` as attributes. `%` on texts is refused, as are keys in formats that are not ASCII.
//! Unlike it, there is no way to other files and no attribute that starts with two underscores, fuel bounds the work, and the length of the
//! text is bounded, as is what the numbers make that filters and formats are given. Namespaces keep no namespaces and no `loop`, so that
//! every value has an end, and rendering has a stack for the deepest. Not bounded is the memory of intermediate strings that a hostile
//! template multiplies otherwise, by `+`, `replace` or `join` (`*` stops at the engine's own 100 MB); that needs a limit on the process, as
//! `rcompile` has while it opens a model.
//!
//! Sources: transformers `chat_template_utils.py`; Jinja2's template documentation; Python's `json` and `strftime`.

mod bounds;
mod error;
mod json;
mod python;
mod source;
mod time;

pub use self::bounds::{FUEL, OUTPUT_BYTES_MAX, SOURCE_BYTES_MAX};
pub use self::error::{TemplateError, TemplateErrorKind};
pub use chrono::{NaiveDate, NaiveDateTime};

use self::bounds::{Capped, STACK_PER_STEP};
use self::error::{Raised, template_error};
use self::json::{from_json, to_json_filter};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::io;
use std::panic::resume_unwind;

/// What a template is rendered with.
pub struct TemplateInput<'a> {
    /// A list of objects with `role` and `content`.
    pub messages: Json,
    /// A list of tool schemas.
    pub tools: Option<Json>,
    /// Whether the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// `bos_token`, `eos_token` and so on with their texts.
    pub special_tokens: &'a BTreeMap<String, String>,
    /// An object with further variables, such as `enable_thinking`.
    pub extra: Option<Json>,
    /// The time that `strftime_now` shows; UTC of the clock where absent.
    pub now: Option<NaiveDateTime>,
}

/// A compiled chat template.
pub struct Template {
    environment: Environment<'static>,
    stack_bytes: usize,
}

const NAME: &str = "chat";

/// Name of the threads that render: the caller may catch what they panic with.
pub const THREAD: &str = "template";

impl Template {
    /// Compiles `source`; a rendering may take [`FUEL`].
    pub fn new(source: &str) -> Result<Template, TemplateError> {
        Template::with_fuel(source, FUEL)
    }

    /// Compiles `source`; a rendering may take `fuel`.
    pub fn with_fuel(source: &str, fuel: u64) -> Result<Template, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("the template has {} bytes, at most {SOURCE_BYTES_MAX} are allowed", source.len());
            return Err(TemplateError { kind: TemplateErrorKind::Limit, line: 0, message });
        }
        let source = source::prepare(source)?;
        let mut environment = environment();
        environment.set_fuel(Some(fuel));
        environment.add_template_owned(NAME, source).map_err(|e| template_error(&e))?;
        Ok(Template { environment, stack_bytes: fuel as usize * STACK_PER_STEP })
    }

    /// The text of a conversation, made by a thread with a stack for the deepest value that the fuel allows.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let no_thread = |e: io::Error| {
            let message = format!("a thread with a stack of {} MiB: {e}", self.stack_bytes >> 20);
            TemplateError { kind: TemplateErrorKind::Machine, line: 0, message }
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(THREAD.into()).stack_size(self.stack_bytes);
            let thread = thread.spawn_scoped(scope, || self.render_here(input)).map_err(no_thread)?;
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    fn render_here(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let now = input.now.unwrap_or_else(time::utc_now);
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), from_json(&alias_reasoning(&input.messages))),
            ("tools".into(), input.tools.as_ref().map_or(Value::from(()), from_json)),
            ("documents".into(), Value::from(())),
            ("add_generation_prompt".into(), Value::from(input.add_generation_prompt)),
            ("strftime_now".into(), Value::from_function(move |format: &str| time::strftime(now, format))),
        ];
        context.extend(input.special_tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))));
        if let Some(Json::Object(extra)) = &input.extra {
            context.extend(extra.iter().map(|(name, value)| (name.clone(), from_json(value))));
        }
        let template = self.environment.get_template(NAME).map_err(|e| template_error(&e))?;
        let mut out = Capped::default();
        template.render_captured_to(Value::from_pairs(context), &mut out).map_err(|e| template_error(&e))?;
        String::from_utf8(out.bytes).map_err(|e| TemplateError { kind: TemplateErrorKind::Render, line: 0, message: e.to_string() })
    }
}

/// Filters, functions, methods and bounds that every chat template sees.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    // The delimiters are the defaults, which cannot contradict each other.
    env.set_syntax(syntax.unwrap_or_default());
    env.set_recursion_limit(100);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(|state, value, method, args| {
        bounds::check_method(value, method)?;
        match python::method(value, method, args) {
            Some(found) => found,
            None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
        }
    });
    bounds::add_sized(&mut env);
    python::add(&mut env);
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_filter("tojson", to_json_filter);
    env
}

/// Gives a message's reasoning all the names that templates read it by.
fn alias_reasoning(messages: &Json) -> Json {
    let Json::Array(list) = messages else { return messages.clone() };
    let aliased = list.iter().map(|message| {
        let Json::Object(map) = message else { return message.clone() };
        let names = ["reasoning_content", "thinking", "reasoning"];
        let Some(reasoning) = names.iter().find_map(|name| map.get(*name).filter(|v| !v.is_null())) else {
            return message.clone();
        };
        let mut new = serde_json::Map::new();
        new.insert("thinking".into(), reasoning.clone());
        new.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
        new.insert("reasoning_content".into(), reasoning.clone());
        Json::Object(new)
    });
    Json::Array(aliased.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn time(year: i32, month: u32, day: u32) -> NaiveDateTime {
        NaiveDate::from_ymd_opt(year, month, day).and_then(|day| day.and_hms_opt(9, 30, 0)).unwrap()
    }

    fn render(source: &str, messages: Json) -> Result<String, TemplateError> {
        let input = TemplateInput {
            messages,
            tools: None,
            add_generation_prompt: true,
            special_tokens: &BTreeMap::from([("bos_token".to_string(), "<s>".to_string())]),
            extra: Some(json!({"list": [1, 2.5, true, null, "ä\u{1}\""], "map": {"b": {}, "a": [1e-5, 1e16, 0.5]}})),
            now: Some(time(2026, 2, 14)),
        };
        Template::new(source)?.render(&input)
    }

    #[test]
    fn filters_and_functions() {
        for (source, expected) in [
            ("{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}", "<s>user"),
            ("{{ list | tojson }}", r#"[1, 2.5, true, null, "ä\u0001\""]"#),
            ("{{ list | tojson(ensure_ascii=true) }}", r#"[1, 2.5, true, null, "\u00e4\u0001\""]"#),
            ("{{ map | tojson(sort_keys=true) }}", r#"{"a": [1e-05, 1e+16, 0.5], "b": {}}"#),
            ("{{ map | tojson(separators=(',', ':')) }}", r#"{"b":{},"a":[1e-05,1e+16,0.5]}"#),
            ("{{ [1, {'k': []}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"k\": []\n  }\n]"),
            ("{{ strftime_now('%d %b %Y, %A, day %-j, %I:%M %p') }}", "14 Feb 2026, Saturday, day 45, 09:30 AM"),
            ("a\n  {% generation %}\nb{%- endgeneration -%}  c", "a\nbc"),
            ("{{ ' x '.strip() + 'a,b'.split(',')[-1] }}{{ range(3) | list }}", "xb[0, 1, 2]"),
            ("{# __class__ #}{{ 'no %} end' }}{{ tools is none }}", "no %} endTrue"),
            ("{{ 'a\nb' | indent(2) }}|{{ 'a' | indent(width=1, first=true) }}", "a\n  b| a"),
            ("{{ 'a\nb\n' | indent(2) }}|{{ '' | indent(2, true) }}|{{ 'a\r\nb\rc' | indent(2) }}", "a\n  b\n|  |a\n  b\n  c"),
            ("{{ 'a\n\nb' | indent('>>', true, true) }}|{{ 'a\n\n' | indent(2, blank=true) }}", ">>a\n>>\n>>b|a\n  \n  "),
            ("{{ none is iterable }} {{ x is iterable }} {{ 1 is iterable }} {{ 'a' is iterable }}", "False True False True"),
            ("{{ {} is iterable }} {{ range(2) is iterable }} {{ true is iterable }}", "True True False"),
            ("{% if tools is iterable and tools | length > 0 %}tools{% endif %}{{ x | length }}", "0"),
            ("{{ '' | default('d', true) }}{{ x | default }}{{ '' | d('d', boolean=true) }}{{ none | default('q') }}", "ddNone"),
            ("{{ (x | default(none)) is none }} {{ x | default(default_value=none) }} {{ 'a' | default }}", "True None a"),
            ("{{ none | replace('o', '0') }}{{ x | replace('a', 'b') }} {{ true | replace('T', 't') }}", "N0ne true"),
            ("{{ 'aaa' | replace('a', 'b', 2) }} {{ 'aaa' | replace('a', 'b', count=0) }} {{ 12 | replace('1', 'x') }}", "bba aaa x2"),
            ("{{ '<\"\\'&>' | e }}", "&lt;&#34;&#39;&amp;&gt;"),
            ("{{ 'abc'.removeprefix('a').removesuffix('c') }} {{ 'abc'.removeprefix('x') }}", "b abc"),
            ("{{ '%03d|%s' | format(7, 'x') }} {{ '{:>4}'.format('y') }}", "007|x    y"),
            ("{{ [1, 2, 3] | batch(2, 200000) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3, 200000]][[1, 2], [3]]"),
            ("{{ '%s of 9999999999 %%9999999999' | format(1) }}{{ '9999999999 {}'.format(2) }}", "1 of 9999999999 %99999999999999999999 2"),
            ("{{ '{{:99999}}{a[:99999]}{:9>2}{:\u{e9}<2}}}'.format(3, 4, a={':99999': 5}) }}", "{:99999}5934\u{e9}}"),
            ("{{ '%(99999)2d%%99999d' | format({'99999': 1}) }}{{ '%.65534e' | format(1.0) | length }}", " 1%99999d65540"),
        ] {
            assert_eq!(render(source, json!([{"role": "user"}])).as_deref(), Ok(expected), "{source}");
        }
    }

    /// As Jinja2 3.1.6 renders it, with the settings of the reference library.
    #[test]
    fn as_python_does() {
        for (source, expected) in [
            ("a\r\nb\r{% if true %}\r\nc\r\n{% endif %}\r\nd", "a\nb\nc\nd"),
            ("X{{ 'a\\\nb' }}{{- \"c\\\n\\\nd\" -}} Y", "XabcdY"),
            ("a{{ 'x\\\ny' }}\n\n{% if 1 %}{{ 'a\\\n' }}{% endif %}b", "axy\n\nab"),
            (r"{{ '\U00000041\U0000000a\U00000027b' }}", "A\n'b"),
            (r"{{ 'a\/b\\c\n' }}{{ '\U0001F600\a' }}\/", "a\\/b\\c\n\u{1f600}\u{7}\\/"),
            (r"{{ {'a': {}} ~ '{#' }}{{ '\/' }}{{ '#}' }}", r"{'a': {}}{#\/#}"),
            (r"{% raw %}{% endraw ' %}{%- endraw +%}{{ '\/' }}{# ' %}#}", r"{% endraw ' %}\/"),
            ("{% set x = 'it\\'s \\/' %}{{ x }}{{ '\\'' }}", "it's \\/'"),
            (
                "{{ 'ab' is sequence }}{{ {} is sequence }}{{ [] is sequence }}{{ (1, 2) is sequence }}{{ 1 is sequence }}",
                "TrueTrueTrueTrueFalse",
            ),
            ("{{ none is sequence }}{{ undefined_name is sequence }}", "FalseTrue"),
            ("{{ [1, 2, 3][1:] is sequence }}{{ [1, 2][::-1] is sequence }}{{ range(3) is sequence }}", "TrueTrueTrue"),
            (
                "{{ 'zz' | int(0, 36) }} {{ '0x1f' | int(0, 0) }} {{ '11' | int(0, 3) }} {{ '1__0' | int }} {{ '_1' | int }}",
                "1295 31 4 0 0",
            ),
            ("{{ '0b11' | int(0, 2) }} {{ '0o17' | int(0, 8) }} {{ '0B1' | int(0, 0) }} {{ '0O7' | int(0, 0) }}", "3 15 1 7"),
            (
                "{{ '7' | int(0, 0) }} {{ '1' | int(5, 37) }} {{ '1' | int(5, 1) }} {{ 'z' | int(base=36) }} {{ 'z' | int(7, base=35) }}",
                "7 1 1 35 7",
            ),
            (
                "{{ '-0X1f' | int(0, 16) }} {{ '--5' | int }} {{ '+-5' | int }} {{ '+5' | int }} {{ 9007199254740993 | int }}",
                "-31 0 0 5 9007199254740993",
            ),
            ("{{ '1_0.5' | float }} {{ '1__0' | float }}", "10.5 0.0"),
            ("{{ 'a '.split(none, 1) }}{{ ' a b c '.split(none, 1) }}{{ 'a b'.split(none, 0) }}", "['a']['a', 'b c ']['a b']"),
            ("{{ 'abc' | int }} {{ '42' | int }} {{ ' 7 ' | int }} {{ '1.9' | int }} {{ 'x' | int(3) }} {{ 2.7 | int }}", "0 42 7 1 3 2"),
            ("{{ '0x1F' | int(0, 16) }} {{ none | int }} {{ [] | int }} {{ 'inf' | int }} {{ '1_000' | int }}", "31 0 0 0 1000"),
            ("{{ '-5' | int }} {{ '1e3' | int }} {{ '' | int }} {{ true | int }} {{ 'zz' | int(default=4) }}", "-5 1000 0 1 4"),
            ("{{ 'abc' | float }} {{ '1.5' | float }} {{ 'x' | float(default=2.5) }} {{ 3 | float }}", "0.0 1.5 2.5 3.0"),
            ("{{ none | float }} {{ ' 2 ' | float }} {{ [] | float }} {{ true | float }}", "0.0 2.0 0.0 1.0"),
            (
                "{{ 'a.b.c'.rsplit('.', 1) }}{{ 'a b  c'.rsplit() }}{{ 'a b  c d'.rsplit(none, 2) }}",
                "['a.b', 'c']['a', 'b', 'c']['a b', 'c', 'd']",
            ),
            ("{{ ''.rsplit() }}{{ ''.rsplit(',') }}{{ ' a b '.rsplit(none, 1) }}{{ 'a,b'.rsplit(',', 0) }}", "[][''][' a', 'b']['a,b']"),
            ("{{ 'a,b,c'.rsplit(',', maxsplit=1) }}{{ 'a,b,c'.split(sep=',', maxsplit=1) }}", "['a,b', 'c']['a', 'b,c']"),
            ("{{ 'k=v=w'.partition('=') }}{{ 'k'.partition('=') }}", "('k', '=', 'v=w')('k', '', '')"),
            ("{{ 'k=v=w'.rpartition('=') }}{{ 'k'.rpartition('=') }}", "('k=v', '=', 'w')('', '', 'k')"),
            (
                "{{ [false, 3.0, 0.0, -0.0, 'a\\\\b\\n\\r\\t', 'c \u{8}\u{c}'] | tojson }}",
                r#"[false, 3.0, 0.0, -0.0, "a\\b\n\r\t", "c \b\f"]"#,
            ),
            ("{{ {1: 2, none: 3, 'k': 4} | tojson }}", r#"{"1": 2, "null": 3, "k": 4}"#),
            ("{{ ['inf' | float, '-inf' | float, 'nan' | float] | tojson }}", "[Infinity, -Infinity, NaN]"),
            (
                "{{ [1, 2] | tojson(indent=none, separators=none) }}{{ [1, [2]] | tojson(indent='\t') }}",
                "[1, 2][\n\t1,\n\t[\n\t\t2\n\t]\n]",
            ),
            (
                "{{ [1, []] | tojson(indent=true) }}{{ [1] | tojson(indent=false) }}{{ [1] | tojson(indent=-2) }}",
                "[\n 1,\n []\n][\n1\n][\n1\n]",
            ),
            ("{{ [1, {'a': 2}] | tojson(indent='') }}{{ [1] | tojson(indent=100) | length }}", "[\n1,\n{\n\"a\": 2\n}\n]105"),
            ("{{ [1, {'a': 2}] | tojson(indent=1, separators=[' ;', '=']) }}", "[\n 1 ;\n {\n  \"a\"=2\n }\n]"),
            ("{{ range(3, 0, -1) | list }}{{ range(0, 5, 2) | list }}{{ range(2, 0) | list }}", "[3, 2, 1][0, 2, 4][]"),
            ("{{ range(0, 200000, 2) | length }}", "100000"),
            ("{% set a__b = '__' %}{{ a__b }}", "__"),
            ("{# {{ ''.__class__ }} it's #}a{b{# #}", "a{b"),
            ("{{ 'one two,three' | wordcount }} {{ \"it's a_b \u{e9} 4\" | wordcount }}", "3 5"),
        ] {
            assert_eq!(render(source, json!([])).as_deref(), Ok(expected), "{source}");
        }
    }

    /// Lists in lists as deep as fuel allows: to free them, and whatever can be done with them, takes a stack of a size that follows.
    #[test]
    fn deep_values_do_not_overflow_the_stack() {
        let nested = |name: &str, depth: usize| {
            let value = format!("{}{name}{}", "[".repeat(60), "]".repeat(60));
            format!("{{% set {name} = [] %}}") + &format!("{{% set {name} = {value} %}}").repeat(depth / 60)
        };
        let freed = render(&nested("x", 240_000), json!([]));
        assert!(matches!(freed, Err(TemplateError { kind: TemplateErrorKind::Limit, .. })), "{freed:?}");
        let one = nested("x", 190_000);
        let two = nested("x", 95_000) + &nested("y", 95_000);
        for deep in [&one, &two] {
            assert_eq!(render(&format!("{deep}end"), json!([])).as_deref(), Ok("end"), "fuel is left");
        }
        let of_one = [
            "{{ x }}",
            "{{ x | string | length }}",
            "{{ x | tojson }}",
            "{{ {x: 1} }}",
            "{{ '%s' | format(x) }}",
            "{{ x | join }}",
            "{{ x == x }}",
            "{{ raise_exception(x) }}",
        ];
        let of_two = [
            "{{ x == y }}",
            "{{ x < y }}",
            "{{ [x, y] | sort | length }}",
            "{{ [x, y] | unique | list | length }}",
            "{{ x in [y] }}",
            "{{ x is eq(y) }}",
            "{{ x ~ y }}",
        ];
        let cases = of_one.map(|used| (&one, used)).into_iter().chain(of_two.map(|used| (&two, used)));
        for (deep, used) in cases {
            // What matters is that there is an end.
            let _ = render(&format!("{deep}{used}"), json!([]));
        }
    }

    #[test]
    fn json_has_a_largest_depth() {
        let nested =
            |depth: usize| render(&format!("{{% set x = [] %}}{}{{{{ x | tojson }}}}", "{% set x = [x] %}".repeat(depth)), json!([]));
        assert_eq!(nested(200).unwrap(), "[".repeat(201) + &"]".repeat(201));
        assert_eq!(nested(201).unwrap_err().kind, TemplateErrorKind::Limit);
    }

    #[test]
    fn reasoning_has_all_its_names() {
        let source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }};{% endfor %}";
        let messages = json!([
            {"role": "assistant", "content": "c", "reasoning": "r"},
            {"reasoning_content": null, "thinking": "t"},
            {"reasoning_content": "c", "thinking": "t"},
            {"role": "user"},
        ]);
        assert_eq!(render(source, messages).as_deref(), Ok("rr;tt;tc;;"));
    }

    #[test]
    fn namespaces_keep_no_namespaces() {
        let start = "{% set ns = namespace(x=1) %}{% set other = namespace() %}";
        for set in [
            "ns.x = ns",
            "ns.x = [ns]",
            "ns.x = {'a': [[other]]}",
            "-ns.x=ns -",
            "a, ns.x = 1, ns",
            "(a, ns.x) = (1, [other])",
            "ns.x = ns if true else '%}='",
            "ns.x = [[1], 2] + [namespace()]",
            r"ns.x = ['a\'))', ns]",
        ] {
            let set = set.strip_prefix('-').map_or(format!("{{% set {set}%}}"), |set| format!("{{%- set {set}%}}"));
            let found = render(&format!("{start}{set}{{{{ ns }}}}"), json!([]));
            assert!(matches!(&found, Err(TemplateError { kind: TemplateErrorKind::Limit, .. })), "{set}: {found:?}");
        }
        // Filters of a text, and tags and raw text that end where one may not think.
        for source in [
            "{% set ns.x | default(ns, true) %}{% endset %}{{ ns }}",
            "{%- set a, (ns.x) | replace('=', '|') | default((ns, ns), true) -%}{% endset %}{{ ns }}",
            "{{ {'a': {}} ~ '{#' }}{% set ns.x = ns %}{{ ns }}{{ '#}' }}",
            "{%- if [{'a': ({}) }] -%}{{- {'%}': {'a':{}}} ~ '{%raw%}' }}{% set ns.x = ns %}{{ ns }}{% endif %}",
            "{% raw %}{% endraw ' %}{% endraw %}{% set ns.x = ns %}{{ ns }}{# ' %}#}",
            "{%- raw -%}{%-- endraw ' %}{%+ endraw -%}{% set ns.x = ns %}{{ ns }}{# ' %}#}",
            "{%raw%}{%\u{a0}endraw ' %}{%endraw+%}{% set ns.x = ns %}{{ ns }}{# ' %}#}",
        ] {
            let found = render(&format!("{start}{source}"), json!([]));
            assert!(matches!(&found, Err(TemplateError { kind: TemplateErrorKind::Limit, .. })), "{source}: {found:?}");
        }
        // What shows a namespace's later values, and loops, which show the next ones of what they go over.
        let breaks = "{% if loop.first %}{% set NS.x = loop %}{% else %}{{ loop.nextitem is none }}{% break %}{% endif %}";
        let of_loop = |ns: &str| format!("{{% for i in [1, 2, {ns}] %}}{}{{% endfor %}}", breaks.replace("NS", ns));
        for (source, kind) in [
            ("{% set ns.x = ns | items %}{{ ns }}", TemplateErrorKind::Render),
            ("{% set ns.x = ns.items() %}{{ ns }}", TemplateErrorKind::Syntax),
            ("{% set ns.x = [ns.values()] %}{{ ns }}", TemplateErrorKind::Syntax),
            ("{% set ns.x = [ns] | map('items') | list %}{{ ns }}", TemplateErrorKind::Render),
            ("{% set ns.x = ns | chain({}) %}{{ ns }}", TemplateErrorKind::Syntax),
            (&(of_loop("ns") + &of_loop("other") + "{{ ns == other }}"), TemplateErrorKind::Limit),
            (
                "{% for i in [1, 2, ns] %}{% if loop.first %}{% set ns.x = loop.items() %}{% else %}{{ ns }}{% endif %}{% endfor %}",
                TemplateErrorKind::Syntax,
            ),
        ] {
            let found = render(&format!("{start}{source}"), json!([]));
            assert!(matches!(&found, Err(e) if e.kind == kind), "{source}: {found:?}");
        }
        // A bracket that closes the one in which the value is looked at.
        for set in ["ns.x = ns) if (true", "ns.x = 1) + (ns", "ns.x = ", "ns.x = (ns"] {
            let found = render(&format!("{start}{{% set {set} %}}{{{{ ns }}}}"), json!([]));
            assert!(matches!(&found, Err(TemplateError { kind: TemplateErrorKind::Syntax, .. })), "{set}: {found:?}");
        }
        for (source, expected) in [
            ("{% set ns.x = ns.x + 1 if true else ')' -%} {{ ns.x }}", "2"),
            ("{% set ns.x = 1, (2, 3) %}{{ ns.x }}", "(1, (2, 3))"),
            (
                "{% set ns.x = {'a': 1}.items() %}{% set other.y = {'b': 2} | items %}{{ ns }}{{ other }}",
                "{'x': [('a', 1)]}{'y': [('b', 2)]}",
            ),
            ("{% set a, ns.x = 'a=b', [messages[0].role] %}{{ a }}{{ ns.x }}", "a=b['user']"),
            ("{% set ns.x | upper | replace('A', 'b=') %}a{% endset %}{{ ns.x }}", "b="),
            ("{%- set ns.x|upper-%} a {% endset %}{{ ns.x }}{% set ns.x %}b{% endset %}{{ ns.x }}", "A b"),
            (
                "{% raw %}{% set ns.x = 1 %}{% generation %}{% endraw %}{% set y = ns.x == 1 %}{{ y }}",
                "{% set ns.x = 1 %}{% generation %}True",
            ),
        ] {
            assert_eq!(render(&format!("{start}{source}"), json!([{"role": "user"}])).as_deref(), Ok(expected), "{source}");
        }
    }

    #[test]
    fn refusals_have_kind_and_line() {
        use TemplateErrorKind::*;
        for (source, kind, line) in [
            ("a\n{% if", Syntax, 2),
            ("{{ x.y.z }}", Syntax, 1),
            ("\n{{ ''.__class__ }}", Syntax, 2),
            ("{{ x['__class__'] }}", Syntax, 1),
            ("{{ {}['_\\\n_class__'] is defined }}", Syntax, 1),
            ("{% include '/etc/passwd' %}", Syntax, 1),
            ("{% import 'os' as os %}", Syntax, 1),
            ("{{ open('/etc/passwd') }}", Syntax, 1),
            ("{{ raise_exception('no') }}", Raised, 1),
            ("{% for i in range(1000000000000) %}{% endfor %}", Limit, 1),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", Limit, 1),
            ("\n{{ '\\N{BULLET}' }}", Syntax, 2),
            ("{{ '\\U+001F600' }}", Syntax, 1),
            ("{{ name_of_nothing | int }}", Syntax, 1),
            ("{{ name_of_nothing | float }}", Syntax, 1),
            ("{{ 1 | int(radix=3) }}", Render, 1),
            ("{{ 1 | float(radix=3) }}", Render, 1),
            ("{{ 'a b'.split(count=1) }}", Render, 1),
            ("{{ [] | tojson(width=1) }}", Render, 1),
            ("{{ [] | tojson(indent=1001) }}", Limit, 1),
            ("{{ [] | tojson(indent=99999999999999999999999) }}", Limit, 1),
            ("{{ [] | tojson(indent=2.0) }}", Render, 1),
            ("{{ [] | tojson(indent=[2]) }}", Render, 1),
            ("{{ [] | tojson(separators=',') }}", Render, 1),
            ("{{ [] | tojson(separators=(',', 1)) }}", Render, 1),
            ("{{ [] | tojson(separators=(',',)) }}", Render, 1),
            ("{{ [] | tojson(separators=(',', ':', '')) }}", Render, 1),
            ("{{ [] | tojson(separators={0: ',', 1: ':'}) }}", Render, 1),
            ("{% for i in range(1, 2, 0) %}{% endfor %}", Render, 1),
            ("{{ range(0, 200002, 2) | length }}", Limit, 1),
            ("{{ range(200002, 0, -2) | length }}", Limit, 1),
            ("{{ 'a'.partition('') }}", Render, 1),
            ("{{ 'a'.rsplit('') }}", Render, 1),
            ("a\rb\r\n{{ 'x\\\ny' }}\n{{ open() }}", Syntax, 5),
            ("{{ 'a' * 1000000000 }}", Limit, 1),
            ("{{ 'ab' | indent(18446744073709551615) }}", Limit, 1),
            ("{{ ('a\\n' * 99999) | indent('x' * 9999) }}", Limit, 1),
            ("{{ ('a\\n' * 99999) | indent(width='x' * 9999) }}", Limit, 1),
            ("{{ ('a' * 99999) | replace('a', 'x' * 9999) }}", Limit, 1),
            ("{{ 'a' | indent(width=1000000000000) }}", Limit, 1),
            ("{{ ('a\\n' * 99999) | indent(9999) }}", Limit, 1),
            ("{{ [1] | batch(1000000000000, 0) }}", Limit, 1),
            ("{{ [1] | slice(1000000000000) }}", Limit, 1),
            ("{{ '%0999999999999d' | format(1) }}", Limit, 1),
            ("{{ '%.999999999999999999999999f' | format(1.0) }}", Limit, 1),
            ("{{ '{:>999999999999}'.format('y') }}", Limit, 1),
            ("{{ '{:}>99999999999}'.format('y') }}", Limit, 1),
            ("{{ '{:{>99999999999}'.format('y') }}", Limit, 1),
            ("{{ '{{{:\u{e9}^99999999999}'.format('y') }}", Limit, 1),
            ("{{ '{a[}]:>99999999999}'.format(a={'}': 1}) }}", Limit, 1),
            ("{{ '{a[}][{]:99999999999}'.format(a={'}': {'{': 1}}) }}", Limit, 1),
            ("{{ '%(x%)99999999999s' | format({'x%': 1}) }}", Limit, 1),
            ("{{ '%%%(x%%)99999999999s' | format({'x%%': 1}) }}", Limit, 1),
            // The engine panics at these precisions and keys.
            ("{{ '%.65536f' | format(1) }}", Limit, 1),
            ("{{ '{:.65536f}'.format(1) }}", Limit, 1),
            ("{{ '%.65535e' | format(1.0) }}", Limit, 1),
            ("{{ '{:.65535e}'.format(1.0) }}", Limit, 1),
            ("{{ '%(\u{e9})s' | format({'\u{e9}': 1}) }}", Render, 1),
            ("{{ '%(\u{e9}' | format({}) }}", Render, 1),
            ("{{ '{a[\u{e9}]}'.format(a={'\u{e9}': 1}) }}", Render, 1),
            ("{% set ns = namespace(x=[]) %}{% for i in range(101) %}{% set ns.x = [ns.x] %}{% endfor %}", Limit, 1),
            ("{% set ns = namespace(x=range(1990) | list) %}{% for i in range(20) %}{% set ns.x = ns.x + [i] %}{% endfor %}", Limit, 1),
            (
                "{% set ns = namespace(x=[]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | pprint }}",
                Limit,
                1,
            ),
            ("{{ ('%9999s' * 9999) | format('y') }}", Limit, 1),
            ("{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}", Limit, 0),
        ] {
            let e = render(source, json!([])).unwrap_err();
            assert_eq!((e.kind, e.line), (kind, line), "{source}: {e}");
            let place = if line == 0 { "chat template: ".to_string() } else { format!("chat template, line {line}: ") };
            assert!(e.to_string().starts_with(&place), "{e}");
        }
        for hidden in [
            "{% raw %}a{% endraw %}{{ ''.__class__ }}",
            r"{{ '\'}}' ~ ''.__class__ }}",
            "{# it's #}{{ ''.__class__ }}",
            "{{ ''.__class__",
            "{{ {'a': {}} ~ '{#' }}{{ ''.__class__ }}{{ '#}' }}",
        ] {
            let e = render(hidden, json!([])).unwrap_err();
            assert_eq!((e.kind, e.message.as_str()), (Syntax, "undefined name `__class__`"), "{hidden}");
        }
        assert_eq!(render("{{ raise_exception('my words') }}", json!([])).unwrap_err().message, "my words");
        let nested = format!("{}{}", "{% if true %}".repeat(10_000), "{% endif %}".repeat(10_000));
        assert_eq!(render(&nested, json!([])).unwrap_err().kind, Syntax);
        assert_eq!(Template::new(&" ".repeat(SOURCE_BYTES_MAX + 1)).err().unwrap().kind, Limit);
    }

    /// Texts are of Python 3.11, `datetime(...).strftime(...)` in the C locale.
    #[test]
    fn times_are_written_as_python_writes_them() {
        use chrono::Datelike;
        for (now, format, expected) in [
            (time(2024, 12, 31), "%j %a %y", "366 Tue 24"),
            (time(2026, 2, 4), "%Y-%m-%d|%-d.%-m.|%e|%H %I %M %S %p|%f|%-I", "2026-02-04|4.2.| 4|09 09 30 00 AM|000000|9"),
            (time(2026, 2, 4), "%-p %-B %_a %-F %0T %-%|%_d %_H %0e", "AM February Wed 2026-02-04 09:30:00 %| 4  9 04"),
            (time(2026, 2, 14), "%B %b %h %A %a %w %u %j %-j", "February Feb Feb Saturday Sat 6 6 045 45"),
            (
                time(2026, 2, 14),
                "%F %T %X %R %D %x|%c|%Z%z|%n%t%%",
                "2026-02-14 09:30:00 09:30:00 09:30 02/14/26 02/14/26|Sat Feb 14 09:30:00 2026||\n\t%",
            ),
        ] {
            assert_eq!(time::strftime(now, format).unwrap(), expected, "{format}");
        }
        for unknown in ["%Q", "%q", "%v", "%+", "%.f", "%3f", "%-f", "%:z", "%-", "%"] {
            let e = time::strftime(time(2026, 2, 14), &format!("%Y {unknown}")).unwrap_err().to_string();
            assert!(e.contains("unknown directive %"), "{unknown}: {e}");
        }
        assert!(time::utc_now().year() >= 2024);
    }
}
