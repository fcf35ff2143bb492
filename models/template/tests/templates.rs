//! Every chat template of the shared assets renders byte for byte as the reference recorded it.

use rcompile_template::{NaiveDate, Template, TemplateInput};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

#[test]
fn renderings_equal_the_reference() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets/chat_templates");
    if !folder.is_dir() {
        assert!(std::env::var_os("CI").is_none(), "{} is missing, and on CI nothing is skipped", folder.display());
        return eprintln!("skipped: {} is missing", folder.display());
    }
    let now = NaiveDate::from_ymd_opt(2026, 2, 14).and_then(|day| day.and_hms_opt(9, 30, 0));
    let (mut cases, mut wrong) = (0, Vec::new());
    for family in std::fs::read_dir(folder).unwrap() {
        let family = family.unwrap().path();
        let json = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(family.join(name)).unwrap()).unwrap() };
        let source = std::fs::read_to_string(family.join("chat_template.jinja")).unwrap();
        let template = Template::new(&source).unwrap_or_else(|e| panic!("{}: {e}", family.display()));
        let tokens: BTreeMap<String, String> = serde_json::from_value(json("special_tokens.json")).unwrap();
        for case in json("reference.json")["cases"].as_array().unwrap() {
            let mut extra = case.as_object().unwrap().clone();
            extra.retain(|key, _| !["name", "messages", "tools", "add_generation_prompt", "text", "error"].contains(&key.as_str()));
            let input = TemplateInput {
                messages: case["messages"].clone(),
                tools: case.get("tools").cloned(),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                special_tokens: &tokens,
                extra: Some(Value::Object(extra)),
                now,
            };
            let found = template.render(&input);
            let label = format!("{} / {}", family.file_name().unwrap().display(), case["name"]);
            match (&found, case["text"].as_str(), case["error"].as_str()) {
                (Ok(text), Some(expected), _) if text == expected => {}
                // The reference names the exception's class before the template's own words.
                (Err(e), None, Some(error)) if error.contains(&e.message) => {}
                _ => wrong.push(format!("{label}: expected {case}\nfound {found:?}")),
            }
            cases += 1;
        }
    }
    assert!(wrong.is_empty(), "{} of {cases} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(cases >= 50, "only {cases} cases");
}
