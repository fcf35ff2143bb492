//! Units of compilation: one LLVM module per distinct kernel, one per function of rows of matmuls or of pairs of
//! attention, one per step function and one per
//! probe.
//!
//! Units borrow program and target and own nothing of LLVM, so that a driver can compile them on all cores. A symbol has a hash of
//! all data that its code depends on: equal kernels of several buckets, and equal functions of rows of several kernels, have equal keys, and
//! the driver keeps one of each ([`Unit::key`]).

use crate::error::Error;
use crate::isa::Isa;
use crate::kernels::attention::pairs::PairFunction;
use crate::kernels::rows::RowFunction;
use crate::kernels::{attention, loops, matmul, probe, quantise, step};
use crate::llvm::module::{self, Compiled, Emit};
use crate::program::{Kernel, Place, Program, Region};
use rcompile_runtime::abi::Probe;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Switches of code generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// 0 to 3.
    pub opt_level: u8,
    /// Texts to keep beside the object.
    pub emit: Emit,
}

impl Default for Options {
    fn default() -> Self {
        Options { opt_level: 3, emit: Emit::default() }
    }
}

/// One object to be made.
#[derive(Clone, Debug)]
pub struct Unit<'a> {
    /// Symbol that it defines; unique in an executable for one target.
    pub symbol: String,
    /// Text of everything that its code depends on, but not of the texts to be made beside it; equal keys have equal symbols and code.
    pub key: String,
    program: &'a Program,
    isa: &'a Isa,
    options: Options,
    what: What<'a>,
}

#[derive(Clone, Debug)]
enum What<'a> {
    Kernel(&'a Kernel),
    Rows(RowFunction),
    Pairs(PairFunction),
    /// Symbols of the regions.
    Step(Vec<String>),
    Probe(Probe),
}

impl Unit<'_> {
    /// Are texts to be made beside the object?
    pub fn has_texts(&self) -> bool {
        self.options.emit.llvm_ir || self.options.emit.asm
    }
}

/// The step function's symbol.
pub fn step_symbol(program: &Program) -> String {
    format!("rc_step_{}_{}", word(&program.entry), program.bucket)
}

/// Units of a program, which must be valid (see [`crate::verify`]): kernels in order of regions, each with its functions of rows before
/// it, without repetitions, then the step function. Drop units whose key another program's unit has.
pub fn compile_units<'a>(program: &'a Program, isa: &'a Isa, options: Options) -> Vec<Unit<'a>> {
    let mut units: Vec<Unit<'a>> = vec![];
    let mut symbols = vec![];
    for region in &program.regions {
        let key = kernel_key(program, region, isa, options);
        let symbol = kernel_symbol(program, region, isa, &key);
        symbols.push(symbol.clone());
        let mut add = |symbol, key, what| {
            if !units.iter().any(|u| u.key == key) {
                units.push(Unit { symbol, key, program, isa, options, what });
            }
        };
        match &region.kernel {
            Kernel::Matmul(kernel) => matmul::row_functions(isa, program, kernel).into_iter().for_each(|function| {
                let key = part_key(&function, isa, options);
                add(rows_symbol(&function, isa, &key), key, What::Rows(function));
            }),
            Kernel::Attention(kernel) => attention::pair_functions(kernel).into_iter().for_each(|function| {
                let key = part_key(&function, isa, options);
                add(pairs_symbol(&function, isa, &key), key, What::Pairs(function));
            }),
            Kernel::Loops(_) | Kernel::Quantise(_) => {}
        }
        add(symbol, key, What::Kernel(&region.kernel));
    }
    let symbol = step_symbol(program);
    let key = format!("{symbol} O{} {isa:?} {symbols:?} {:?}", options.opt_level, program.body);
    units.push(Unit { symbol, key, program, isa, options, what: What::Step(symbols) });
    units
}

/// Units of the target's probes, each with its symbol; they take nothing of the program, so one program's are enough.
pub fn probe_units<'a>(program: &'a Program, isa: &'a Isa, options: Options) -> Vec<(Probe, Unit<'a>)> {
    let unit = |probe| {
        let symbol = probe::symbol(probe);
        let key = format!("{symbol} O{} {isa:?}", options.opt_level);
        (probe, Unit { symbol, key, program, isa, options, what: What::Probe(probe) })
    };
    probe::probes(isa).map(unit).collect()
}

