//! Pack: evaluates the recipe of every planned tensor and writes it, laid out for its kernels, to its place in the weights area.
//!
//! In: a [`WeightTable`], the checkpoint's tensors ([`Tensors`]), a file. Out: the bytes in the file and their BLAKE3 hash.
//!
//! Work is cut into items that take some megabytes each (a run of panels or rows, one at least), evaluated on all threads of the current
//! rayon pool; while one batch of items is evaluated, the one before is hashed and written in file order. So memory stays below some 400
//! MB whatever the model's size and the number of threads (unless a single panel takes more), and the bytes do not depend on them. The
//! file is written in whole large pages (`output`), which are mapped faster.

mod codes;
mod convert;
mod output;
mod panels;
mod view;

use crate::error::Error;
use crate::plan::{PackJob, WeightTable};
use output::Output;
use rayon::prelude::*;
use rcompile_codegen::program;
use rcompile_codegen::program::{Coding, Layout, Panels};
use rcompile_graph::quant::CodedRows;
use rcompile_graph::{DType, Recipe};
use rcompile_models::Kind;
use rcompile_models::weights::{self, Stored, WeightIndex};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use view::{Findings, View};

/// Where tensors of the checkpoint come from.
pub trait Tensors: Sync {
    /// Element type and shape of a tensor.
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)>;
    /// Reads bytes of a tensor (not of codes) from `offset` on.
    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error>;
    /// Rows of a tensor whose type is a quantised one: given codes, which are packed as they are.
    fn codes(&self, tensor: &str, _rows: Range<u64>) -> Result<CodedRows, Error> {
        Err(Error::bug("pack", format_args!("tensor {tensor} has no codes")))
    }
    /// File and name of a tensor there, for messages.
    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str);
}

impl Tensors for WeightIndex {
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)> {
        Some((self.dtype(tensor)?, self.shape(tensor)?.iter().map(|&n| n as u64).collect()))
    }
    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        match self.find(tensor) {
            Some(Stored::Plain(info)) => Ok(WeightIndex::read_into(self, info, offset, into)?),
            Some(Stored::Order(order)) => {
                let first = offset as usize / 4;
                into.as_chunks_mut().0.iter_mut().zip(&order[first..]).for_each(|(bytes, input)| *bytes = input.to_le_bytes());
                Ok(())
            }
            Some(Stored::Codes(_)) => Err(Error::bug("pack", format_args!("tensor {tensor} is codes"))),
            None => Err(Error::bug("pack", format_args!("tensor {tensor} is not in the checkpoint"))),
        }
    }
    fn codes(&self, tensor: &str, rows: Range<u64>) -> Result<CodedRows, Error> {
        match self.coded(tensor) {
            Some(coded) => Ok(coded.rows(self, rows)?),
            None => Err(Error::bug("pack", format_args!("tensor {tensor} has no codes"))),
        }
    }
    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str) {
        WeightIndex::place_of(self, tensor)
    }
}

/// Where the weights area goes.
#[derive(Clone, Copy, Debug)]
pub struct Sink<'a> {
    /// Open for writing.
    pub file: &'a File,
    /// For messages.
    pub path: &'a Path,
    /// File offset of the weights area.
    pub base: u64,
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// BLAKE3 of the whole weights area.
    pub hash: [u8; 32],
    /// The first element that is not finite (allowed by `--allow-nonfinite`): tensor, index.
    pub nonfinite: Option<(String, u64)>,
}

/// Bytes of memory that an item takes.
const ITEM_BYTES: u64 = 8 << 20;

/// Most bytes for one batch of items evaluated in parallel. The previous batch's output (at most as much again) is still in memory
/// meanwhile.
const BATCH_BYTES: u64 = 192 << 20;

/// One piece of a job: panels (of all ways) or rows `units` of it.
struct Item {
    job: usize,
    units: Range<u64>,
    offset: u64,
    bytes: u64,
    /// Bytes that evaluating it takes, output and what it is made of.
    memory: u64,
}

