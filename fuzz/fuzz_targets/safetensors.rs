//! Fed: a safetensors file; three of four mutations change its header as JSON and make its length fit. Oracle: no panic, refusals are one line;
//! what is accepted the `safetensors` crate reads as the same tensors, and what only the crate accepts is stricter here by the rules that
//! `models/src/weights/header.rs` names: every name once, no hostile names, ranks up to 8.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use rcompile_fuzz::{check_error, mutate_json, repository, scratch, start};
use rcompile_models::dir::ModelDir;
use rcompile_models::weights::WeightIndex;
use safetensors::SafeTensors;

static DIR: LazyLock<std::path::PathBuf> = LazyLock::new(scratch);

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    std::fs::write(DIR.join("model.safetensors"), data).unwrap();
    let dir = ModelDir::open(&DIR).unwrap();
    let ours = WeightIndex::open(&dir, &mut Vec::new());
    let theirs = SafeTensors::read_metadata(data);
    match (ours, theirs) {
        (Ok(ours), Ok((header, theirs))) => {
            assert_eq!(ours.iter().count(), theirs.tensors().len());
            for tensor in ours.iter() {
                let other = theirs.info(&tensor.name).unwrap_or_else(|| panic!("{tensor:?}"));
                assert_eq!((&tensor.dtype, &tensor.shape), (&other.dtype, &other.shape));
                let begin = (8 + header + other.data_offsets.0) as u64;
                assert_eq!((tensor.begin, tensor.size_bytes), (begin, (other.data_offsets.1 - other.data_offsets.0) as u64));
                assert_eq!(ours.read(tensor).unwrap_or_else(|e| panic!("{e}")).len() as u64, tensor.size_bytes);
            }
        }
        (Ok(_), Err(e)) => panic!("the crate refuses it: {e}"),
        (Err(ours), Ok((_, theirs))) => {
            check_error(&ours);
            let hostile = |name: &str| {
                let path_like = name.split(['/', '\\']).any(|part| part == "..");
                name.is_empty() || name.len() > 1024 || name.chars().any(char::is_control) || path_like
            };
            let stricter = theirs.tensors().iter().any(|(name, info)| hostile(name) || info.shape.len() > 8);
            assert!(stricter || ours.what.contains("duplicate"), "only here: {ours}");
        }
        (Err(ours), Err(_)) => check_error(&ours),
    }
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let header = data.first_chunk().map_or(usize::MAX, |b| u64::from_le_bytes(*b) as usize);
    let end = header.saturating_add(8);
    if end > size || max_size < size {
        return fuzzer_mutate(data, size, max_size);
    }
    let behind = data[end..size].to_vec();
    let length = mutate_json(&mut data[8..], header, max_size - 8 - behind.len(), seed, &WORDS);
    // One in eight lies about its length.
    if !seed.is_multiple_of(8) {
        data[..8].copy_from_slice(&(length as u64).to_le_bytes());
    }
    let end = 8 + length;
    data[end..end + behind.len()].copy_from_slice(&behind);
    end + behind.len()
});

const WORDS: [&str; 22] = [
    "__metadata__",
    "dtype",
    "shape",
    "data_offsets",
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E8M0",
    "F6_E2M3",
    "F4",
    "I64",
    "I8",
    "U8",
    "BOOL",
    "C64",
    "../x",
    "a/..",
    "",
    "w",
    "é",
];

fn seeds() -> Vec<Vec<u8>> {
    let file = |header: &str, data: usize| {
        let mut bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let entries = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[2,26]},"a":{"dtype":"F16","shape":[],
        "data_offsets":[0,2]},"empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[2,2]},"n":{"dtype":"F4","shape":[4],"data_offsets":[26,28]}}"#;
    let golden = std::fs::read(repository("tests/golden/qwen2/model.safetensors")).unwrap();
    let end = 8 + u64::from_le_bytes(*golden.first_chunk().unwrap()) as usize;
    vec![file("{}", 0), file(r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4), file(entries, 28), golden[..end].to_vec()]
}
