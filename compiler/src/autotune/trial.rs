//! One trial executable: made, and run.

use super::Cx;
use crate::error::Error;
use crate::link::guard::{self, Finished, WorkDir};
use crate::link::payload;
use crate::pack::Sink;
use crate::plan::{Planned, Plans};
use crate::tuning::Tuning;
use rayon::prelude::*;
use rcompile_codegen::program::{DType, Item, Kernel, Program};
use rcompile_runtime::abi::weights_path;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Weights that a step reads at least, where the model has as much: what a step leaves in the caches is gone at the next one.
const COLD_BYTES: u64 = 512 << 20;
/// Repetitions per length of a run, after one that is not counted.
const REPETITIONS: &str = "3";
/// Random numbers are written in pieces of this many bytes.
const PIECE: u64 = 4 << 20;

/// Makes the executable of a tuning, the `index`-th; its weights are those of `first`, else new ones.
pub(super) fn make(cx: &Cx<'_>, index: usize, tuning: &Tuning, first: Option<&PathBuf>) -> Result<PathBuf, Error> {
    let mut plans = (cx.plan)(Some(tuning))?;
    let layers = layers(&plans.buckets);
    plans.buckets.iter_mut().for_each(|p| shorten(&mut p.program, layers));
    let work = WorkDir::create(&cx.work.path().join("trial"))?;
    let exe = (cx.link)(&work, &plans)?;
    let path = cx.work.path().join(format!("trial{index}"));
    let beside = weights_path(&path);
    match first {
        Some(first) => {
            let of_first = weights_path(first);
            // Not every file system has links of both kinds. Both names lie in one directory.
            let name = of_first.file_name().expect("the name of a file");
            let linked = std::fs::hard_link(&of_first, &beside).or_else(|_| symlink(name, &beside));
            linked.map_err(|e| Error::output(&beside, "linking", &e))?;
        }
        None => fill(cx.work, &plans, exe.sink())?,
    }
    exe.publish_trial(&path, first.is_none().then_some(&*beside))?;
    Ok(path)
}

/// Runs an executable on prompts of these lengths: tokens per second of each, the median of its repetitions. None: it took longer than
/// `most`, and was ended.
pub(super) fn run(exe: &Path, lengths: &[u32], work: &WorkDir, most: Duration) -> Result<Option<Vec<f64>>, Error> {
    let list = lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let mut command = Command::new(exe);
    command.env_clear().args(["bench", "-p", &list, "-n", "0", "-r", REPETITIONS, "-o", "jsonl"]);
    let failed = |what: String| Error::Toolchain { program: "trial executable".into(), what, help: Some("leave --autotune out".into()) };
    let text = match guard::run(&mut command, work.path(), most) {
        Err(e) => return Err(failed(format!("cannot be started: {e}"))),
        Ok(Finished { status: None, .. }) => return Ok(None),
        Ok(Finished { status: Some(status), text }) if !status.success() => {
            return Err(failed(format!("failed ({status}): {}", text.lines().next().unwrap_or("no message"))));
        }
        Ok(Finished { text, .. }) => text,
    };
    let tests: Vec<serde_json::Value> = text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let rate = |rows: &u32| {
        let test = tests.iter().find(|t| t["test"] == format!("pp{rows}"))?;
        super::median(test["samples_ts"].as_array()?.iter().filter_map(serde_json::Value::as_f64).collect())
    };
    let rates: Option<Vec<f64>> = lengths.iter().map(rate).collect();
    rates.map(Some).ok_or_else(|| failed("bench printed something else than its tests".into()))
}

/// Layers that a trial runs: so many that a step reads [`COLD_BYTES`].
fn layers(plans: &[Planned]) -> u32 {
    let Some(program) = plans.first().map(|p| &p.program) else { return 0 };
    let bytes = |items: &[Item]| -> u64 {
        let matmul = |i: &Item| match i {
            Item::Region(r) => match &program.regions[r.index()].kernel {
                Kernel::Matmul(m) => m.panels.bytes(program.weights[m.weight.index()].dtype),
                _ => 0,
            },
            _ => 0,
        };
        items.iter().map(matmul).sum()
    };
    let outside = bytes(&program.body);
    let mut layers = 0;
    for item in &program.body {
        if let Item::Layers { count, body } = item {
            let needed = COLD_BYTES.saturating_sub(outside).div_ceil(bytes(body).max(1));
            layers = layers.max(u32::try_from(needed).unwrap_or(u32::MAX).clamp(2, (*count).max(2)));
        }
    }
    layers
}

fn shorten(program: &mut Program, layers: u32) {
    for item in &mut program.body {
        if let Item::Layers { count, .. } = item {
            *count = (*count).min(layers);
        }
    }
}

/// Writes random numbers where the plans read weights; the rest of the file stays a hole.
fn fill(work: &WorkDir, plans: &Plans, sink: Sink<'_>) -> Result<(), Error> {
    let Plans { buckets: plans, weights: table } = plans;
    let layers = layers(plans) as usize;
    let used = |offset: u64| {
        let mut weights = plans.iter().flat_map(|p| &p.program.weights);
        weights.any(|w| w.offsets.iter().take(layers.max(1)).any(|&o| o == offset))
    };
    let pieces: Vec<(u64, u64)> = table
        .jobs
        .iter()
        .filter(|j| matches!(j.dtype, DType::F32 | DType::F16 | DType::Bf16) && used(j.offset))
        .flat_map(|j| (0..j.bytes).step_by(PIECE as usize).map(|at| (j.offset + at, PIECE.min(j.bytes - at))))
        .collect();
    payload::check_space(work.path(), pieces.iter().map(|piece| piece.1).sum())?;
    let write = |(offset, len): &(u64, u64)| {
        let mut state = offset | 1;
        let mut bytes = vec![0u8; *len as usize];
        for pair in bytes.chunks_exact_mut(4) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Halves like 0x3c2a and 0xbc91: small numbers of both signs in f32 and bf16, about one in f16.
            pair.copy_from_slice(&((state as u32 & 0x80ff_80ff) | 0x3c00_3c00).to_le_bytes());
        }
        sink.file.write_all_at(&bytes, sink.base + offset).map_err(|e| Error::output(sink.path, "writing trial weights", &e))
    };
    pieces.par_iter().try_for_each(write)
}
