//! Chat templates.

use crate::Case;
use serde_json::json;

/// Refused by their text or by what a probe of them does.
pub const TEMPLATE: &[Case] = &[
    ("tmpl_syntax_error", 4, &["chat_template.jinja", "line 2"], |t| t.put("chat_template.jinja", "x\n{% if")),
    ("tmpl_10k_nested", 4, &["chat_template.jinja"], |t| {
        t.put("chat_template.jinja", format!("{}{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000)));
    }),
    ("tmpl_10k_parentheses", 4, &["chat_template.jinja"], |t| {
        t.put("chat_template.jinja", format!("{{{{ {}1{} }}}}", "(".repeat(10_000), ")".repeat(10_000)));
    }),
    ("tmpl_infinite", 7, &["chat_template.jinja"], |t| {
        t.put("chat_template.jinja", "{% for i in range(1000000000000) %}x{% endfor %}");
    }),
    ("tmpl_1GB", 7, &["chat_template.jinja"], |t| {
        t.put("chat_template.jinja", "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}");
    }),
    // Lists in lists, more than a stack of 8 MB can free.
    ("tmpl_deep_value", 7, &["chat_template.jinja", "50000 steps"], |t| {
        let grow = format!("{{% set x = {}x{} %}}", "[".repeat(60), "]".repeat(60));
        t.put("chat_template.jinja", format!("{{% set x = [] %}}{}", grow.repeat(1000)));
    }),
    ("tmpl_deep_value_kept", 7, &["chat_template.jinja", "the depth of a value"], |t| {
        let grow = "{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}";
        t.put("chat_template.jinja", format!("{{% set ns = namespace(x=[]) %}}{grow}"));
    }),
    ("tmpl_deep_value_printed", 7, &["chat_template.jinja", "the depth of a value"], |t| {
        let grow = "{% set x = [[[[[x]]]]] %}".repeat(30);
        t.put("chat_template.jinja", format!("{{% set x = [] %}}{grow}{{{{ x | pprint }}}}"));
    }),
    ("tmpl_endless_value", 7, &["chat_template.jinja", "namespaces and loops in a namespace"], |t| {
        t.put("chat_template.jinja", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}");
    }),
    ("tmpl_precision", 7, &["chat_template.jinja", "65536"], |t| t.put("chat_template.jinja", "{{ '%.65536f' | format(1) }}")),
    ("tmpl_ssti", 4, &["__class__"], |t| t.put("chat_template.jinja", "{{ ''.__class__.__mro__ }}")),
    ("tmpl_import", 4, &["import"], |t| t.put("chat_template.jinja", "{% import 'os' as os %}")),
    ("tmpl_include", 4, &["include"], |t| t.put("chat_template.jinja", "{% include '/etc/passwd' %}")),
    ("tmpl_bad_utf8", 4, &["byte 1"], |t| t.put("chat_template.jinja", b"a\xff")),
    ("tmpl_in_config", 4, &["tokenizer_config.json", "line 1"], |t| {
        t.remove("chat_template.jinja");
        t.json("tokenizer_config.json", &json!({"chat_template": [{"name": "default", "template": "{% if"}]}));
    }),
];

/// Templates that take all the memory that there is, where nothing bounds the process.
pub const TEMPLATE_MEMORY: &[Case] = &[
    ("tmpl_doubling", 7, &["chat_template.jinja", "takes too much"], |t| {
        let double = "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}";
        t.put("chat_template.jinja", format!("{{% set ns = namespace(x='x') %}}{double}{{{{ ns.x | length }}}}"));
    }),
    ("tmpl_replace", 7, &["chat_template.jinja", "takes too much"], |t| {
        let double = "{% set x = x + x %}".repeat(14);
        t.put("chat_template.jinja", format!("{{% set x = 'aa' %}}{double}{{{{ x | replace('a', x) | length }}}}"));
    }),
];
