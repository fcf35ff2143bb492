//! Parts: functions that several kernels call, each a unit of compilation of its own.
//!
//! In: a kernel. Out: the parts that it calls, and each of them as a declaration in the kernel's module or as the function itself. A part
//! is small data, and its code depends on nothing else but the target: neither on the program nor on the kernel, whose epilogue and
//! expressions it is given as addresses.

use super::attention::pairs::PairFunction;
use super::rows::RowFunction;
use super::{attention, matmul};
use crate::error::Error;
use crate::isa::Isa;
use crate::llvm::builder::{Function, ModuleBuilder, Ty, Visibility};
use crate::program::{Kernel, Program};

/// A function that several kernels call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Rows of a matmul times panels.
    Rows(RowFunction),
    /// (row, head) pairs of attention and a block of keys.
    Pairs(PairFunction),
}

impl Part {
    /// Those of a kernel.
    pub fn of(isa: &Isa, program: &Program, kernel: &Kernel) -> Vec<Part> {
        match kernel {
            Kernel::Matmul(kernel) => matmul::Schedule::new(isa, program, kernel).parts(),
            Kernel::Attention(kernel) => attention::parts(kernel),
            Kernel::Loops(_) | Kernel::Quantise(_) => vec![],
        }
    }

    /// What it is called in a kernel: `stream4`.
    pub fn name(&self) -> String {
        match self {
            Part::Rows(function) => function.name(),
            Part::Pairs(function) => function.name(),
        }
    }

    /// For its symbol: `rows_<dtypes>_<name>x<columns>`, `pairs_<dtype>_<compute>_<name>x<width of a head>`.
    pub fn label(&self) -> String {
        match self {
            Part::Rows(function) => {
                let product = &function.product;
                let weight = product.panels.coding.name(product.weight);
                format!("rows_{}_{weight}_{}_{}x{}", product.a, product.compute.name(), self.name(), product.panels.nr)
            }
            Part::Pairs(function) => {
                let pairs = &function.pairs;
                format!("pairs_{}_{}_{}x{}", pairs.stored.dtype, pairs.compute.name(), self.name(), pairs.head_dim)
            }
        }
    }

    fn params(&self) -> Vec<Ty> {
        match self {
            Part::Rows(function) => function.params(),
            Part::Pairs(function) => function.params(),
        }
    }

    /// The function as another module defines it.
    pub(super) fn declare<'c>(&self, mb: &ModuleBuilder<'c>, symbol: &str) -> Function<'c> {
        mb.declare(symbol, &self.params(), None)
    }

    /// Adds the function to the module. Errors: the planner must not ask for this on this target.
    pub fn define<'c>(&self, mb: &ModuleBuilder<'c>, symbol: &str) -> Result<Function<'c>, Error> {
        let problems = match self {
            Part::Rows(function) => function.product.problems(mb.isa(), symbol),
            Part::Pairs(function) => function.pairs.problems(mb.isa(), symbol),
        };
        if !problems.is_empty() {
            return Err(Error::Program(problems));
        }
        Ok(mb.define(symbol, &self.params(), None, Visibility::ExportNoInline, |fb, args| match self {
            Part::Rows(function) => function.emit(fb, args),
            Part::Pairs(function) => function.emit(fb, args),
        }))
    }
}