/// Compiles one unit.
pub fn compile(unit: &Unit<'_>) -> Result<Compiled, Error> {
    module::build(&unit.symbol, unit.isa, unit.options.opt_level, unit.options.emit, |mb| {
        match &unit.what {
            What::Kernel(Kernel::Loops(nest)) => {
                loops::define(mb, unit.program, &unit.symbol, nest);
            }
            What::Kernel(Kernel::Matmul(kernel)) => {
                let symbol = |function: &RowFunction| rows_symbol(function, unit.isa, &part_key(function, unit.isa, unit.options));
                matmul::define(mb, unit.program, &unit.symbol, kernel, symbol)?;
            }
            What::Kernel(Kernel::Attention(kernel)) => {
                let symbol = |function: &PairFunction| pairs_symbol(function, unit.isa, &part_key(function, unit.isa, unit.options));
                attention::define(mb, unit.program, &unit.symbol, kernel, symbol)?;
            }
            What::Kernel(Kernel::Quantise(kernel)) => {
                quantise::define(mb, unit.program, &unit.symbol, kernel);
            }
            What::Rows(function) => {
                function.define(mb, &unit.symbol);
            }
            What::Pairs(function) => {
                function.define(mb, &unit.symbol);
            }
            What::Step(kernels) => step::define(mb, unit.program, &unit.symbol, kernels),
            What::Probe(kind) => probe::define(mb, unit.program, *kind),
        }
        Ok(())
    })
}

/// `rc_<kind>_<dtypes>_<name>_<tile>_<hash>__<cpu>`.
fn kernel_symbol(program: &Program, region: &Region, isa: &Isa, key: &str) -> String {
    let (kind, dtypes, tile) = match &region.kernel {
        Kernel::Loops(_) => ("loops", "f32".to_string(), String::new()),
        Kernel::Matmul(m) => {
            let weight = m.panels.coding.name(program.weights[m.weight.index()].dtype);
            let dtypes = format!("{}_{weight}_{}", m.a.dtype, m.compute.name());
            ("matmul", dtypes, format!("_{}x{}", m.tile.mr, m.panels.nr))
        }
        Kernel::Quantise(q) => ("quantise", q.x.dtype.to_string(), format!("_{}", q.group)),
        Kernel::Attention(a) => ("attention", format!("{}{}", a.q.dtype, a.kv_dtype), format!("_{}x{}", a.tile_rows, a.head_dim)),
    };
    format!("rc_{kind}_{dtypes}_{}{tile}_{:016x}__{}", word(&region.name), fnv1a(key.as_bytes()), word(&isa.name))
}

/// `rc_rows_<dtypes>_<function>x<columns>_<hash>__<cpu>`.
fn rows_symbol(function: &RowFunction, isa: &Isa, key: &str) -> String {
    let product = &function.product;
    let weight = product.panels.coding.name(product.weight);
    let dtypes = format!("{}_{weight}_{}", product.a, product.compute.name());
    format!("rc_rows_{dtypes}_{}x{}_{:016x}__{}", function.name(), product.panels.nr, fnv1a(key.as_bytes()), word(&isa.name))
}

/// `rc_pairs_<dtype>_<compute>_<function>x<head>_<hash>__<cpu>`.
fn pairs_symbol(function: &PairFunction, isa: &Isa, key: &str) -> String {
    let pairs = &function.pairs;
    let types = format!("{}_{}", pairs.stored.dtype, pairs.compute.name());
    format!("rc_pairs_{types}_{}x{}_{:016x}__{}", function.name(), pairs.head_dim, fnv1a(key.as_bytes()), word(&isa.name))
}

/// All that the code of a function of several kernels depends on.
fn part_key(function: &impl std::fmt::Debug, isa: &Isa, options: Options) -> String {
    format!("O{} {isa:?} {function:?}", options.opt_level)
}

/// A kernel's data and those of the buffers and weights that it refers to.
fn kernel_key(program: &Program, region: &Region, isa: &Isa, options: Options) -> String {
    let mut key = format!("{} O{} {isa:?} {:?}", region.name, options.opt_level, region.kernel);
    let (mut weights, mut buffers) = (BTreeSet::new(), BTreeSet::new());
    for operand in region.kernel.operands() {
        match operand.place {
            Place::Weight(id) => _ = weights.insert(id),
            Place::Buffer(id) => _ = buffers.insert(id),
            _ => {}
        }
    }
    if let Kernel::Matmul(m) = &region.kernel {
        weights.insert(m.weight);
        // Functions exist for the numbers of rows that there can be, and what blocks of rows keep in scratch is laid out for the most.
        let _ = write!(key, " rows {} to {}", program.least(m.rows), program.capacity(m.rows));
    }
    for id in weights {
        let w = &program.weights[id.index()];
        let _ = write!(key, " w{} {} {:?} {:?}", id.0, w.dtype, w.layout, w.offsets);
    }
    for id in buffers {
        let b = &program.buffers[id.index()];
        let _ = write!(key, " b{} {} {} {}", id.0, b.dtype, b.stride, b.offset);
    }
    key
}

/// Letters, digits and `_` only.
fn word(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// FNV-1a, 64 bits: stable over versions of compilers and crates.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}
