//! Fed: fields of a payload's header, the cut between manifest and blobs, and their bytes; hashes are made to fit, so that what lies behind the
//! checks is reached. Oracle: no panic; every error has an exit code; a manifest that a build can have written gives its blobs, tokenizer and
//! costs, or errors.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use rcompile_fuzz::{mutate_json, start, words};
use rcompile_runtime::abi::{ABI_VERSION, PAYLOAD_MAGIC, PayloadHeader};
use rcompile_runtime::payload::{Payload, PayloadError};
use rcompile_runtime::text::{Text, compact};
use serde_json::json;
use std::sync::LazyLock;

const HEADER: usize = size_of::<PayloadHeader>();
/// How hashes are treated, and the length of the manifest, before the manifest.
const PREFIX: usize = 1 + 4 + 8;

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    let Some((prefix, rest)) = data.split_at_checked(PREFIX) else { return };
    let manifest_len = u32::from_le_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    let odd = u64::from_le_bytes(prefix[5..].try_into().unwrap());
    let len = (HEADER + rest.len()) as u64;
    let manifest_end = (HEADER as u64).saturating_add(manifest_len.into()).min(len);
    let mut header = PayloadHeader {
        magic: PAYLOAD_MAGIC,
        abi_version: ABI_VERSION,
        weights_embedded: 1,
        file_len: len,
        payload_len: len,
        manifest_offset: HEADER as u64,
        manifest_len: manifest_end - HEADER as u64,
        blobs_offset: manifest_end,
        blobs_len: len - manifest_end,
        weights_offset: manifest_end,
        weights_len: len - manifest_end,
        ..PayloadHeader::from_bytes(&[0; HEADER])
    };
    match prefix[0] & 15 {
        1 => header.manifest_offset = odd,
        2 => header.manifest_len = odd,
        3 => header.blobs_offset = odd,
        4 => header.blobs_len = odd,
        5 => header.weights_offset = odd,
        6 => header.weights_len = odd,
        7 => header.payload_len = odd,
        8 => header.magic = odd.to_le_bytes(),
        9 => header.abi_version = odd as u32,
        _ => {}
    }
    let part = |offset: u64, len: u64| {
        let bytes = [&[0; HEADER], rest].concat();
        let found = usize::try_from(offset).ok().zip(usize::try_from(len).ok()).and_then(|(o, l)| bytes.get(o..)?.get(..l));
        *blake3::hash(found.unwrap_or_default()).as_bytes()
    };
    // What the header itself covers is hashed with the header's hash, which is of no part.
    header.manifest_hash = part(header.manifest_offset, header.manifest_len);
    header.blobs_hash = part(header.blobs_offset, header.blobs_len);
    if prefix[0] & 16 == 0 {
        header.header_hash = *blake3::hash(header.without_hash().as_bytes()).as_bytes();
    }
    let bytes = [header.as_bytes().as_slice(), rest].concat();
    // SAFETY: the payload, which alone gets them, is gone before the bytes are.
    let forever: &'static [u8] = unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
    if let Err(e) = look(forever) {
        assert!([3, 7, 9].contains(&e.exit_code()) && !e.to_string().is_empty(), "{e}");
    }
});

fn look(bytes: &'static [u8]) -> Result<(), PayloadError> {
    let payload = Payload::from_segment(bytes, "exe".into())?;
    let _ = payload.weights()?;
    let manifest = payload.manifest();
    let again = serde_json::to_string(manifest).unwrap();
    assert_eq!(serde_json::to_string(&serde_json::from_str::<rcompile_runtime::abi::Manifest>(&again).unwrap()).unwrap(), again);
    assert!(manifest.is_possible());
    let Some(text) = &manifest.text else { return Ok(()) };
    if let Some(span) = text.chat_template {
        payload.blob(span, "chat template")?;
    }
    let Ok(text) = Text::load(payload.blob(text.tokenizer, "tokenizer")?) else { return Ok(()) };
    let _ = text.decode(&[0, 1, 2, 3, 1 << 24, u32::MAX], false);
    let _ = text.encode("the an <s> é", true);
    Ok(())
}

static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| words(&["runtime-lib/src/cost.rs"]));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let manifest_len = data.get(1..5).map_or(u32::MAX, |b| u32::from_le_bytes(b.try_into().unwrap())) as usize;
    let end = PREFIX.saturating_add(manifest_len);
    if end > size || max_size < size || seed.is_multiple_of(4) {
        return fuzzer_mutate(data, size, max_size);
    }
    let behind = data[end..size].to_vec();
    let length = mutate_json(&mut data[PREFIX..], manifest_len, max_size - PREFIX - behind.len(), seed, &WORDS);
    data[1..5].copy_from_slice(&(length as u32).to_le_bytes());
    let end = PREFIX + length;
    data[end..end + behind.len()].copy_from_slice(&behind);
    end + behind.len()
});

/// A small manifest with a tokenizer behind it.
fn seeds() -> Vec<Vec<u8>> {
    let tokenizer = json!({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "n": 1, "an": 2}, "merges": ["a n"]}});
    let blobs = compact(tokenizer.to_string().as_bytes()).unwrap();
    let cost = json!({"name": "layers.qkv", "kind": "matmul", "arithmetic": "f32", "layers": 2, "barrier": true, "units": {"per_step": 4},
        "weight_bytes": {"per_step": 64}, "kv_bytes": {}, "activation_bytes": {"per_row": 8}, "private_bytes": {}, "flop": {"per_row": 128}});
    let bucket = json!({"rows": 8, "logit_rows": 8, "tile_rows": 4, "arena_bytes": 128, "private_bytes": 128, "regions": [cost], "barriers_per_layer": 5});
    let manifest = json!({"rcompile_version": "0.1.0", "name": "m", "architecture": "LlamaForCausalLM", "task": "generate", "target": "x86_64-unknown-linux-gnu",
        "cpu": "znver5", "features": ["avx2"], "cores": 2, "ctx_size": 64, "slots": 1, "dtype": "bf16", "compute": "bf16", "kv_dtype": "bf16",
        "quantization": "none", "vocab_size": 3, "hidden_size": 8, "parameters": 100,
        "entries": [{"name": "step", "buckets": [bucket], "output_stride": 16, "output": "logits"}],
        "state": {"bytes": 1024, "bytes_per_token": 16, "pages_per_slot": 1, "persistent": true}, "weight_bytes": 64,
        "inputs": [{"name": "config.json", "bytes": 10, "sha256": "00"}],
        "text": {"tokenizer": {"offset": 0, "len": blobs.len()}, "chat_template": {"offset": 0, "len": 4}, "special_tokens": {"bos_token": "a"}, "max_length": null},
        "generation": {"bos_token_id": null, "eos_token_ids": [2], "do_sample": true, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": null, "repetition_penalty": null},
        "pooling": {"mode": "mean", "normalize": true}})
    .to_string();
    (0..10u8).map(|field| [&[field][..], &(manifest.len() as u32).to_le_bytes(), &[1; 8], manifest.as_bytes(), &blobs].concat()).collect()
}
