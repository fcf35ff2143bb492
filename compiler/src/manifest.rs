//! What an executable knows about itself: its manifest, from everything that a build has decided.

use crate::calibrate::Calibration;
use crate::error::Error;
use crate::link::payload::Blobs;
use crate::plan::{PackJob, Planned, Plans, WeightTable};
use crate::source::{Source, task_of};
use rcompile_codegen::program::{Coding, Compute, DType, Kernel, Layout, Panels, Program};
use rcompile_graph::Pool;
use rcompile_models::dir::InputFile;
use rcompile_runtime::abi::{BucketInfo, EntryInfo, GenerationInfo, Manifest, OutputKind, Pooling, PoolingInfo, StateInfo, Task, TextInfo};

/// The note for executables in which a row's bits may depend on the number of rows in the step: few rows use FMA, more use tiles.
const TINY_IN_TILES: &str = "tiles of AMX take bf16 numbers below 2^-126 for zero";

fn multiplies_in_bf16_tiles(program: &Program) -> bool {
    let of_bf16 = |compute: Compute| compute.tiles() == Some(DType::Bf16);
    program.regions.iter().any(|region| match &region.kernel {
        Kernel::Matmul(matmul) => of_bf16(matmul.compute),
        Kernel::Attention(attention) => of_bf16(attention.compute),
        Kernel::Loops(_) | Kernel::Quantise(_) => false,
    })
}

/// All that an executable is made of.
pub(crate) struct Contents<'a> {
    /// What the build has read and decided first.
    pub source: &'a Source,
    /// Programs and the table of weights.
    pub plans: &'a Plans,
    /// Codes of weights that were chosen by a text.
    pub calibration: Option<&'a Calibration>,
    /// The compact tokenizer.
    pub tokenizer: Option<Vec<u8>>,
}

impl Contents<'_> {
    /// What the executable will know about itself, as JSON; `inputs` are the files of the model directory. Tokenizer and chat template go
    /// to `blobs`.
    pub fn manifest(&self, inputs: Vec<InputFile>, blobs: &mut Blobs) -> Result<Vec<u8>, Error> {
        let Source { model, isa, settings, text: calibrated_on, tuning } = self.source;
        let Plans { buckets: plans, weights } = self.plans;
        let given = [tuning.as_ref().map(|t| &t.1), calibrated_on.as_ref().map(|t| &t.input)];
        let inputs = inputs.iter().chain(given.into_iter().flatten());
        let facts = model.facts();
        let generation = &model.generation;
        let task = task_of(model.arch.task);
        let first = &plans[0];
        let text = self.tokenizer.as_ref().zip(model.tokenizer.as_ref()).map(|(compact, t)| TextInfo {
            tokenizer: blobs.add(compact),
            chat_template: model.chat_template.as_ref().map(|source| blobs.add(source.as_bytes())),
            special_tokens: t.facts.special_tokens.clone(),
            max_length: model.text_limit().and_then(|n| u32::try_from(n).ok()),
        });
        let tiny = plans.iter().any(|p| multiplies_in_bf16_tiles(&p.program)).then_some(TINY_IN_TILES);
        let input = |i: &InputFile| rcompile_runtime::abi::InputFile { name: i.name.clone(), bytes: i.bytes, sha256: i.sha256.clone() };
        let bucket = |p: &Planned| BucketInfo {
            rows: p.program.bucket,
            logit_rows: if task == Task::Embed { p.program.max_runs } else { p.program.max_logit_rows },
            tile_rows: p.program.tile_rows,
            arena_bytes: p.program.arena_bytes,
            private_bytes: p.program.private_bytes,
            regions: p.regions.clone(),
            barriers_per_layer: p.barriers_per_layer,
        };
        let manifest = Manifest {
            rcompile_version: env!("CARGO_PKG_VERSION").into(),
            name: model.name.clone(),
            architecture: model.arch.class_names[0].into(),
            task,
            target: isa.triple.clone(),
            cpu: isa.name.clone(),
            features: isa.features.iter().cloned().collect(),
            cores: settings.cores,
            ctx_size: settings.ctx_size,
            slots: settings.slots,
            dtype: weights_type(weights),
            compute: settings.inputs.name().into(),
            kv_dtype: settings.kv_name().into(),
            quantization: settings.quantisation_name.clone(),
            vocab_size: facts.vocab_size as u32,
            hidden_size: facts.hidden_size as u32,
            parameters: model.parameters(),
            entries: vec![EntryInfo {
                name: first.program.entry.clone(),
                buckets: plans.iter().map(bucket).collect(),
                output_stride: first.output_stride.into(),
                output: if task == Task::Embed { OutputKind::Pooled } else { OutputKind::Logits },
            }],
            state: StateInfo {
                bytes: first.state.bytes,
                bytes_per_token: first.state.bytes_per_token,
                pages_per_slot: first.state.pages_per_slot,
                persistent: first.state.persistent,
            },
            weight_bytes: weights.len,
            inputs: inputs.map(input).collect(),
            text,
            generation: GenerationInfo {
                bos_token_id: generation.bos,
                eos_token_ids: generation.eos.clone(),
                do_sample: generation.do_sample,
                temperature: generation.temperature.map(|x| x as f32),
                // 0 keeps all, as do more than there can be.
                top_k: generation.top_k.map(|x| u32::try_from(x).unwrap_or(0)),
                top_p: generation.top_p.map(|x| x as f32),
                min_p: generation.min_p.map(|x| x as f32),
                repetition_penalty: generation.repetition_penalty.map(|x| x as f32),
            },
            pooling: model.pooling.as_ref().map(|p| PoolingInfo { mode: pooling(p.mode), normalize: p.normalize }),
            notes: self.calibration.iter().map(|c| c.note.clone()).chain(tiny.map(String::from)).collect(),
        };
        serde_json::to_vec(&manifest).map_err(|e| Error::bug("manifest", e))
    }
}

/// As the executable names it.
fn pooling(pool: Pool) -> Pooling {
    match pool {
        Pool::Mean => Pooling::Mean,
        Pool::Cls => Pooling::Cls,
        Pool::Max => Pooling::Max,
        Pool::Last => Pooling::Last,
    }
}

/// Stored type of most weight bytes.
pub(crate) fn weights_type(weights: &WeightTable) -> String {
    let mut bytes = std::collections::BTreeMap::new();
    let name = |j: &PackJob| match j.layout {
        Layout::Panels(Panels { coding: Coding::Int8 { .. } | Coding::Int8Groups { .. }, .. }) => "int8",
        Layout::Panels(Panels { coding: Coding::Int4 { .. }, .. }) => "int4",
        _ => j.dtype.name(),
    };
    weights.jobs.iter().for_each(|j| *bytes.entry(name(j)).or_insert(0) += j.bytes);
    bytes.into_iter().max_by_key(|(_, b)| *b).map_or("f32", |(name, _)| name).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_runtime::abi::POOLED_VECTORS;

    /// What a trace writes for a run is where executables look for it.
    #[test]
    fn vectors_lie_where_they_are_read() {
        let read = |normalised| Pool::ALL.map(|pool| pooling(pool).vector(normalised));
        assert_eq!([read(false), read(true)].concat(), (0..POOLED_VECTORS).collect::<Vec<_>>());
    }
}
