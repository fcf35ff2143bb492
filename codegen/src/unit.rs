//! Units of compilation: one LLVM module per distinct kernel, per part that kernels call, per step function and per probe.
//!
//! Units borrow program and target and own nothing of LLVM, so that a driver can compile them on all cores. A symbol has a hash of all data
//! that its code depends on: equal kernels of several buckets, and equal parts of several kernels, have equal keys, and the driver keeps
//! one of each ([`Unit::key`]).

use crate::error::Error;
use crate::isa::Isa;
use crate::kernels::part::Part;
use crate::kernels::{attention, loops, matmul, probe, quantise, step};
use crate::llvm::module::{self, Compiled, Emit};
use crate::program::{Area, Kernel, Program, Region};
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
    Part(Part),
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

/// Units of a program, which must be valid (see [`crate::verify`]): kernels in order of regions, each with its parts before it,
/// without repetitions, then the step function. Drop units whose key another program's unit has.
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
        for part in Part::of(isa, program, &region.kernel) {
            let key = part_key(&part, isa, options);
            add(part_symbol(&part, isa, &key), key, What::Part(part));
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
    let part_symbol = |part: &Part| part_symbol(part, unit.isa, &part_key(part, unit.isa, unit.options));
    module::build(&unit.symbol, unit.isa, unit.options.opt_level, unit.options.emit, |mb| {
        match &unit.what {
            What::Kernel(Kernel::Loops(nest)) => {
                loops::define(mb, unit.program, &unit.symbol, nest);
            }
            What::Kernel(Kernel::Matmul(kernel)) => {
                matmul::define(mb, unit.program, &unit.symbol, kernel, part_symbol)?;
            }
            What::Kernel(Kernel::Attention(kernel)) => {
                attention::define(mb, unit.program, &unit.symbol, kernel, part_symbol)?;
            }
            What::Kernel(Kernel::Quantise(kernel)) => {
                quantise::define(mb, unit.program, &unit.symbol, kernel);
            }
            What::Part(part) => {
                part.define(mb, &unit.symbol)?;
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
        Kernel::Attention(a) => ("attention", format!("{}{}", a.q.dtype, a.kv.dtype), format!("_{}x{}", a.tile_rows, a.kv.head_dim)),
    };
    format!("rc_{kind}_{dtypes}_{}{tile}_{:016x}__{}", word(&region.name), fnv1a(key.as_bytes()), word(&isa.name))
}

/// `rc_<label>_<hash>__<cpu>`.
fn part_symbol(part: &Part, isa: &Isa, key: &str) -> String {
    format!("rc_{}_{:016x}__{}", part.label(), fnv1a(key.as_bytes()), word(&isa.name))
}

/// All that the code of a part depends on.
fn part_key(part: &Part, isa: &Isa, options: Options) -> String {
    format!("O{} {isa:?} {part:?}", options.opt_level)
}

/// A kernel's data and those of the buffers and weights that it refers to.
fn kernel_key(program: &Program, region: &Region, isa: &Isa, options: Options) -> String {
    let mut key = format!("{} O{} {isa:?} {:?}", region.name, options.opt_level, region.kernel);
    let (mut weights, mut buffers) = (BTreeSet::new(), BTreeSet::new());
    for access in region.kernel.accesses() {
        match access.area {
            Area::Weight(id) => _ = weights.insert(id),
            Area::Buffer(id) => _ = buffers.insert(id),
            _ => {}
        }
    }
    if let Kernel::Matmul(m) = &region.kernel {
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
