//! `H = X^T X` of the inputs of a linear layer, and its factor.
//!
//! In: inputs `X: f32[rows, k]`, chunk by chunk. Out: `R`, upper triangular with `R R^T = H + damp I`.
//!
//! Only blocks on and above the diagonal are kept, so a layer with k = 8192 takes 143 MB. Blocks are worked on by all threads, each block's
//! sums in one order, so that the bits do not depend on their number.

use super::blocks::{Panels, Product};
use crate::error::Error;
use rayon::prelude::*;

/// Part of the mean of the diagonal that is added to it.
pub const DAMP: f64 = 0.01;
/// The same for a head that is a table too: a lookup hands on the errors of a row as they are, so they count as much as what inputs make of
/// them.
pub const DAMP_TABLE: f64 = 1.0;

/// The sum so far.
pub struct Hessian<'p> {
    product: &'p Product,
    k: usize,
    /// Blocks per side.
    count: usize,
    /// Row-major blocks `(i, j)`, `i <= j`, see [`index`].
    blocks: Vec<Vec<f32>>,
}

/// `R`, cut like the Hessian.
pub struct Factor<'p> {
    /// Products of its blocks.
    pub product: &'p Product,
    /// Blocks per side.
    pub count: usize,
    blocks: Vec<Vec<f32>>,
}

/// Place of block `(i, j)`, `i <= j`, of the columns from the left.
fn index(i: usize, j: usize) -> usize {
    j * (j + 1) / 2 + i
}

/// The blocks of `count` columns of them, in their order.
fn pairs(count: usize) -> Vec<(usize, usize)> {
    (0..count).flat_map(|j| (0..=j).map(move |i| (i, j))).collect()
}

impl<'p> Hessian<'p> {
    /// Of inputs of width `k`.
    pub fn new(product: &'p Product, k: usize) -> Hessian<'p> {
        let (side, count) = (product.side, k.div_ceil(product.side));
        Hessian { product, k, count, blocks: vec![vec![0.0; side * side]; index(0, count)] }
    }

    /// Adds chunks of rows (`[rows][k]` each), in order.
    pub fn add(&mut self, chunks: &[Vec<f32>]) -> Result<(), Error> {
        let (side, k, product) = (self.product.side, self.k, self.product);
        // Rows in runs of `side`, columns in blocks, each as both operands; what is missing is zero.
        let runs: Vec<&[f32]> = chunks.iter().flat_map(|c| c.chunks(side * k)).collect();
        let operands: Vec<(Vec<f32>, Panels)> = (0..runs.len() * self.count)
            .into_par_iter()
            .map(|at| {
                let (run, first) = (runs[at / self.count], at % self.count * side);
                let value = |n: usize, t: usize| if first + n < k { run.get(t * k + first + n).copied().unwrap_or(0.0) } else { 0.0 };
                let mut left = vec![0.0; side * side];
                for t in 0..run.len() / k {
                    for n in 0..side.min(k - first) {
                        left[n * side + t] = run[t * k + first + n];
                    }
                }
                (left, product.panels(value))
            })
            .collect();
        let count = self.count;
        self.blocks.par_iter_mut().zip(pairs(count)).try_for_each(|(block, (i, j))| {
            for run in operands.chunks(count) {
                product.run(&run[i].0, &run[j].1, |c| block.iter_mut().zip(c).for_each(|(h, c)| *h += c))?;
            }
            Ok(())
        })
    }

    /// Columns from the largest inputs to the smallest.
    pub fn by_size(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.k).collect();
        order.sort_by(|a, b| self.at(*b, *b).total_cmp(&self.at(*a, *a)));
        order
    }

