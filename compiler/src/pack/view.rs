//! A recipe as something that rectangular blocks can be read from.
//!
//! Tensors that are stored as codes are read by rows, their codes as they are.
//! Conversions are moved to the leaves (they are elementwise), so that a leaf knows which tensor does not fit a type.

use super::{Tensors, convert};
use crate::error::Error;
use rcompile_graph::quant::CodedRows;
use rcompile_graph::recipe::rope_value;
use rcompile_graph::{DType, Recipe};
use rcompile_models::weights::first_nonfinite;
use std::ops::Range;

/// What was noticed while reading.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// First NaN or infinity: tensor, element index, value.
    pub nonfinite: Option<(String, u64, f32)>,
    /// Finite elements (of codes: scales) that a conversion made infinite: tensor, count, type.
    pub overflows: Vec<(String, u64, DType)>,
}

/// A recipe with its type. As a matrix it has `shape[0]` rows of all other dimensions together (vectors: rows of one element).
#[derive(Clone, Debug)]
pub(super) struct View {
    dtype: DType,
    shape: Vec<u64>,
    node: Node,
}

#[derive(Clone, Debug)]
enum Node {
    Source { tensor: String, stored: DType, conversions: Vec<DType> },
    Rope { sin: bool, inv_freq: Vec<f32>, scale: f32, conversions: Vec<DType> },
    Transpose(Box<View>),
    Concat(Vec<View>),
    Slice { of: Box<View>, start: u64 },
}

impl View {
    /// The view of a recipe. Recipes are made and typed by us: what does not fit is a bug.
    pub fn new(recipe: &Recipe, tensors: &dyn Tensors) -> Result<View, Error> {
        View::converted(recipe, tensors, &[])
    }

    /// The view with conversions (first to last) applied afterwards.
    fn converted(recipe: &Recipe, tensors: &dyn Tensors, conversions: &[DType]) -> Result<View, Error> {
        let bug = |what: String| Err(Error::bug("pack recipe", what));
        let last = |stored| conversions.last().copied().unwrap_or(stored);
        match recipe {
            Recipe::Source { tensor } => {
                let Some((stored, shape)) = tensors.info(tensor) else {
                    return bug(format!("tensor {tensor} is not in the checkpoint"));
                };
                if !conversions.is_empty() && (!stored.is_float() || !conversions.iter().all(|c| c.is_float())) {
                    return bug(format!("{tensor}: conversion of {stored} to {conversions:?}"));
                }
                let conversions = steps(stored, conversions);
                Ok(View { dtype: last(stored), shape, node: Node::Source { tensor: tensor.clone(), stored, conversions } })
            }
            Recipe::Rope { sin, inv_freq, scale, positions } => {
                let shape = vec![*positions, inv_freq.len() as u64];
                let conversions = steps(DType::F32, conversions);
                let node = Node::Rope { sin: *sin, inv_freq: inv_freq.clone(), scale: *scale, conversions };
                Ok(View { dtype: last(DType::F32), shape, node })
            }
            Recipe::Convert { of, dtype } => {
                let conversions: Vec<DType> = [*dtype].into_iter().chain(conversions.iter().copied()).collect();
                View::converted(of, tensors, &conversions)
            }
            Recipe::Transpose(of) => {
                let of = View::converted(of, tensors, conversions)?;
                match of.shape[..] {
                    [rows, cols] => Ok(View { dtype: of.dtype, shape: vec![cols, rows], node: Node::Transpose(Box::new(of)) }),
                    _ => bug(format!("transpose of {:?}", of.shape)),
                }
            }
            Recipe::Concat(parts) => {
                let parts = parts.iter().map(|p| View::converted(p, tensors, conversions)).collect::<Result<Vec<_>, _>>()?;
                let Some(first) = parts.first() else { return bug("concat of nothing".into()) };
                let tail = |v: &View| v.shape.get(1..).map(<[u64]>::to_vec);
                if parts.iter().any(|p| p.dtype != first.dtype || tail(p).is_none() || tail(p) != tail(first)) {
                    return bug(format!("concat of {:?}", parts.iter().map(|p| (p.dtype, &p.shape)).collect::<Vec<_>>()));
                }
                let mut shape = first.shape.clone();
                shape[0] = parts.iter().map(View::rows).sum();
                Ok(View { dtype: first.dtype, shape, node: Node::Concat(parts) })
            }
            Recipe::Slice { of, start, end } => {
                let of = View::converted(of, tensors, conversions)?;
                if of.shape.is_empty() || start > end || *end > of.rows() {
                    return bug(format!("slice {start}..{end} of {:?}", of.shape));
                }
                let mut shape = of.shape.clone();
                shape[0] = end - start;
                Ok(View { dtype: of.dtype, shape, node: Node::Slice { of: Box::new(of), start: *start } })
            }
        }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// A tensor of the checkpoint that it reads, the first of several.
    fn tensor(&self) -> &str {
        match &self.node {
            Node::Source { tensor, .. } => tensor,
            Node::Rope { .. } => "rope",
            Node::Transpose(of) | Node::Slice { of, .. } => of.tensor(),
            Node::Concat(parts) => parts.first().map_or("", View::tensor),
        }
    }
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }
    pub fn cols(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }
    pub fn row_bytes(&self) -> u64 {
        self.cols() * self.dtype.size()
    }

