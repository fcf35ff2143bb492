use super::*;
use std::time::Instant;

/// Reference tokenizers live outside the repository; on CI their absence is a failure.
fn reference_folders() -> Vec<PathBuf> {
    let root = std::env::var_os("RCOMPILE_ASSETS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/assets"), PathBuf::from);
    let mut folders: Vec<PathBuf> = match std::fs::read_dir(root.join("tokenizers")) {
        Ok(entries) => entries.flatten().map(|e| e.path()).collect(),
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "{}: {e}", root.join("tokenizers").display());
            eprintln!("skipped: no reference tokenizers at {}", root.display());
            Vec::new()
        }
    };
    folders.sort();
    folders
}

fn ids(value: &Value) -> Vec<u32> {
    Vec::deserialize(value).unwrap()
}

#[test]
fn every_reference_tokenizer_gives_exact_ids_and_text() {
    for folder in reference_folders() {
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let bytes = compact(&json).unwrap();
        let begin = Instant::now();
        let text = Text::load(&bytes).unwrap();
        let loaded = begin.elapsed();
        eprintln!("{}: {} bytes, load {loaded:?}", folder.display(), bytes.len());
        let reference: Value = serde_json::from_slice(&std::fs::read(folder.join("reference.json")).unwrap()).unwrap();
        for case in reference["cases"].as_array().unwrap() {
            let input = case["text"].as_str().unwrap();
            let with = ids(&case["ids"]);
            let at = format!("{}: {input:?}", folder.display());
            assert_eq!(text.encode(input, true).unwrap(), with, "{at}");
            assert_eq!(text.encode(input, false).unwrap(), ids(&case["ids_no_special"]), "{at}");
            assert_eq!(text.decode(&with, false).unwrap(), case["decoded"], "{at}");
            assert_eq!(text.decode(&with, true).unwrap(), case["decoded_skip_special"], "{at}");
            let mut stream = Stream::default();
            let mut joined = String::new();
            for &id in &with {
                joined += &stream.push(&text, id).unwrap();
            }
            joined += &stream.finish(&text).unwrap();
            let whole = text.decode(&with, true).unwrap();
            assert_eq!(joined, whole, "{at}");
            // Behind a prompt, unless that ends within a character.
            for cut in [1, with.len() / 3, with.len() / 2, with.len().saturating_sub(1)] {
                let (prompt, answer) = with.split_at(cut.min(with.len()));
                let mut joined = text.decode(prompt, true).unwrap();
                if joined.ends_with('\u{fffd}') {
                    continue;
                }
                let mut stream = Stream::behind(&text, prompt).unwrap();
                for &id in answer {
                    joined += &stream.push(&text, id).unwrap();
                }
                joined += &stream.finish(&text).unwrap();
                assert_eq!(joined, whole, "{at}, from token {cut}");
            }
        }
    }
}

#[test]
fn flat_models_equal_the_crate_on_random_text() {
    // Pieces that meet merges, byte fallback, unknown characters, added tokens and spaces in many orders.
    let pieces = [
        "the",
        " ",
        "  ",
        "ing",
        "é",
        "日本",
        "🙂",
        "\n",
        "\t",
        "<|im_start|>",
        "</s>",
        "123456",
        "'s",
        "ß",
        "\u{0301}",
        "\u{200d}",
        "a",
        "Z",
        "!!",
        "=>",
        "ﬁ",
        "\u{0}",
    ];
    for folder in reference_folders() {
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let bytes = compact(&json).unwrap();
        let text = Text::load(&bytes).unwrap();
        let judge = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let mut seed = 1u64;
        for _ in 0..300 {
            let mut input = String::new();
            for _ in 0..12 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                input += pieces[(seed >> 40) as usize % pieces.len()];
            }
            let expected = judge.encode_fast(input.as_str(), true).unwrap();
            assert_eq!(text.encode(&input, true).unwrap(), expected.get_ids(), "{}: {input:?}", folder.display());
        }
    }
}

fn toy(model: &str, added: &str) -> String {
    format!(
        r#"{{"version":"1.0","truncation":{{"direction":"Left","max_length":4,"strategy":"LongestFirst","stride":0}},
        "padding":null,"added_tokens":[{added}],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
        "decoder":{{"type":"Fuse"}},"model":{model}}}"#
    )
}

