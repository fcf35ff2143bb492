//! Programs of this build, compiled for the machine that builds and loaded into this process.

use crate::cache::Cache;
use crate::error::Error;
use crate::link::guard::WorkDir;
use crate::link::{self, tools};
use crate::plan::{self, PlanCx, Planned, WeightTable};
use rayon::prelude::*;
use rcompile_codegen::host::{HostStep, Sizes};
use rcompile_codegen::isa::{HOST_TRIPLE, Isa, LEVELS};
use rcompile_codegen::{Error as CodegenError, Options, compile_units, verify};
use rcompile_graph::Module;
use std::collections::HashMap;
use std::sync::Arc;

/// Compiles, links and loads; equal programs once.
pub struct HostCompiler<'a> {
    /// What is compiled for.
    pub isa: Isa,
    cache: &'a Cache,
    work: &'a WorkDir,
    tools: tools::Tools,
    loaded: HashMap<String, Arc<HostStep>>,
}

impl<'a> HostCompiler<'a> {
    /// For this machine.
    pub fn new(cache: &'a Cache, work: &'a WorkDir) -> Result<HostCompiler<'a>, Error> {
        Ok(HostCompiler { isa: level()?, cache, work, tools: tools::find(HOST_TRIPLE)?, loaded: HashMap::new() })
    }

    /// Plans a module for one sequence of at most `positions`; weights are appended to `weights`.
    pub fn plan(&self, module: &Module, positions: u32, weights: &mut WeightTable) -> Result<Planned, Error> {
        // One core: large tiles, which have the bits of small ones.
        let cx = PlanCx { isa: &self.isa, slots: 1, ctx_size: positions, least_rows: 1, cores: 1, tuning: None };
        let planned = plan::plan(module, &cx, weights)?;
        verify::verify(&planned.program)?;
        Ok(planned)
    }

    /// The code of a plan, whose `token` looks up tables of `tokens` rows.
    pub fn load(&mut self, planned: &Planned, weights: &WeightTable, tokens: u32) -> Result<Arc<HostStep>, Error> {
        let units = compile_units(&planned.program, &self.isa, Options::default());
        let sizes = Sizes {
            state_bytes: planned.state.bytes,
            pages: planned.state.pages_per_slot,
            output_width: (planned.output_stride * planned.outputs) as usize,
            weights_bytes: weights.len,
            tokens,
        };
        let key = units.iter().map(|u| u.key.as_str()).chain([format!("{sizes:?}").as_str()]).collect::<Vec<_>>().join("\n");
        if let Some(step) = self.loaded.get(&key) {
            return Ok(step.clone());
        }
        let compile = |unit| Ok::<_, Error>(self.cache.compile(unit)?.object);
        let objects = units.par_iter().map(compile).collect::<Result<Vec<_>, _>>()?;
        let work = WorkDir::create(&self.work.path().join("calibrate"))?;
        let object = link::link_host(&work, &self.tools, &objects)?;
        // SAFETY: linked just now from the units of this program alone, for a level that this machine has; sizes are those of its plan.
        let step = unsafe { HostStep::load(&object, &planned.program, sizes) }.map_err(|e| match e {
            CodegenError::Load(_) => Error::Output {
                path: object.display().to_string(),
                what: e.to_string(),
                help: Some("--calibrate runs code that lies beside the output: is that a file system without programs (noexec)?".into()),
            },
            other => other.into(),
        })?;
        let step = Arc::new(step);
        self.loaded.insert(key, step.clone());
        Ok(step)
    }
}

/// The best level that this machine has; its own CPU where there are none.
fn level() -> Result<Isa, Error> {
    let native = Isa::native()?;
    let levels = LEVELS.iter().filter_map(|name| Isa::lookup(HOST_TRIPLE, name, &[]).ok());
    Ok(levels.into_iter().find(|isa| isa.runs_on(&native)).unwrap_or(native))
}
