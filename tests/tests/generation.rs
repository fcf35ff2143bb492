//! Generation on the bundled model: what `chat` keeps between messages, what a seed decides, and what `--ctx-size` does.

use rcompile_tests::checks::bits;
use rcompile_tests::{Exe, build, model_dir, read_json};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model")
}

/// The bundled model with a chat template that joins all messages.
fn joins_messages() -> Exe {
    let model = model_dir("demo-joins-messages", |dir| {
        for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(demo().join(file), dir.join(file)).unwrap();
        }
        let mut config = read_json(&demo().join("tokenizer_config.json"));
        config["chat_template"] = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}".into();
        fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    });
    build(&model, "--buckets 1,8,64 --ctx-size 48 --compute f32")
}

/// Each answer is that of the whole conversation as one message: what `chat` has of keys and values is as good as new, behind answers that
/// `-n` cut, and behind a conversation that began anew.
#[test]
fn chat_answers_the_whole_conversation() {
    let exe = joins_messages();
    let messages =
        ["Once upon a time there was a little girl named Lily.", " One day she", " Then a big dog", " They went to the park and"];
    let said = messages.map(|message| format!("{message}\n")).concat();
    let chat = exe.run_with(["chat", "--temp", "0", "-n", "9"], &said);
    assert_eq!(chat.code, Some(0), "{}", chat.stderr);
    let answers: Vec<&str> = chat.stdout.lines().collect();
    assert_eq!(answers.len(), messages.len(), "an answer is one line here: {:?}", chat.stdout);
    let mut conversation = String::new();
    let mut anew = 0;
    for (message, answer) in messages.iter().zip(answers) {
        conversation += message;
        let report = |text: &str| exe.run(["generate", "--chat", "--json", "--temp", "0", "-n", "9", "-p", text]);
        let mut whole = report(&conversation);
        if whole.code == Some(7) {
            // All of it is too long: what is left is the message.
            (conversation, anew) = ((*message).to_string(), anew + 1);
            whole = report(&conversation);
        }
        let whole: Value = serde_json::from_str(&whole.stdout).unwrap();
        assert_eq!(whole["text"], answer, "{conversation:?}");
        conversation += answer;
    }
    assert_eq!((1, 1), (anew, chat.stderr.matches("anew").count()), "{}", chat.stderr);
}

/// The same seed draws the same tokens, with any number of threads; others draw others; without a temperature it decides nothing.
#[test]
fn seeds() {
    let exe = joins_messages();
    let tokens = |options: &[&str]| {
        let args = [&["generate", "-n", "24", "-p", "Once upon a time"], options].concat();
        exe.json(&args)["tokens"].clone()
    };
    let of = |seed: &str, threads: &str| tokens(&["--temp", "1", "-s", seed, "-t", threads]);
    let found = ["1", "2", "3"].map(|seed| of(seed, "1"));
    assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2], "{found:?}");
    for threads in ["1", "2", "3"] {
        assert_eq!(of("1", threads), found[0], "{threads} threads");
    }
    assert_ne!(tokens(&["--temp", "0"]), found[0]);
    assert_eq!(tokens(&["--temp", "0", "-s", "1"]), tokens(&["--temp", "0", "-s", "2"]));
}

/// `--ctx-size` is the number of positions that there are, and changes nothing about those.
#[test]
fn context_sizes() {
    let default = build(&demo(), "--buckets 1,8,64 --compute f32");
    let trained = read_json(&demo().join("config.json"))["max_position_embeddings"].clone();
    let size = |exe: &Exe| exe.json(["info"])["ctx_size"].clone();
    assert_eq!(size(&default), trained);
    let short = joins_messages();
    assert_eq!(size(&short), 48);
    let tokens: Vec<u32> = (0..48).map(|i| 5 + i * 37 % 1000).collect();
    assert_eq!(bits(&short.logits(&tokens, &[])), bits(&default.logits(&tokens, &[])));
    let beyond = rcompile_tests::joined(&[&tokens[..], &[5]].concat());
    let refused = short.run(["logits", "--tokens", &beyond]);
    assert!(refused.code == Some(7) && refused.stderr.contains("49 positions") && refused.stderr.contains("48"), "{}", refused.stderr);
    assert_eq!(default.run(["logits", "--tokens", &beyond]).code, Some(0));
}