fn added(id: u32, content: &str) -> String {
    format!(r#"{{"id":{id},"content":"{content}","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}"#)
}

const ABC: &str = r#"{"type":"BPE","vocab":{"a":0,"b":1,"c":2,"ab":3,"abc":4},"merges":["a b",["ab","c"]]}"#;

#[test]
fn merges_follow_rank_and_position() {
    let bytes = compact(toy(ABC, &added(5, "<s>")).as_bytes()).unwrap();
    let text = Text::load(&bytes).unwrap();
    assert_eq!(text.encode("abcabac", true).unwrap(), [4, 3, 0, 2]);
    assert_eq!(text.encode("<s>ab", true).unwrap(), [5, 3]);
    assert!(text.encode("", true).unwrap().is_empty());
    assert_eq!(text.decode(&[4, 5, 3], true).unwrap(), "abcab");
    assert_eq!(text.decode(&[4, 5, 99], false).unwrap(), "abc<s>");
    assert_eq!((text.special_to_id("<s>"), text.special_to_id("a")), (Some(5), None));
    // Ids that go down, and a line among the merges that is none.
    let model = r##"{"type":"BPE","vocab":{"a":3,"ab":2,"b":1,"c":0},"merges":["#version: 0.2","a b"]}"##;
    let bytes = compact(toy(model, "").as_bytes()).unwrap();
    assert_eq!(Text::load(&bytes).unwrap().encode("cabba", true).unwrap(), [0, 2, 1, 3]);
}

#[test]
fn flat_bpe_equals_the_crate_on_small_models() {
    let parts = |settings: &str, vocab: &str, merges: &str| format!(r#"{{"type":"BPE",{settings},"vocab":{vocab},"merges":{merges}}}"#);
    let words = |settings: &str, more: &str| parts(&format!(r#""unk_token":"a",{settings}"#), &format!(r#"{{"a":0,"b":1,{more}}}"#), "[]");
    let unknown = |fuse: bool| parts(&format!(r#""unk_token":"<unk>","fuse_unk":{fuse}"#), r#"{"<unk>":0,"a":1,"b":2}"#, "[]");
    let bytes = |fuse: bool| {
        let vocab = r#"{"<unk>":0,"a":1,"<0xC3>":2,"<0xA9>":3}"#;
        parts(&format!(r#""unk_token":"<unk>","byte_fallback":true,"fuse_unk":{fuse}"#), vocab, "[]")
    };
    for (model, input, ids) in [
        (words(r###""continuing_subword_prefix":"##""###, r###""##b":2"###), "abb", &[0, 2, 2][..]),
        (words(r#""end_of_word_suffix":"</w>""#, r#""b</w>":2"#), "abb", &[0, 1, 2]),
        (words(r#""end_of_word_suffix":"</w>""#, r#""b</w>":2"#), "b", &[2]),
        (words(r###""continuing_subword_prefix":"##","end_of_word_suffix":"</w>""###, r###""##b</w>":2,"##b":3"###), "bbb", &[1, 3, 2]),
        (unknown(false), "xya zb", &[0, 0, 1, 0, 0, 2]),
        (unknown(true), "xya zb", &[0, 1, 0, 2]),
        (unknown(true), "aéüx", &[1, 0]),
        (bytes(false), "aéèxa", &[1, 2, 3, 0, 0, 1]),
        (bytes(true), "aéèxa", &[1, 2, 3, 0, 1]),
    ] {
        let json = toy(&model, "");
        let bytes = compact(json.as_bytes()).unwrap();
        let found = Text::load(&bytes).unwrap().inner.encode(input, true).unwrap();
        let mut judge = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        judge.with_truncation(None).unwrap();
        let expected = judge.encode(input, true).unwrap();
        assert_eq!(found.get_ids(), ids, "{model}: {input}");
        assert_eq!((found.get_ids(), found.get_offsets()), (expected.get_ids(), expected.get_offsets()), "{model}: {input}");
    }
}

/// Ids and places of a text, as the crate has them, and its errors; by a model of this kind.
fn assert_as_the_crate(kind: u8, json: &str, input: &str) {
    let bytes = compact(json.as_bytes()).unwrap();
    assert_eq!(bytes[8], kind);
    let found = Text::load(&bytes).unwrap().inner.encode(input, true);
    let mut judge = tokenizers::Tokenizer::from_bytes(json).unwrap();
    judge.with_truncation(None).unwrap();
    match (found, judge.encode(input, true)) {
        (Ok(found), Ok(expected)) => {
            assert_eq!((found.get_ids(), found.get_offsets()), (expected.get_ids(), expected.get_offsets()), "{json}: {input}")
        }
        (Err(_), Err(_)) => {}
        (found, expected) => panic!("{json}: {input}: {found:?}, the crate {expected:?}"),
    }
}

#[test]
fn flat_unigram_equals_the_crate_on_small_models() {
    let unigram = |settings: &str, vocab: &str| toy(&format!(r#"{{"type":"Unigram",{settings},"vocab":{vocab}}}"#), "");
    let some = r#"[["<unk>",0],["a",-1.5],["b",-2],["ab",-3.5],["aba",-3],["é",-4.25]]"#;
    let of_bytes = r#"[["<unk>",0],["a",-1],["<0xC3>",-5],["<0xA8>",-5],["<0xE6>",-6],["ab",-2]]"#;
    for (json, input) in [
        // Sums that are equal, runs of unknown characters, and one that has a text of its own.
        (unigram(r#""unk_id":0"#, some), "ababaébxya日本b"),
        (unigram(r#""unk_id":0,"byte_fallback":false"#, some), "<unk>x<unk>"),
        (unigram(r#""unk_id":null"#, some), "abé"),
        (unigram(r#""unk_id":null"#, some), "abx"),
        (unigram(r#""unk_id":2"#, r#"[["xy",-20],["a",-1],["?",-3]]"#), "axyb?x"),
        // The same text twice, an empty one, scores above 0.
        (unigram(r#""unk_id":0"#, r#"[["<unk>",0],["a",-1],["aa",3],["",-1],["a",-9],["aa",-30]]"#), "aaaxa"),
        (unigram(r#""unk_id":0,"byte_fallback":true"#, of_bytes), "aèbab日è"),
        (unigram(r#""unk_id":0,"byte_fallback":true"#, of_bytes), "èèa"),
        (unigram(r#""unk_id":0"#, some), ""),
        // Without a name of its kind.
        (toy(r#"{"unk_id":0,"vocab":[["<unk>",0],["a",-1.5]]}"#, ""), "aab"),
    ] {
        assert_as_the_crate(KIND_FLAT_UNIGRAM, &json, input);
    }
    for (settings, vocab) in [(r#""unk_id":1"#, r#"[["a",0]]"#), (r#""unk_id":0"#, r#"[["a"]]"#), (r#""unk_id":0"#, r#"{"a":0}"#)] {
        assert_eq!(compact(unigram(settings, vocab).as_bytes()).unwrap_err().exit_code(), 4, "{settings} {vocab}");
    }
}

#[test]
fn flat_unigram_equals_the_crate_on_random_models() {
    let mut seed = 7u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    let alphabet = ["a", "b", "c", "é", "日", "▁"];
    for _ in 0..400 {
        let mut text = |most: usize| (0..random(most)).map(|_| alphabet[random(alphabet.len())]).collect::<String>();
        let mut vocab = vec![("<unk>".to_string(), 0.0)];
        vocab.extend((0..40).map(|_| (text(5), 0.0)));
        let inputs: Vec<String> = (0..4).map(|_| text(30)).collect();
        // Few scores, so that many sums are equal.
        vocab.iter_mut().skip(1).for_each(|(_, score)| *score = -0.5 * random(6) as f64);
        let model = serde_json::json!({"type": "Unigram", "unk_id": 0, "byte_fallback": random(2) == 0, "vocab": vocab});
        inputs.iter().for_each(|input| assert_as_the_crate(KIND_FLAT_UNIGRAM, &toy(&model.to_string(), ""), input));
    }
}

#[test]
fn flat_wordpiece_equals_the_crate() {
    let model = |most: usize, prefix: &str, vocab: &serde_json::Map<String, Value>| {
        let mut model = serde_json::json!({"type": "WordPiece", "unk_token": "[UNK]", "max_input_chars_per_word": most});
        (model["continuing_subword_prefix"], model["vocab"]) = (prefix.into(), vocab.clone().into());
        toy(&model.to_string(), "")
    };
    let vocab = |tokens: &[&str]| tokens.iter().zip(0u32..).map(|(token, id)| (token.to_string(), id.into())).collect();
    let some = vocab(&["[UNK]", "a", "##b", "ab", "##é", "##bé", "é"]);
    for input in ["abéb", "abbb", "éé", "ac", "c", "", "abbéé", "##b", "aaaaa"] {
        assert_as_the_crate(KIND_FLAT_WORDPIECE, &model(100, "##", &some), input);
        assert_as_the_crate(KIND_FLAT_WORDPIECE, &model(4, "##", &some), input);
        assert_as_the_crate(KIND_FLAT_WORDPIECE, &model(100, "", &some), input);
    }
    // Nothing stands for what is not known.
    let bare = vocab(&["a", "##a"]);
    ["aaa", "ab"].iter().for_each(|input| assert_as_the_crate(KIND_FLAT_WORDPIECE, &model(100, "##", &bare), input));
    let mut seed = 3u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    let alphabet = ["a", "b", "é", "日"];
    for _ in 0..300 {
        let mut text = |most: usize| (0..1 + random(most)).map(|_| alphabet[random(alphabet.len())]).collect::<String>();
        let pieces = (0..24).map(|i| if i % 2 == 0 { text(3) } else { format!("##{}", text(3)) });
        let tokens: std::collections::BTreeSet<String> = pieces.chain(["[UNK]".to_string()]).collect();
        let some = vocab(&tokens.iter().map(String::as_str).collect::<Vec<_>>());
        (0..4).map(|_| text(8)).for_each(|input| assert_as_the_crate(KIND_FLAT_WORDPIECE, &model(7, "##", &some), &input));
    }
}

/// A vocabulary of words without one for those that it lacks.
#[test]
fn a_tokenizer_may_not_know_every_text() {
    let bytes = beginning(r#"{"type": "WordLevel", "vocab": {"one": 0, "two": 1, "<s>": 2}, "unk_token": "<unk>"}"#, 2);
    let text = Text::load(&bytes).unwrap();
    assert_eq!(text.special_around().unwrap(), (vec![2], vec![]));
    assert_eq!(text.encode("two", true).unwrap(), [2, 1]);
    assert_eq!(text.encode("three", true).unwrap_err().exit_code(), 7);
    // Its first word is the leading token itself.
    let bytes = beginning(r#"{"type": "WordLevel", "vocab": {"<s>": 0, "one": 1, "two": 2}, "unk_token": "<unk>"}"#, 0);
    let text = Text::load(&bytes).unwrap();
    assert_eq!(text.special_around().unwrap(), (vec![0], vec![]));
    // What is not known has no tokens, and is no error.
    let bytes = beginning(r#"{"type":"BPE","vocab":{"<s>":0,"A":1,"B":2},"merges":[]}"#, 0);
    let text = Text::load(&bytes).unwrap();
    assert!(text.encode("a", false).unwrap().is_empty());
    assert_eq!(text.special_around().unwrap(), (vec![0], vec![]));
}

/// The toy with this model, whose texts begin with the token `<s>`.
fn beginning(model: &str, id: u32) -> Vec<u8> {
    let template = r#""post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [ID], "tokens": ["<s>"]}}}"#;
    let json = toy(model, &added(id, "<s>")).replace(r#""post_processor":null"#, &template.replace("ID", &id.to_string()));
    compact(json.as_bytes()).unwrap()
}

#[test]
fn text_is_cut_where_the_tokenizer_says() {
    let bytes = compact(toy(ABC, "").as_bytes()).unwrap();
    let text = Text::load(&bytes).unwrap();
    let cut = text.encode_cut("cccab", 2).unwrap();
    assert_eq!((cut.ids, cut.truncated), (vec![2, 3], 2));
    assert_eq!(text.encode_cut("ccab", 2).unwrap(), Encoded { ids: vec![2, 3], truncated: 1 });
    assert_eq!(text.encode_cut("c", 2).unwrap().truncated, 0);
    let bytes = compact(toy(ABC, "").replace("Left", "Right").as_bytes()).unwrap();
    assert_eq!(Text::load(&bytes).unwrap().encode_cut("cccab", 2).unwrap(), Encoded { ids: vec![2, 2], truncated: 2 });
}

#[test]
fn malformed_tokenizers_are_refused_by_name() {
    let code = |json: &str| {
        let error = compact(json.as_bytes()).expect_err(json);
        (error.exit_code(), error.to_string())
    };
    let bpe = |vocab: &str, merges: &str| toy(&format!(r#"{{"type":"BPE","vocab":{vocab},"merges":{merges}}}"#), "");
    assert_eq!(code("{").0, 4);
    assert_eq!(code("[]").0, 4);
    assert_eq!(code(&toy(r#"{"type":"foo"}"#, "")).0, 4);
    let (exit, line) = code(&bpe(r#"{"a":0,"b":0}"#, "[]"));
    assert!(exit == 4 && line.contains("id 0"), "{line}");
    let (exit, line) = code(&bpe(r#"{"a":0,"b":2}"#, "[]"));
    assert!(exit == 4 && line.contains("id 1"), "{line}");
    let (exit, line) = code(&bpe(r#"{"a":4000000000}"#, "[]"));
    assert!(exit == 4 && line.contains("4000000000"), "{line}");
    let level = |vocab: &str| toy(&format!(r#"{{"type":"WordLevel","vocab":{vocab},"unk_token":"a"}}"#), "");
    let (exit, line) = code(&level(r#"{"a":0,"b":0}"#));
    assert!(exit == 4 && line.contains("id 0"), "{line}");
    let (exit, line) = code(&level(r#"{"a":4000000000}"#));
    assert!(exit == 4 && line.contains("4000000000"), "{line}");
    let (exit, line) = code(&bpe(r#"{"a":0}"#, r#"["a x"]"#));
    assert!(exit == 4 && line.contains("merges[0]"), "{line}");
    let (exit, line) = code(&toy(ABC, &added(9, "<s>")));
    assert!(exit == 5 && line.contains("expected id 9, found 5"), "{line}");
    assert_eq!(code(&toy(ABC, &[added(5, "x"), added(5, "y")].join(","))).0, 5);
}

#[test]
fn broken_compact_bytes_never_panic() {
    let unigram = r#"{"type":"Unigram","unk_id":0,"byte_fallback":true,"vocab":[["?",0],["a",-1],["bc",-2],["é",-3],["abc",-1]]}"#;
    let pieces = r###"{"type":"WordPiece","unk_token":"?","continuing_subword_prefix":"##","max_input_chars_per_word":9,"vocab":{"?":0,"a":1,"##bc":2,"##a":3,"##é":4}}"###;
    for model in [ABC, unigram, pieces] {
        broken_bytes_never_panic(&compact(toy(model, &added(5, "<s>")).as_bytes()).unwrap());
    }
}

fn broken_bytes_never_panic(bytes: &[u8]) {
    for len in 0..bytes.len() {
        assert!(Text::load(&bytes[..len]).is_err(), "{len}");
    }
    let magic = [&[bytes[0] ^ 1], &bytes[1..]].concat();
    assert!(Text::load(&magic).is_err());
    // The crate itself panics on some malformed components: `compact` catches that, and the start check hashes these bytes.
    let json = HEADER_BYTES..HEADER_BYTES + Table(&bytes[12..]).get(0).unwrap() as usize;
    for at in (0..bytes.len()).filter(|at| !json.contains(at)) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 0x55;
        if let Ok(text) = Text::load(&flipped) {
            let _ = text.encode("abcaébc", true);
            let _ = text.decode(&[0, 1, 2, 3, 4, 5], false);
        }
    }
}

#[test]
fn a_stream_never_gives_half_a_character() {
    let model = r#"{"type":"BPE","byte_fallback":true,"unk_token":"<unk>","vocab":{"<unk>":0,"<0xF0>":1,"<0x9F>":2,"<0x99>":3,"<0x82>":4,"a":5},"merges":[]}"#;
    let json = toy(model, "").replace(r#"{"type":"Fuse"}"#, r#"{"type":"ByteFallback"}"#);
    let bytes = compact(json.as_bytes()).unwrap();
    let text = Text::load(&bytes).unwrap();
    let mut stream = Stream::default();
    let mut got = Vec::new();
    for id in [5, 1, 2, 3, 4, 5, 1] {
        got.push(stream.push(&text, id).unwrap());
    }
    assert_eq!(got, ["a", "", "", "", "🙂", "a", ""]);
    assert_eq!(stream.finish(&text).unwrap(), "\u{fffd}");
    // The end of a run of bytes is cut, and the character before it is printed.
    let got: Vec<String> = [1, 2, 3, 4, 1].iter().map(|id| stream.push(&text, *id).unwrap()).collect();
    assert_eq!((got.concat().as_str(), stream.finish(&text).unwrap().as_str()), ("🙂", "\u{fffd}"));
    // A byte behind it that no other follows.
    let got: Vec<String> = [1, 2, 3, 4, 1, 5].iter().map(|id| stream.push(&text, *id).unwrap()).collect();
    assert_eq!(got, ["", "", "", "🙂", "", "\u{fffd}a"]);
}

/// Bytes that become no character however many follow, as a model gives them that was trained too little.
#[test]
fn a_stream_waits_only_as_long_as_a_character_may_take() {
    let model = r#"{"type":"BPE","byte_fallback":true,"unk_token":"<unk>","vocab":{"<unk>":0,"<0xF0>":1},"merges":[]}"#;
    let json = toy(model, "").replace(r#"{"type":"Fuse"}"#, r#"{"type":"ByteFallback"}"#);
    let bytes = compact(json.as_bytes()).unwrap();
    let text = Text::load(&bytes).unwrap();
    let mut stream = Stream::default();
    let got: Vec<usize> = [1; 20].iter().map(|id| stream.push(&text, *id).unwrap().chars().count()).collect();
    assert_eq!(got, [0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0]);
    assert_eq!(stream.finish(&text).unwrap(), "\u{fffd}\u{fffd}");
}

/// Behind the end of a text, with `--ignore-eos`, models give one special token after the other.
#[test]
fn a_stream_holds_no_run_of_silent_tokens() {
    let bytes = compact(toy(ABC, &added(5, "<s>")).as_bytes()).unwrap();
    let text = Text::load(&bytes).unwrap();
    for silent in [5, 99] {
        let mut stream = Stream::default();
        let mut ids = vec![0];
        ids.resize(1000, silent);
        ids.extend([4, silent, 1]);
        let mut got = String::new();
        for &id in &ids {
            got += &stream.push(&text, id).unwrap();
            assert!(stream.ids.len() <= 2, "{:?}", stream.ids);
        }
        got += &stream.finish(&text).unwrap();
        assert_eq!(got, text.decode(&ids, true).unwrap());
        assert_eq!(got, "aabcb");
    }
}

/// The crate takes a search that its engine gives up for the end of the text: what follows would be one piece with other ids.
#[test]
fn a_search_that_is_given_up_is_an_error() {
    let split =
        |invert| format!(r#"{{"type":"Split","pattern":{{"Regex":"\\s+(?!\\S)|\\s+|a+"}},"behavior":"Isolated","invert":{invert}}}"#);
    let bytes = |space, regex| format!(r#"{{"type":"ByteLevel","add_prefix_space":{space},"trim_offsets":true,"use_regex":{regex}}}"#);
    let sequence = |part: &str| format!(r#"{{"type":"Sequence","pretokenizers":[{part}]}}"#);
    for (part, searches) in [
        (split(false), true),
        (split(true), true),
        (sequence(&sequence(&split(false))), true),
        (sequence(&format!("{},{}", split(false), bytes(false, false))), true),
        (bytes(false, true), true),
        (bytes(true, true), true),
        (bytes(true, false), false),
        (r#"{"type":"Split","pattern":{"String":" "},"behavior":"Removed","invert":false}"#.into(), false),
        (r#"{"type":"Whitespace"}"#.into(), false),
    ] {
        let model = r#"{"type":"BPE","vocab":{"a":0," ":1,"\u0120":2},"merges":[]}"#;
        let json = toy(model, "").replace(r#""pre_tokenizer":null"#, &format!(r#""pre_tokenizer":{part}"#));
        let bytes = compact(json.as_bytes()).unwrap();
        let text = Text::load(&bytes).unwrap();
        let mut judge = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        judge.with_truncation(None).unwrap();
        for (spaces, gives_up) in [(0, false), (2, false), (100_000, false), (1_000_100, searches)] {
            let input = format!("a{}a a", " ".repeat(spaces));
            match text.encode(&input, true) {
                Ok(ids) => assert!(!gives_up && ids == judge.encode_fast(input, true).unwrap().get_ids(), "{part}: {spaces}"),
                Err(error) => {
                    assert!(gives_up && error.to_string().contains("expected less than a million"), "{part}: {spaces}: {error}");
                    assert_eq!((error.exit_code(), text.encode_cut(&input, 4).unwrap_err().exit_code()), (7, 7));
                }
            }
        }
    }
}