    /// Bytes that reading takes for each element, beside the element.
    pub fn scratch(&self) -> u64 {
        let converted = |stored: DType, conversions: &[DType]| match conversions {
            [] => 0,
            [between @ .., _] => stored.size() + between.iter().map(|dtype| dtype.size()).sum::<u64>(),
        };
        match &self.node {
            // Codes are read as they are.
            Node::Source { stored, .. } if !stored.is_float() => 0,
            Node::Source { stored, conversions, .. } => converted(*stored, conversions),
            Node::Rope { conversions, .. } => converted(DType::F32, conversions).max(4),
            Node::Transpose(of) => of.dtype.size() + of.scratch(),
            Node::Concat(parts) => parts.iter().map(View::scratch).max().unwrap_or(0),
            Node::Slice { of, .. } => of.scratch(),
        }
    }

    /// Rows as codes of `dtype`: rounded to nearest, or as they are stored.
    pub fn coded(&self, dtype: DType, rows: Range<u64>, tensors: &dyn Tensors, findings: &mut Findings) -> Result<CodedRows, Error> {
        let width = self.cols() as usize;
        // Parts one by one, so that each is known by its own name.
        if self.dtype.is_float() && !matches!(self.node, Node::Concat(_)) {
            let mut block = vec![0; ((rows.end - rows.start) * self.row_bytes()) as usize];
            self.block(rows, 0..self.cols(), &mut block, tensors, findings)?;
            let floats = convert::to_f32(self.dtype, &block);
            let coded = CodedRows::quantise(dtype, &floats, width);
            let count = coded.overflows();
            if count > 0 && floats.iter().all(|x| x.is_finite()) {
                findings.overflows.push((self.tensor().to_string(), count, dtype));
            }
            return Ok(coded);
        }
        match &self.node {
            Node::Source { tensor, .. } => {
                let found = tensors.codes(tensor, rows)?;
                if (found.dtype, found.width) != (dtype, width) {
                    let what = format!("{tensor} is {} by {}, planned {dtype} by {width}", found.dtype, found.width);
                    return Err(Error::bug("pack codes", what));
                }
                Ok(found)
            }
            Node::Concat(parts) => {
                let mut all = CodedRows { dtype, width, codes: vec![], scales: vec![], zeros: vec![] };
                let mut first = 0;
                for part in parts {
                    let begin = rows.start.clamp(first, first + part.rows()) - first;
                    let end = rows.end.clamp(first, first + part.rows()) - first;
                    if begin < end {
                        let part = part.coded(dtype, begin..end, tensors, findings)?;
                        all.codes.extend(part.codes);
                        all.scales.extend(part.scales);
                        all.zeros.extend(part.zeros);
                    }
                    first += part.rows();
                }
                Ok(all)
            }
            Node::Slice { of, start } => of.coded(dtype, rows.start + start..rows.end + start, tensors, findings),
            Node::Transpose(_) | Node::Rope { .. } => Err(Error::bug("pack codes", "groups along columns")),
        }
    }