/// Elements of a tensor that a type cannot hold.
pub fn overflow(tensors: &dyn Tensors, tensor: &str, dtype: DType, count: u64) -> Error {
    let found = format!("{count} elements that do not");
    let (name, help) = match dtype {
        DType::Q4(_) => ("int4", "--keep keeps the type of a tensor"),
        DType::Q8(_) => ("int8", "--keep keeps the type of a tensor"),
        float => (float.name(), "--dtype auto, and auto in --keep, keep the type of the checkpoint"),
    };
    let (file, place) = tensors.place_of(tensor);
    rcompile_models::Error::new(Kind::Disagree, file, place, "overflows", format!("values that fit {name}"), found).help(help).into()
}

/// Packs all jobs. `progress` is called with bytes written since the last call.
///
/// Errors: not finite (4, unless allowed), does not fit the target type (5), reading (the source's), writing (8).
pub fn pack(
    table: &WeightTable,
    tensors: &dyn Tensors,
    sink: Sink<'_>,
    allow_nonfinite: bool,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Packed, Error> {
    let views = table.jobs.iter().map(|job| check_job(job, tensors)).collect::<Result<Vec<_>, Error>>()?;
    let items = items(table, &views)?;
    let (hasher, output) = (blake3::Hasher::new(), Output::new(sink));
    let mut order =
        InOrder { tensors, hasher, output, progress, position: 0, nonfinite: None, overflows: BTreeMap::new(), allow_nonfinite };
    let mut done: Vec<(&Item, Done)> = Vec::new();
    for next in batches(&items, 4 * rayon::current_num_threads()) {
        let evaluate = || {
            let all: Vec<_> = next.par_iter().map(|item| evaluate(&table.jobs[item.job], &views[item.job], item, tensors)).collect();
            all.into_iter().zip(next).map(|(done, item)| Ok((item, done?))).collect::<Result<Vec<_>, Error>>()
        };
        let (absorbed, evaluated) = rayon::join(|| order.absorb(&done), evaluate);
        absorbed?;
        done = evaluated?;
    }
    order.absorb(&done)?;
    if let Some((tensor, (count, dtype))) = std::mem::take(&mut order.overflows).into_iter().next() {
        return Err(overflow(tensors, &tensor, dtype, count));
    }
    order.write(&vec![0; (table.len - order.position) as usize])?;
    order.output.finish()?;
    Ok(Packed { hash: *order.hasher.finalize().as_bytes(), nonfinite: order.nonfinite })
}

/// The items in batches of at most so many and of [`BATCH_BYTES`], but one at least.
fn batches(items: &[Item], most: usize) -> impl Iterator<Item = &[Item]> {
    let mut left = items;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |item: &&Item| {
            bytes += item.memory;
            bytes <= BATCH_BYTES
        };
        let count = left.iter().take(most).take_while(fits).count().max(1).min(left.len());
        let (batch, rest) = left.split_at(count);
        left = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

/// What is done item by item in file order, so that the hash and the first error do not depend on threads.
struct InOrder<'a> {
    tensors: &'a dyn Tensors,
    hasher: blake3::Hasher,
    output: Output<'a>,
    progress: &'a (dyn Fn(u64) + Sync),
    position: u64,
    allow_nonfinite: bool,
    nonfinite: Option<(String, u64)>,
    /// By source tensor: elements that became infinite, and the type they do not fit.
    overflows: BTreeMap<String, (u64, DType)>,
}

impl InOrder<'_> {
    fn absorb(&mut self, items: &[(&Item, Done)]) -> Result<(), Error> {
        for (item, done) in items {
            self.write(&vec![0; (item.offset - self.position) as usize])?;
            self.write(&done.bytes)?;
            self.position = item.offset + item.bytes;
            (self.progress)(item.bytes);
            if let Some((tensor, index, value)) = &done.findings.nonfinite {
                let error = not_finite(self.tensors, tensor, *index, *value);
                if !self.allow_nonfinite {
                    return Err(error.help("--allow-nonfinite compiles it as it is").into());
                }
                // By the name in its file.
                let stored = error.place.rsplit_once('[').map_or(tensor.as_str(), |(name, _)| name);
                self.nonfinite.get_or_insert_with(|| (stored.to_string(), *index));
            }
            for (tensor, count, dtype) in &done.findings.overflows {
                self.overflows.entry(tensor.clone()).or_insert((0, *dtype)).0 += count;
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.hasher.update(bytes);
        self.output.write(bytes)
    }
}

fn not_finite(tensors: &dyn Tensors, tensor: &str, index: u64, value: f32) -> rcompile_models::Error {
    let (file, name) = tensors.place_of(tensor);
    weights::not_finite(file, format!("{name}[{index}]"), value)
}

/// Rows of a float matrix as f32. Errors: not finite (4), reading.
pub fn floats(recipe: &Recipe, rows: Range<u64>, tensors: &dyn Tensors) -> Result<Vec<f32>, Error> {
    let view = View::new(recipe, tensors)?;
    let mut findings = Findings::default();
    let mut block = vec![0; ((rows.end - rows.start) * view.row_bytes()) as usize];
    view.block(rows, 0..view.cols(), &mut block, tensors, &mut findings)?;
    match findings.nonfinite {
        Some((tensor, index, value)) => Err(not_finite(tensors, &tensor, index, value).into()),
        None => Ok(convert::to_f32(view.dtype(), &block)),
    }
}

/// An evaluated item.
struct Done {
    bytes: Vec<u8>,
    findings: Findings,
}

fn evaluate(job: &PackJob, view: &View, item: &Item, tensors: &dyn Tensors) -> Result<Done, Error> {
    let mut findings = Findings::default();
    let mut bytes = vec![0; item.bytes as usize];
    match job.layout {
        Layout::Plain => view.block(item.units.clone(), 0..view.cols(), &mut bytes, tensors, &mut findings)?,
        Layout::Panels(p) if p.coding != Coding::Elements => {
            for way in 0..p.ways {
                let matrix = view.coded(job.source, panels::rows(&p, way, &item.units), tensors, &mut findings)?;
                codes::fill(&p, job.dtype, way, &item.units, &matrix, &mut bytes);
            }
        }
        Layout::Panels(p) => {
            let mut block = Vec::new();
            for way in 0..p.ways {
                let rows = panels::rows(&p, way, &item.units);
                block.clear();
                block.resize(((rows.end - rows.start) * view.row_bytes()) as usize, 0);
                view.block(rows.clone(), 0..view.cols(), &mut block, tensors, &mut findings)?;
                panels::fill(&p, job.dtype, way, &item.units, &block, &mut bytes)?;
            }
        }
    }
    Ok(Done { bytes, findings })
}

/// The view of a job, after checking that recipe, shape, layout and size say the same.
fn check_job(job: &PackJob, tensors: &dyn Tensors) -> Result<View, Error> {
    let bug = |what: String| Error::bug(format_args!("pack {}", job.name), what);
    if let Layout::Panels(p) = job.layout
        && p.coding != Coding::Elements
    {
        return coded(job, &p, tensors);
    }
    let view = View::new(&job.recipe, tensors)?;
    if view.dtype() != job.source || view.shape() != job.shape {
        return Err(bug(format!("recipe gives {}{:?}, planned {}{:?}", view.dtype(), view.shape(), job.source, job.shape)));
    }
    let bytes = match job.layout {
        Layout::Plain => view.rows() * view.row_bytes(),
        Layout::Panels(p) => {
            let rows = u64::from(p.ways) * u64::from(p.groups) * u64::from(p.group_cols);
            if (view.rows(), view.cols()) != (rows, u64::from(p.k)) || p.nr == 0 || p.k_pack == 0 || p.ways == 0 || p.is_empty() {
                return Err(bug(format!("[{}, {}] does not fit {p:?}", view.rows(), view.cols())));
            }
            p.bytes(job.dtype)
        }
    };
    if bytes != job.bytes {
        return Err(bug(format!("{bytes} bytes, planned {}", job.bytes)));
    }
    Ok(view)
}

/// The view of a job of codes: of codes that are given, else of the floats that they are made from.
fn coded(job: &PackJob, p: &Panels, tensors: &dyn Tensors) -> Result<View, Error> {
    let bug = |what: String| Err(Error::bug(format_args!("pack {}", job.name), what));
    let of: &Recipe = match &job.recipe {
        Recipe::Convert { of, dtype } if *dtype == job.source => of,
        given => given,
    };
    let one_type = of_one_type(of, tensors)?;
    let view = View::new(&one_type, tensors)?;
    let rows = u64::from(p.ways) * u64::from(p.groups) * u64::from(p.group_cols);
    let fits = if of == &job.recipe { view.dtype() == job.source } else { view.dtype().is_float() };
    if !fits || view.shape() != job.shape || (view.rows(), view.cols()) != (rows, u64::from(p.k)) || p.is_empty() {
        return bug(format!("[{}, {}] of {} does not fit {p:?}", view.rows(), view.cols(), view.dtype()));
    }
    if !matches!(job.dtype, program::DType::U8 | program::DType::I8) || p.bytes(job.dtype) != job.bytes {
        return bug(format!("{:?} in {} bytes of {}", p.coding, job.bytes, job.dtype));
    }
    Ok(view)
}

/// Floats that codes are made of: parts of several types (q, k and v of a checkpoint that mixes them) as f32, which holds them all.
fn of_one_type<'r>(of: &'r Recipe, tensors: &dyn Tensors) -> Result<Cow<'r, Recipe>, Error> {
    let Recipe::Concat(parts) = of else { return Ok(Cow::Borrowed(of)) };
    let types = parts.iter().map(|part| Ok(View::new(part, tensors)?.dtype())).collect::<Result<Vec<DType>, Error>>()?;
    if types.windows(2).all(|pair| pair[0] == pair[1]) || !types.iter().all(|dtype| dtype.is_float()) {
        return Ok(Cow::Borrowed(of));
    }
    Ok(Cow::Owned(Recipe::Convert { of: Box::new(of.clone()), dtype: DType::F32 }))
}

