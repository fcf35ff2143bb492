//! README and docs: verbs and flags that they name exist, and what they link to is there.
//!
//! In: the inline code and fenced code of `README.md`, `CHANGELOG.md`, `docs/*.md` and `docs/machines/*.md`, and scripts; the help of every
//! verb of the compiler, of executables and of the tools of this crate.

use rcompile::options;
use rcompile_tests::{build, golden};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Flags of other programs whose commands the documents show: dpkg, cargo, pip.
const OTHERS: [&str; 5] = ["--add-architecture", "--bin", "--example", "--release", "--no-binary"];
/// Scripts whose commands they show.
const SCRIPTS: [&str; 4] = ["x", "models/demo/make_text.py", "tests/peers/common.py", "tests/peers/convert.py"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Path below the root and text of each document.
fn documents() -> Vec<(String, String)> {
    let in_folder = |folder: &str| {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        entries.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}/{name}")).collect::<Vec<_>>()
    };
    let names = ["README.md", "CHANGELOG.md"].map(String::from).into_iter().chain(in_folder("docs")).chain(in_folder("docs/machines"));
    names.map(|name| (name.clone(), std::fs::read_to_string(root().join(name)).unwrap())).collect()
}

/// Fenced code and inline code of a document.
fn code(text: &str) -> Vec<&str> {
    let mut list = vec![];
    for (i, part) in text.split("\n```").enumerate() {
        match i % 2 {
            1 => list.push(part),
            _ => list.extend(part.split('`').skip(1).step_by(2)),
        }
    }
    list
}

/// Words `--like-this` of a text.
fn flags(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let words = text.split(|c: char| !is_part(c));
    words
        .filter(|w| w.strip_prefix("--").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase())))
        .map(String::from)
        .collect()
}

/// Help of `rcompile ARGS`.
fn help(args: &[&str]) -> String {
    let args = [&["rcompile"], args, &["--help"]].concat();
    match options::parse(args.into_iter().map(Into::into)).unwrap() {
        options::Parsed::Print(text) => text,
        options::Parsed::Run(command) => panic!("{command:?}"),
    }
}

/// Subcommands that a help text lists. (In a narrow terminal their descriptions take several lines.)
fn verbs(help: &str) -> Vec<&str> {
    let (_, list) = help.split_once("Commands:\n").unwrap();
    list.lines()
        .take_while(|line| !line.trim().is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|verb| !matches!(*verb, "" | "help"))
        .collect()
}

fn run(program: &Path, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{} {args:?}", program.display());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn flags_exist() {
    let exe = build(&golden("llama-gqa-tied"), "--no-tokenizer --compute f32 --buckets 1");
    let top = help(&[]);
    let mut texts: Vec<String> = verbs(&top).into_iter().map(|verb| help(&[verb])).chain([top.clone()]).collect();
    texts.push(help(&["cache", "clean"]));
    let of_exe = exe.text(["--help"]);
    texts.extend(verbs(&of_exe).into_iter().map(|verb| exe.text([verb, "--help"])));
    texts.extend([env!("CARGO_BIN_EXE_bench"), env!("CARGO_BIN_EXE_make-model")].map(|tool| run(Path::new(tool), &["--help"])));
    texts.push(run(Path::new(env!("CARGO_BIN_EXE_bench")), &["limits", "--help"]));
    texts.extend(SCRIPTS.map(|script| std::fs::read_to_string(root().join(script)).unwrap()));
    let known: BTreeSet<String> = texts.iter().flat_map(|text| flags(text)).chain(OTHERS.map(String::from)).collect();
    let (mut unknown, mut found) = (vec![], 0);
    for (name, text) in documents() {
        let named: BTreeSet<String> = code(&text).into_iter().flat_map(flags).collect();
        found += named.len();
        unknown.extend(named.difference(&known).map(|flag| format!("{name}: {flag}")));
    }
    assert!(unknown.is_empty(), "no help names these:\n{}", unknown.join("\n"));
    assert!(found > 100, "{found} flags");
}

#[test]
fn verbs_exist() {
    let top = help(&[]);
    let known = verbs(&top);
    let mut unknown = vec![];
    let mut found = 0;
    for (name, text) in documents() {
        for code in code(&text) {
            for command in code.split("rcompile ").skip(1) {
                let word = command.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
                // `rcompile 0.1.0`, `rcompile --help`.
                if word.starts_with(|c: char| c.is_ascii_lowercase()) {
                    found += 1;
                    if !known.contains(&word) {
                        unknown.push(format!("{name}: rcompile {word}"));
                    }
                }
            }
        }
    }
    assert!(unknown.is_empty(), "no verbs:\n{}", unknown.join("\n"));
    assert!(found > 20, "{found} commands");
}

#[test]
fn links_lead_somewhere() {
    let mut broken = vec![];
    let mut found = 0;
    for (name, text) in documents() {
        let file = root().join(&name);
        for link in text.split("](").skip(1) {
            let target = link.split([')', ' ']).next().unwrap_or_default();
            if target.contains("://") {
                continue;
            }
            found += 1;
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let to = if path.is_empty() { file.clone() } else { file.with_file_name("").join(path) };
            let has_heading = |text: String| text.lines().filter(|l| l.starts_with('#')).any(|l| anchor(l) == heading);
            if !to.exists() || !heading.is_empty() && !std::fs::read_to_string(&to).is_ok_and(has_heading) {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
    assert!(found > 20, "{found} links");
}

/// What a heading is called in links.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}