    /// Writes elements `rows x cols` (not of codes), row-major and without gaps, to `out`.
    pub fn block(
        &self,
        rows: Range<u64>,
        cols: Range<u64>,
        out: &mut [u8],
        tensors: &dyn Tensors,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let (height, width) = (rows.end - rows.start, cols.end - cols.start);
        debug_assert_eq!(out.len() as u64, height * width * self.dtype.size());
        if out.is_empty() {
            return Ok(());
        }
        match &self.node {
            Node::Source { tensor, stored, conversions } => {
                let mut raw = Vec::new();
                let target = if conversions.is_empty() {
                    &mut *out
                } else {
                    raw.resize((height * width * stored.size()) as usize, 0);
                    &mut raw[..]
                };
                let stride = self.cols() * stored.size();
                let begin = rows.start * stride + cols.start * stored.size();
                if width == self.cols() {
                    tensors.read_into(tensor, begin, target)?;
                } else {
                    for (row, part) in target.chunks_mut((width * stored.size()) as usize).enumerate() {
                        tensors.read_into(tensor, begin + row as u64 * stride, part)?;
                    }
                }
                if let Some((at, value)) = first_nonfinite(*stored, target)
                    && findings.nonfinite.is_none()
                {
                    let index = (rows.start + at / width) * self.cols() + cols.start + at % width;
                    findings.nonfinite = Some((tensor.clone(), index, value));
                }
                convert_all(tensor, *stored, conversions, raw, out, findings)
            }
            Node::Rope { sin, inv_freq, scale, conversions } => {
                let mut table = Vec::with_capacity((height * width * 4) as usize);
                for position in rows {
                    for i in cols.clone() {
                        let value = rope_value(*sin, position, inv_freq[i as usize], *scale);
                        table.extend((value as f32).to_le_bytes());
                    }
                }
                if conversions.is_empty() {
                    out.copy_from_slice(&table);
                    return Ok(());
                }
                convert_all("rotary table", DType::F32, conversions, table, out, findings)
            }
            Node::Transpose(of) => {
                let mut block = vec![0; out.len()];
                of.block(cols, rows, &mut block, tensors, findings)?;
                let (height, width) = (height as usize, width as usize);
                match self.dtype.size() {
                    1 => transpose::<1>(&block, width, height, out),
                    2 => transpose::<2>(&block, width, height, out),
                    4 => transpose::<4>(&block, width, height, out),
                    _ => transpose::<8>(&block, width, height, out),
                }
                Ok(())
            }
            Node::Concat(parts) => {
                let row_bytes = (width * self.dtype.size()) as usize;
                let (mut first, mut out) = (0, out);
                for part in parts {
                    let begin = rows.start.clamp(first, first + part.rows()) - first;
                    let end = rows.end.clamp(first, first + part.rows()) - first;
                    let (mine, rest) = out.split_at_mut((end - begin) as usize * row_bytes);
                    part.block(begin..end, cols.clone(), mine, tensors, findings)?;
                    (first, out) = (first + part.rows(), rest);
                }
                Ok(())
            }
            Node::Slice { of, start } => of.block(rows.start + start..rows.end + start, cols, out, tensors, findings),
        }
    }
}

/// Conversions that change the type.
fn steps(stored: DType, conversions: &[DType]) -> Vec<DType> {
    let mut at = stored;
    conversions.iter().copied().filter(|&to| std::mem::replace(&mut at, to) != to).collect()
}

/// Applies `conversions` to `raw`, the last one into `out`. Without conversions `out` is filled already.
fn convert_all(
    tensor: &str,
    stored: DType,
    conversions: &[DType],
    raw: Vec<u8>,
    out: &mut [u8],
    findings: &mut Findings,
) -> Result<(), Error> {
    let (mut from, mut raw) = (stored, raw);
    for (step, &to) in conversions.iter().enumerate() {
        let mut next = Vec::new();
        let target = if step + 1 == conversions.len() {
            &mut *out
        } else {
            next.resize(raw.len() / from.size() as usize * to.size() as usize, 0);
            &mut next[..]
        };
        match convert::convert(from, to, &raw, target) {
            Some(0) => {}
            Some(count) => findings.overflows.push((tensor.to_string(), count, to)),
            None => return Err(Error::bug("pack recipe", format!("{tensor}: conversion of {from} to {to}"))),
        }
        (from, raw) = (to, next);
    }
    Ok(())
}

/// `src: [rows][cols]` to `dst: [cols][rows]`, elements of `N` bytes, in square blocks that fit the first-level cache.
fn transpose<const N: usize>(src: &[u8], rows: usize, cols: usize, dst: &mut [u8]) {
    const BLOCK: usize = 32;
    let (src, dst) = (src.as_chunks::<N>().0, dst.as_chunks_mut::<N>().0);
    for row0 in (0..rows).step_by(BLOCK) {
        for col0 in (0..cols).step_by(BLOCK) {
            for col in col0..cols.min(col0 + BLOCK) {
                for row in row0..rows.min(row0 + BLOCK) {
                    dst[col * rows + row] = src[row * cols + col];
                }
            }
        }
    }
}
