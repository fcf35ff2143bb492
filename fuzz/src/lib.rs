//! What the fuzz targets share: seeds, a directory in memory, the rules for lines that users see, and a mutator of JSON.
//!
//! A target is `fuzz_target!(init: start(seeds()), |data| { .. })`. What it panics on is a finding; panics that `rcompile-models` catches itself do
//! not count, as its hook stands before libFuzzer's, which aborts.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Map, Value, json};

/// Before libFuzzer starts: its handler of signals gets a stack of its own, so that it can tell of the main thread's stack that overflowed (that
/// of a thread that renders a template ends the process without an artifact), and the seeds are written into the directory that
/// `RCOMPILE_FUZZ_CORPUS` names.
pub fn start(seeds: impl IntoIterator<Item = Vec<u8>>) {
    const STACK_BYTES: usize = 1 << 20;
    let stack = Box::leak(vec![0u8; STACK_BYTES].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK_BYTES };
    // SAFETY: the stack is never freed; the action is the default one with a flag that libFuzzer keeps when it sets its own.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_flags = libc::SA_ONSTACK;
        assert_eq!(libc::sigaltstack(&stack, std::ptr::null_mut()), 0);
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
    }
    let Some(dir) = std::env::var_os("RCOMPILE_FUZZ_CORPUS").map(PathBuf::from) else { return };
    for (index, seed) in seeds.into_iter().enumerate() {
        fs::write(dir.join(format!("seed-{index:03}")), seed).unwrap();
    }
}

/// A directory of this process, under `TMPDIR`, which should be in memory.
pub fn scratch() -> PathBuf {
    let path = std::env::temp_dir().join(format!("rcompile-fuzz-{}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

/// A file of the repository, by its path from the root.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Errors and warnings are one line of at most 500 bytes, which moves no cursor.
pub fn check_line(line: &impl Display, begin: &str) {
    let line = line.to_string();
    assert!(line.starts_with(begin) && line.contains("]: "), "{line:?}");
    assert!(line.len() <= 500, "{} bytes: {line:?}", line.len());
    assert!(!line.chars().any(char::is_control) && !line.contains("panicked"), "{line:?}");
}

/// The line of a refusal: also what was expected and what was found.
pub fn check_error(error: &rcompile_models::Error) {
    check_line(error, &format!("error[E{}-", error.exit_code()));
    assert!((3..=7).contains(&error.exit_code()), "{error}");
    let line = error.to_string();
    assert!(line.contains(", expected ") && line.contains(", found ") || line.ends_with("..."), "{line:?}");
}

/// The short texts between quotes in these source files: names of fields, types and tensors that the code looks for.
pub fn words(files: &[&str]) -> Vec<String> {
    let mut words = Vec::new();
    for file in files {
        let text = fs::read_to_string(repository(file)).unwrap();
        let quoted = text.split('"').skip(1).step_by(2);
        words.extend(quoted.filter(|w| (1..=40).contains(&w.len()) && !w.contains([' ', '{', '\\', '\n'])).map(str::to_string));
    }
    words.sort();
    words.dedup();
    words
}

/// Numbers without a pattern, the same for the same seed.
pub struct Random(u64);

impl Random {
    /// Of this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }
    /// The next 64 bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
    /// One of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// Mutates the JSON in `data[..size]` as a tree, so that it stays JSON, or in one of four cases, and where it is none, as bytes. Keys and texts
/// come from `words` and from the document. Returns the new size.
pub fn mutate_json(data: &mut [u8], size: usize, max_size: usize, seed: u32, words: &[impl AsRef<str>]) -> usize {
    let mut random = Random::new(seed.into());
    let parsed = serde_json::from_slice::<Value>(&data[..size]);
    let (Ok(mut root), true) = (parsed, random.below(4) > 0) else { return fuzzer_mutate(data, size, max_size) };
    let mut texts: Vec<String> = words.iter().map(|w| w.as_ref().to_string()).collect();
    collect_texts(&root, &mut texts);
    for _ in 0..1 + random.below(3) {
        let donor = node(&mut root, &mut random).clone();
        let target = node(&mut root, &mut random);
        mutate_value(target, donor, &texts, &mut random);
    }
    let text = root.to_string();
    if text.len() > max_size {
        return fuzzer_mutate(data, size, max_size);
    }
    data[..text.len()].copy_from_slice(text.as_bytes());
    text.len()
}

fn collect_texts(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            texts.push(key.clone());
            collect_texts(item, texts);
        }),
        _ => {}
    }
}

/// A node of the tree: down from the root, stopping by chance.
fn node<'a>(value: &'a mut Value, random: &mut Random) -> &'a mut Value {
    let children = match &*value {
        Value::Array(items) => items.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if children == 0 || random.below(5) == 0 {
        return value;
    }
    let index = random.below(children);
    let child = match value {
        Value::Array(items) => items.get_mut(index),
        Value::Object(map) => map.values_mut().nth(index),
        _ => None,
    };
    node(child.unwrap(), random)
}

