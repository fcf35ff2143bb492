//! Files that are missing, of the wrong kind, outside of the directory, or whose bytes are no JSON.

use crate::Case;
use crate::toy::Toy;

/// The directory and what its names lead to.
pub const FILES: &[Case] = &[
    ("config_missing", 3, &["config.json"], |t| t.remove("config.json")),
    ("config_is_dir", 3, &["config.json", "not a regular file"], |t| {
        t.remove("config.json");
        std::fs::create_dir(t.file("config.json")).unwrap();
    }),
    ("config_is_fifo", 3, &["config.json", "not a regular file"], |t| fifo(t, "config.json")),
    ("weights_are_fifo", 3, &["model.safetensors", "not a regular file"], |t| fifo(t, "model.safetensors")),
    ("symlink_cycle", 3, &["model.safetensors", "ELOOP"], |t| {
        t.link("a", "model.safetensors");
        t.link("b", "a");
        t.link("a", "b");
    }),
    ("symlink_escape", 3, &["chat_template.jinja", "points outside"], |t| {
        std::fs::write(t.path.join("../secret"), "hunter2").unwrap();
        t.link("../secret", "chat_template.jinja");
    }),
    ("symlink_absolute", 3, &["config.json", "points outside"], |t| t.link("/etc/hostname", "config.json")),
    ("tok_missing", 3, &["tokenizer.json"], |t| t.remove("tokenizer.json")),
    ("weights_missing", 3, &["model.safetensors"], |t| t.remove("model.safetensors")),
];

/// The bytes of `config.json`.
pub const CONFIG_BYTES: &[Case] = &[
    ("config_0_bytes", 4, &["config.json"], |t| t.put("config.json", "")),
    ("config_truncated", 4, &["config.json: ", "1:10"], |t| {
        let bytes = t.get("config.json");
        t.put("config.json", &bytes[..100]);
    }),
    ("config_trailing_garbage", 4, &["trailing", "1:"], |t| {
        let bytes = t.get("config.json");
        t.put("config.json", [&bytes, &b"xyz"[..]].concat());
    }),
    ("config_bad_utf8", 4, &["byte 0"], |t| t.put("config.json", b"\xff\xfe{\0}\0")),
    ("config_top_level_array", 4, &["expected object"], |t| t.put("config.json", "[]")),
    ("config_nested_1e5", 4, &["config.json"], |t| t.put("config.json", "[".repeat(100_000))),
    ("config_duplicate_key", 4, &["hidden_size", "duplicate key"], |t| {
        t.put("config.json", r#"{"hidden_size": 64, "hidden_size": 128}"#);
    }),
    ("config_100MB", 7, &["config.json", "too large"], |t| {
        std::fs::File::create(t.file("config.json")).unwrap().set_len(100 << 20).unwrap();
    }),
    ("config_nan_literal", 4, &["rope_theta"], |t| t.put("config.json", r#"{"rope_theta": NaN}"#)),
    ("config_1e400", 4, &["rms_norm_eps"], |t| t.put("config.json", r#"{"rms_norm_eps": 1e400}"#)),
];

pub(crate) fn fifo(t: &Toy, name: &str) {
    t.remove(name);
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, t.file(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
}
