//! GPTQ: rows of weights to codes, one column after the other, so that the columns to come make up for the error so far.
//!
//! With `H = X^T X` (damped) and errors `D = W - Q`, what rounding costs is `|D R|^2`, where `R R^T = H` and R is upper triangular: column
//! c of `D R` holds the errors up to column c only. So the best value for column c, given the errors before it, is
//!
//! ```text
//! w'[c] = w[c] + s[c] / R[c, c],   s[c] = sum over i < c of D[i] R[i, c]
//! ```
//! which is rounded to a code; that is the error feedback of GPTQ without the inverse of H. A group's scale is taken from its `w'` as they
//! would be without further errors, when its first column is reached; the one scale of an int8 row from the row itself. With another order
//! of columns (act-order: those with the largest inputs first) groups stay what they are in the tensor, so that their columns come at any
//! time: scales are taken from the weights.
//!
//! In: rows of floats, a [`Factor`]. Out: [`CodedRows`] rows. Each row is independent of all others.
//!
//! Source: Frantar, Ashkboos, Hoefler, Alistarh 2022, <https://arxiv.org/abs/2210.17323>; Chen, Shabanzadeh, Crncevic, Hoefler, Alistarh
//! 2025, <https://arxiv.org/abs/2507.18553> (this form: Babai's nearest plane).

use super::blocks::Panels;
use super::hessian::Factor;
use crate::error::Error;
use rcompile_graph::DType;
use rcompile_graph::quant::{CodedRows, Step};

/// Columns that are worked on together where scales are known.
const COLUMNS: usize = 32;

/// Rows that are worked on together, so that a block of the factor is read once for all of them.
pub const BAND: usize = 256;

/// The factor with what all bands share.
pub struct Gptq<'f, 'p> {
    factor: &'f Factor<'p>,
    /// Blocks above the diagonal, transposed, as right operands.
    above: Vec<Vec<Panels>>,
    /// Columns of the tensors in the factor's order, if that is another one.
    order: Option<&'f [usize]>,
}

impl<'f, 'p> Gptq<'f, 'p> {
    /// Prepares products with the factor of a Hessian, or of one whose columns are in this order.
    pub fn new(factor: &'f Factor<'p>, order: Option<&'f [usize]>) -> Gptq<'f, 'p> {
        use rayon::prelude::*;
        let side = factor.product.side;
        let panels = |i: usize, j: usize| {
            let r = factor.block(i, j);
            factor.product.panels(|n, k| r[k * side + n])
        };
        let above = (0..factor.count).into_par_iter().map(|j| (0..j).map(|i| panels(i, j)).collect()).collect();
        Gptq { factor, above, order }
    }

    /// Rounds rows of `k` weights each, at most [`BAND`] of them.
    pub fn round(&self, dtype: DType, weights: &[f32], k: usize) -> Result<CodedRows, Error> {
        let (side, rows) = (self.factor.product.side, weights.len() / k);
        let mut coded = CodedRows { dtype, width: k, codes: vec![0; weights.len()], scales: vec![], zeros: vec![] };
        let (group, groups) = (coded.group(), coded.groups());
        // Where a group's columns follow each other, its step is taken anew when they begin.
        let mut steps: Vec<Step> = weights.chunks(k).flat_map(|row| row.chunks(group).map(|x| Step::of(dtype, x))).collect();
        let in_groups = groups > 1 && self.order.is_none();
        let place = |c: usize| self.order.map_or(c, |order| order[c]);
        let ordered: Option<Vec<f32>> = self.order.map(|o| weights.chunks(k).flat_map(|row| o.iter().map(|c| row[*c])).collect());
        let weights = ordered.as_deref().unwrap_or(weights);
        // Errors by block of columns: [block][rows][side].
        let mut errors: Vec<Vec<f32>> = Vec::new();
        let mut sums = vec![0.0f32; rows * side];
        for j in 0..self.factor.count {
            sums.fill(0.0);
            for (errors, r) in errors.iter().zip(&self.above[j]) {
                self.factor.product.run(errors, r, |c| sums.iter_mut().zip(c).for_each(|(s, c)| *s += c))?;
            }
            let r = self.factor.block(j, j);
            let mut of_block = vec![0.0f32; rows * side];
            let wide = if in_groups { group } else { COLUMNS };
            let end = side.min(k - j * side);
            for first in (0..end).step_by(wide) {
                let columns = first..end.min(first + wide);
                for row in 0..rows {
                    let s = &mut sums[row * side..][..side];
                    let d = &mut of_block[row * side..][..side];
                    let w = &weights[row * k + j * side..][..end];
                    if in_groups {
                        steps[row * groups + (j * side + first) / group] = Step::of(dtype, &free(w, s, r, side, columns.clone()));
                    }
                    for c in columns.clone() {
                        let best = w[c] + s[c] / r[c * side + c];
                        let at = place(j * side + c);
                        let step = &steps[row * groups + at / group];
                        let code = step.code(best);
                        coded.codes[row * k + at] = code;
                        d[c] = w[c] - f32::from(code) * step.scale;
                        push(&mut s[c + 1..columns.end], d[c], &r[c * side + c + 1..]);
                    }
                    // The columns behind, four errors at a time.
                    let behind = columns.end..end;
                    for c in columns.clone().step_by(4) {
                        let of = |i: usize| if c + i < columns.end { (d[c + i], (c + i) * side) } else { (0.0, c * side) };
                        let at = |i: usize| &r[of(i).1 + behind.start..of(i).1 + behind.end];
                        let (r0, r1, r2, r3) = (at(0), at(1), at(2), at(3));
                        let (d0, d1, d2, d3) = (of(0).0, of(1).0, of(2).0, of(3).0);
                        for (i, s) in s[behind.clone()].iter_mut().enumerate() {
                            *s = *s + d0 * r0[i] + d1 * r1[i] + d2 * r2[i] + d3 * r3[i];
                        }
                    }
                }
            }
            errors.push(of_block);
        }
        coded.scales = steps.iter().map(|step| step.scale).collect();
        Ok(coded)
    }
}

/// What a group's weights would be best if they were not rounded.
fn free(w: &[f32], s: &[f32], r: &[f32], side: usize, columns: std::ops::Range<usize>) -> Vec<f32> {
    let mut s = s[columns.clone()].to_vec();
    let first = columns.start;
    columns
        .clone()
        .map(|c| {
            let error = -s[c - first] / r[c * side + c];
            push(&mut s[c - first + 1..], error, &r[c * side + c + 1..]);
            w[c] - error
        })
        .collect()
}

/// An error's part in the sums of later columns.
fn push(sums: &mut [f32], error: f32, r: &[f32]) {
    sums.iter_mut().zip(r).for_each(|(s, r)| *s += error * r);
}