/// Cuts jobs into items in file order.
fn items(table: &WeightTable, views: &[View]) -> Result<Vec<Item>, Error> {
    let mut order: Vec<usize> = (0..table.jobs.len()).collect();
    order.sort_by_key(|&i| table.jobs[i].offset);
    let mut items = Vec::new();
    let mut end = 0;
    for index in order {
        let job = &table.jobs[index];
        if job.offset < end || job.offset.checked_add(job.bytes).is_none_or(|e| e > table.len) {
            return Err(Error::bug(format_args!("pack {}", job.name), "its place overlaps or lies outside the weights area"));
        }
        end = job.offset + job.bytes;
        let view = &views[index];
        let (units, unit_bytes, sources) = match job.layout {
            Layout::Plain => (view.rows(), view.row_bytes(), view.cols() * view.scratch()),
            Layout::Panels(p) => {
                let rows = u64::from(p.ways) * u64::from(p.nr);
                // Codes are made of floats, by way of f32 and bytes.
                let by_way = if p.coding == Coding::Elements { 0 } else { 5 };
                let source = view.row_bytes() + view.cols() * (by_way + view.scratch());
                (u64::from(p.panels()), p.panel_bytes(job.dtype) * u64::from(p.ways), rows * source)
            }
        };
        if unit_bytes == 0 {
            continue;
        }
        let unit_memory = unit_bytes + sources;
        let step = (ITEM_BYTES / unit_memory).max(1);
        for start in (0..units).step_by(step as usize) {
            let units = start..units.min(start + step);
            let count = units.end - units.start;
            let (bytes, memory) = (count * unit_bytes, count * unit_memory);
            items.push(Item { job: index, offset: job.offset + start * unit_bytes, bytes, memory, units });
        }
    }
    Ok(items)
}

#[cfg(test)]
mod tests;
