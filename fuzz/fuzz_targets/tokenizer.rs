//! Fed: a `tokenizer.json`, mostly mutated as JSON. Oracle: no panic, refusals are one line; what the checks accept the runtime's own form
//! gives the ids and texts of the `tokenizers` crate for, whatever the text and the ids, and neither of the two panics.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use rcompile_broken::toy;
use rcompile_fuzz::{Random, check_error, check_line, mutate_json, scratch, start, words};
use rcompile_models::dir::ModelDir;
use rcompile_models::tokenizer;
use rcompile_runtime::text::{Stream, Text, compact};
use serde_json::{Value, json};

static DIR: LazyLock<std::path::PathBuf> = LazyLock::new(scratch);
static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let stages = ["components", "patterns", "vocabulary"].map(|f| format!("models/src/tokenizer/{f}.rs"));
    words(&stages.each_ref().map(String::as_str))
});

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    std::fs::write(DIR.join(tokenizer::FILE), data).unwrap();
    let dir = ModelDir::open(&DIR).unwrap();
    let mut warnings = Vec::new();
    let accepted = match tokenizer::read(&dir, 1 << 24, &mut warnings) {
        Ok(accepted) => accepted.unwrap(),
        Err(e) => return check_error(&e),
    };
    warnings.iter().for_each(|w| check_line(w, "warning[W-"));
    let bytes = compact(&accepted.json).unwrap_or_else(|e| panic!("accepted and not made compact: {e}"));
    let text = Text::load(&bytes).unwrap();
    let mut judge = tokenizers::Tokenizer::from_bytes(&accepted.json).unwrap();
    judge.with_padding(None);
    let _ = judge.with_truncation(None);
    let _ = text.special_around();
    let mut random = Random::new(data.iter().fold(0, |hash, b| hash * 31 % (1 << 40) + u64::from(*b)));
    for input in texts(&judge, &mut random) {
        for special in [false, true] {
            match (judge.encode_fast(input.as_str(), special), text.encode(&input, special)) {
                (Ok(expected), Ok(found)) => assert_eq!(found, expected.get_ids(), "{input:?}"),
                (Err(_), Err(_)) => {}
                (expected, found) => panic!("{input:?}: {:?}, not {:?}", found, expected.map(|e| e.get_ids().to_vec())),
            }
        }
        let most = random.below(6);
        let around = text.encode_cut(&input, 0).map_or(0, |cut| cut.ids.len());
        assert!(text.encode_cut(&input, most).is_ok_and(|cut| cut.ids.len() <= most.max(around)) || text.encode(&input, true).is_err());
    }
    for _ in 0..8 {
        let size = accepted.facts.size;
        let ids: Vec<u32> = (0..random.below(8)).map(|_| if random.below(16) == 0 { random.bits() as u32 } else { random.below(size + 2) as u32 }).collect();
        for skip in [false, true] {
            match (judge.decode(&ids, skip), text.decode(&ids, skip)) {
                (Ok(expected), Ok(found)) => assert_eq!(found, expected, "{ids:?}"),
                (Err(_), Err(_)) => {}
                (expected, found) => panic!("{ids:?}: {found:?}, not {expected:?}"),
            }
        }
        let mut stream = Stream::default();
        for id in ids {
            let _ = stream.push(&text, id);
        }
        let _ = stream.finish(&text);
    }
});

/// Some of the file's own tokens in any order, between characters that normalizers and pre-tokenizers treat in a special way.
fn texts(judge: &tokenizers::Tokenizer, random: &mut Random) -> Vec<String> {
    let between = [
        "", "", " ", "  ", "\n", "é", "e\u{301}", "ß", "日本", "🙂", "\u{200d}", "A", "1", "12345", "'s", "!!", "\u{fdfa}", "\u{0}", "İ",
        "▁", "Ġ", "<s>",
    ];
    let size = judge.get_vocab_size(true);
    let mut list = vec![String::new(), "the an\tThe ".into()];
    for _ in 0..6 {
        let mut text = String::new();
        for _ in 0..random.below(10) {
            text.push_str(random.pick::<&str>(&between));
            text.push_str(&judge.id_to_token(random.below(size + 1) as u32).unwrap_or_default());
        }
        list.push(text);
    }
    list
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate_json(data, size, max_size, seed, &WORDS) });

/// The toy of the tests of models, and small tokenizers of the kinds that well-known models have.
fn seeds() -> Vec<Vec<u8>> {
    let added = |list: &[(u32, &str, bool)]| -> Value {
        list.iter()
            .map(|(id, text, special)| json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": !special, "normalized": !special, "special": special}))
            .collect()
    };
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let byte_level = json!({"version": "1.0", "truncation": {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "added_tokens": added(&[(5, "<|im_start|>", true), (6, "<tool>", false)]), "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": llama3}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "ignore_merges": true, "vocab": {"t": 0, "h": 1, "Ġ": 2, "th": 3, "Ġth": 4}, "merges": ["t h", "Ġ th"]}});
    let pieces = json!({"added_tokens": added(&[(0, "<unk>", true), (1, "<s>", true)]),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "▁a": 4, "<0xC3>": 5, "<0xA9>": 6}, "merges": [["▁", "a"]]}});
    let words = json!({"added_tokens": added(&[(0, "[UNK]", true), (1, "[CLS]", true), (2, "[SEP]", true)]),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "an": 4, "##s": 5}}});
    let unigram = json!({"added_tokens": added(&[(0, "<unk>", true)]),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}, {"type": "NFKC"}, {"type": "Strip", "strip_left": true, "strip_right": false}, {"type": "StripAccents"}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": {"type": "RobertaProcessing", "sep": ["a", 2], "cls": ["<unk>", 0], "trim_offsets": true, "add_prefix_space": true},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": [["<unk>", 0.0], ["▁", -1.5], ["a", -2.0], ["▁an", -2.5]]}});
    let level = json!({"added_tokens": added(&[(1, "[UNK]", false)]),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "MergedWithPrevious"},
            {"type": "Digits", "individual_digits": true}, {"type": "UnicodeScripts"}, {"type": "CharDelimiterSplit", "delimiter": "x"}, {"type": "FixedLength", "length": 5}, {"type": "Whitespace"}]},
        "decoder": {"type": "CTC", "pad_token": "[UNK]", "word_delimiter_token": "|", "cleanup": true},
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0, "[UNK]": 1}}});
    let suffix = json!({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}, "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
        "model": {"type": "BPE", "unk_token": "a", "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "vocab": {"a": 0, "##b": 1, "ab": 2, "##b</w>": 3}, "merges": ["a ##b"]}});
    [toy::tokenizer(), byte_level, pieces, words, unigram, level, suffix].iter().map(|v| v.to_string().into_bytes()).collect()
}