fn mutate_value(value: &mut Value, donor: Value, texts: &[String], random: &mut Random) {
    let new = if random.below(2) == 0 { donor } else { fresh(texts, random) };
    match (value, random.below(6)) {
        (Value::Array(items), 0) if !items.is_empty() => drop(items.remove(random.below(items.len()))),
        (Value::Array(items), 1 | 2) => items.insert(random.below(items.len() + 1), new),
        (Value::Array(items), 3) if !items.is_empty() => {
            let (a, b) = (random.below(items.len()), random.below(items.len()));
            items.swap(a, b);
        }
        (Value::Object(map), 0) if !map.is_empty() => {
            let key = map.keys().nth(random.below(map.len())).cloned().unwrap();
            map.shift_remove(&key);
        }
        (Value::Object(map), 1 | 2) => drop(map.insert(random.pick(texts).clone(), new)),
        (Value::Object(map), 3) if !map.is_empty() => {
            let key = map.keys().nth(random.below(map.len())).cloned().unwrap();
            let moved = map.shift_remove(&key).unwrap_or_default();
            map.insert(random.pick(texts).clone(), moved);
        }
        (Value::String(text), 0) => text.push_str(random.pick::<String>(texts)),
        (Value::String(text), 1 | 2) if !text.is_empty() => {
            let at = text.floor_char_boundary(random.below(text.len()));
            let piece = ["", "\u{0}", "é", "\u{202e}", "(", ")", "[", "+", "*", "\\", "|", "a", " ", "{2,}", "?", "\u{fffd}", "▁"];
            text.replace_range(at..text.ceil_char_boundary(at + 1), random.pick::<&str>(&piece));
        }
        (Value::Number(number), 0 | 1) if number.is_u64() => {
            let n = number.as_u64().unwrap_or_default();
            *number = [n.wrapping_add(1), n.wrapping_sub(1), n.wrapping_mul(2), n / 2][random.below(4)].into();
        }
        (value, _) => *value = new,
    }
}

/// Values at the edges of what programs expect.
fn fresh(texts: &[String], random: &mut Random) -> Value {
    const WHOLE: [u64; 17] = [0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 65_536, 1 << 24, 1 << 31, u32::MAX as u64, 1 << 53, u64::MAX];
    const FLOATS: [f64; 12] = [0.0, -0.0, 0.5, -1.0, 1e-45, 1e-5, 2.5, 1e30, 3.5e38, 1e308, -1e308, 10_000.0];
    match random.below(9) {
        0 | 1 => (*random.pick(&WHOLE)).into(),
        2 => (*random.pick(&FLOATS)).into(),
        3 => (-(random.below(1000) as i64)).into(),
        4 | 5 => random.pick(texts).clone().into(),
        6 => random.pick(&[json!(null), json!(true), json!(false)]).clone(),
        7 => random.pick(&[json!([]), json!({}), json!(""), json!("\u{0}"), json!([[]])]).clone(),
        _ => {
            let mut map = Map::new();
            map.insert(random.pick(texts).clone(), random.pick(texts).clone().into());
            Value::Object(map)
        }
    }
}