    /// The Hessian of inputs with their columns in this order.
    pub fn ordered(self, order: &[usize]) -> Hessian<'p> {
        let (side, k) = (self.product.side, self.k);
        let value = |i: usize, j: usize| if i.max(j) < k { self.at(order[i], order[j]) } else { 0.0 };
        let block = |i: usize, j: usize| (0..side * side).map(|e| value(i * side + e / side, j * side + e % side)).collect();
        let blocks = pairs(self.count).into_par_iter().map(|(i, j)| block(i, j)).collect();
        Hessian { blocks, ..self }
    }

    /// Element `(i, j)`.
    fn at(&self, i: usize, j: usize) -> f32 {
        let side = self.product.side;
        let (i, j) = (i.min(j), i.max(j));
        self.blocks[index(i / side, j / side)][i % side * side + j % side]
    }

    /// The factor, with `damp` times the mean of the diagonal added to it. `None`: the inputs were not finite.
    pub fn factor(mut self, damp: f64) -> Result<Option<Factor<'p>>, Error> {
        let (side, count, product) = (self.product.side, self.count, self.product);
        let mean = (0..self.k).map(|i| f64::from(self.at(i, i))).sum::<f64>() / self.k as f64;
        if !mean.is_finite() {
            return Ok(None);
        }
        // Inputs that are all zero say nothing: rounding to nearest.
        let damp = if mean > 0.0 { damp * mean } else { 1.0 };
        for i in 0..side * count {
            self.blocks[index(i / side, i / side)][i % side * (side + 1)] += if i < self.k { damp as f32 } else { 1.0 };
        }
        // From the last block column to the first; what lies left of and above a finished one is reduced by it.
        for l in (0..count).rev() {
            let Some(inverse) = factor_block(&mut self.blocks[index(l, l)], side, damp) else { return Ok(None) };
            let inverse = product.panels(|n, k| inverse[n * side + k]);
            let (before, column) = self.blocks.split_at_mut(index(0, l));
            column[..l].par_iter_mut().try_for_each(|block| {
                let h = block.clone();
                product.run(&h, &inverse, |c| block.copy_from_slice(c))
            })?;
            let panels: Vec<Panels> = column[..l].par_iter().map(|r| product.panels(|n, k| r[n * side + k])).collect();
            let column = &*column;
            before.par_iter_mut().zip(pairs(l)).try_for_each(|(block, (i, j))| {
                product.run(&column[i], &panels[j], |c| block.iter_mut().zip(c).for_each(|(h, c)| *h -= c))
            })?;
        }
        Ok(Some(Factor { product, count, blocks: self.blocks }))
    }
}

impl Factor<'_> {
    /// Block `(i, j)`, `i <= j`, row-major.
    pub fn block(&self, i: usize, j: usize) -> &[f32] {
        &self.blocks[index(i, j)]
    }
}

/// Replaces a symmetric block by its upper factor (zero below the diagonal) and returns the factor's inverse, computed in f64. No pivot of
/// a damped matrix is below `damp`; rounding may say otherwise.
fn factor_block(block: &mut [f32], side: usize, damp: f64) -> Option<Vec<f32>> {
    let mut r: Vec<f64> = block.iter().map(|x| f64::from(*x)).collect();
    // Column c of R from the columns behind it: rows 0 ..= c of H[:, c] - R[:, c+1..] R[c, c+1..]^T, right-looking.
    for c in (0..side).rev() {
        let pivot = r[c * side + c].max(damp).sqrt();
        if !pivot.is_finite() {
            return None;
        }
        r[c * side + c] = pivot;
        (0..c).for_each(|i| r[i * side + c] /= pivot);
        let column: Vec<f64> = (0..c).map(|i| r[i * side + c]).collect();
        for i in 0..c {
            let (x, row) = (column[i], &mut r[i * side + i..i * side + c]);
            row.iter_mut().zip(&column[i..]).for_each(|(h, y)| *h -= x * y);
        }
    }
    for i in 0..side {
        r[i * side..i * side + i].fill(0.0);
    }
    // Rows of the inverse from the last: R[i, i] v[i] = e[i] - sum over j > i of R[i, j] v[j].
    let mut inverse = vec![0.0f64; side * side];
    for i in (0..side).rev() {
        let mut row = vec![0.0; side];
        row[i] = 1.0;
        for j in i + 1..side {
            let x = r[i * side + j];
            row[j..].iter_mut().zip(&inverse[j * side + j..(j + 1) * side]).for_each(|(v, y)| *v -= x * y);
        }
        let pivot = r[i * side + i];
        inverse[i * side..(i + 1) * side].iter_mut().zip(row).for_each(|(v, x)| *v = x / pivot);
    }
    block.iter_mut().zip(&r).for_each(|(b, x)| *b = *x as f32);
    Some(inverse.into_iter().map(|x| x as f32).collect())
}
