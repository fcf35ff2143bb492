//! Products of square blocks by compiled code: everything of calibration that takes time beside the model itself.
//!
//! ```text
//! program:  %a = embedding @a, %token;  %c = mm %a, @b {rhs_t}        c: f32[rows, side], rows <= side
//! ```
//! Each element of a product is one chain of fused multiply-adds in the order of k, so its bits are the same on every machine.

use super::host::HostCompiler;
use crate::error::Error;
use crate::plan::{PackJob, WeightTable};
use rcompile_codegen::host::{HostStep, HostWeights, Scratch};
use rcompile_codegen::program::{self, DType as Stored, Layout};
use rcompile_graph::{Builder, DType, Dim, Recipe, Type};
use rcompile_message::size;
use std::sync::{Arc, Mutex, PoisonError};

/// Side of the blocks of a matrix with `k` rows, at most 512.
pub fn side_of(k: usize) -> usize {
    k.next_power_of_two().clamp(64, 512)
}

/// A product of blocks of one size.
pub struct Product {
    /// Rows, columns and inner dimension of a block.
    pub side: usize,
    step: Arc<HostStep>,
    a: PackJob,
    b: PackJob,
    /// How the right operand lies.
    layout: program::Panels,
    bytes: u64,
    /// Memory of threads that are not at work.
    idle: Mutex<Vec<Worker>>,
}

/// One thread's memory.
struct Worker {
    operands: HostWeights,
    scratch: Scratch,
    rows: Vec<u32>,
}

/// The right operand of a product in the kernel's panels: `[side / nr]{ [k][nr], gap }`.
pub struct Panels(Vec<f32>);

impl Product {
    /// Compiles it.
    pub fn new(host: &mut HostCompiler<'_>, side: usize) -> Result<Product, Error> {
        let bug = |e| Error::bug("calibrate product", e);
        let mut b = Builder::new("product");
        let t = b.symbol("T", side as u64);
        let token = b.input("token", Type::new(DType::I32, [t]));
        let mut param = |name: &str| {
            let ty = Type::new(DType::F32, [Dim::from(side), Dim::from(side)]);
            b.param(name, ty, Recipe::Source { tensor: name.into() })
        };
        let (left, right) = (param("a"), param("b"));
        let a = b.embedding(left, token).map_err(bug)?;
        let c = b.linear(a, right).map_err(bug)?;
        let module = b.finish(vec![c]);
        let mut weights = WeightTable::default();
        let planned = host.plan(&module, side as u32, &mut weights)?;
        let step = host.load(&planned, &weights, side as u32)?;
        let job = |plain: bool| {
            let job = weights.jobs.iter().find(|j| (j.layout == Layout::Plain) == plain);
            job.cloned().ok_or_else(|| Error::bug("calibrate product", "operands are not as planned"))
        };
        let (a, b) = (job(true)?, job(false)?);
        let Layout::Panels(p) = b.layout else { return Err(Error::bug("calibrate product", "no panels")) };
        if p.k_pack != 1 || p.ways != 1 || planned.output_stride as usize != side || !side.is_multiple_of(p.nr as usize) {
            return Err(Error::bug("calibrate product", format!("unexpected layout {p:?}")));
        }
        Ok(Product { side, step, a, b, layout: p, bytes: weights.len, idle: Mutex::default() })
    }

    /// Panels of a right operand: column `n` at inner position `k` is `value(n, k)`.
    pub fn panels(&self, value: impl Fn(usize, usize) -> f32) -> Panels {
        let nr = self.layout.nr as usize;
        let floats = |bytes: u64| bytes as usize / size_of::<f32>();
        let mut out = vec![0.0; floats(self.layout.bytes(Stored::F32))];
        for (panel, out) in out.chunks_mut(floats(self.layout.panel_bytes(Stored::F32))).enumerate() {
            for (k, out) in out.chunks_mut(nr).take(self.side).enumerate() {
                out.iter_mut().enumerate().for_each(|(n, o)| *o = value(panel * nr + n, k));
            }
        }
        Panels(out)
    }

    /// Gives `a b^T` to `then`: `a` is row-major `[rows][side]`, the product `[rows][side]`.
    pub fn run(&self, a: &[f32], b: &Panels, then: impl FnOnce(&[f32])) -> Result<(), Error> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let known = idle().pop();
        let mut worker = match known {
            Some(worker) => worker,
            None => Worker {
                operands: HostWeights::new(self.bytes).map_err(|e| Error::Limit {
                    place: "--calibrate".into(),
                    what: format!("no memory for the operands of a product, expected {}, found {e}", size(self.bytes)),
                })?,
                scratch: self.step.scratch(),
                rows: (0..self.side as u32).collect(),
            },
        };
        worker.operands.write(self.a.offset as usize, a);
        worker.operands.write(self.b.offset as usize, &b.0);
        then(self.step.run(&worker.operands, &mut worker.scratch, &worker.rows[..a.len() / self.side]));
        idle().push(worker);
        Ok(())
    }
}
