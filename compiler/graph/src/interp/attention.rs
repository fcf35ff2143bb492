//! The KV cache of a state, and attention over it.
//!
//! In: a state's declaration, its cache by slot, operands. Out: the cache with the rows' keys and values, or the output of every row and head.

use super::KV_INDEX_MAX;
use super::ops::{binary, compare, dot, exponentials, unary};
use crate::ops::{AttnExpr, AttnVar};
use crate::quant;
use crate::tensor::{Tensor, round, round_all};
use crate::types::{DType, State};
use std::collections::{HashMap, HashSet};

/// Keys and values of one slot, `[position, kv_head, head_dim]`.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotCache {
    keys: Vec<f64>,
    values: Vec<f64>,
    written: Vec<bool>,
}

/// The place of a row in the cache; both must be small non-negative numbers.
fn place(slot: &Tensor, kv_index: &Tensor, row: usize) -> Result<(i64, usize), String> {
    let (slot, index) = (slot.data[row] as i64, kv_index.data[row] as i64);
    if slot < 0 || !(0..KV_INDEX_MAX).contains(&index) {
        return Err(format!("row {row} has slot {slot} and kv_index {index}"));
    }
    Ok((slot, index as usize))
}

pub(super) fn kv_append(state: &State, cache: &mut HashMap<i64, SlotCache>, operands: &[&Tensor]) -> Result<(), String> {
    let (k, v) = (operands[0], operands[1]);
    let width = (state.kv_heads * state.head_dim) as usize;
    let mut seen = HashSet::new();
    for row in 0..k.shape[0] {
        let (slot, index) = place(operands[2], operands[3], row)?;
        if !seen.insert((slot, index)) {
            return Err(format!("two rows write kv_index {index} of slot {slot}"));
        }
        let slot = cache.entry(slot).or_default();
        if slot.written.len() <= index {
            slot.written.resize(index + 1, false);
            slot.keys.resize((index + 1) * width, f64::NAN);
            slot.values.resize((index + 1) * width, f64::NAN);
        }
        slot.written[index] = true;
        for (from, to) in [(k, &mut slot.keys), (v, &mut slot.values)] {
            let (from, to) = (&from.data[row * width..][..width], &mut to[index * width..][..width]);
            if state.dtype.is_quantised() {
                // The row of a quantised type is a head's key or value.
                let heads = Tensor::new(k.dtype, &[state.kv_heads as usize, state.head_dim as usize], from.to_vec());
                to.copy_from_slice(&quant::quantise(state.dtype, &heads));
                continue;
            }
            for (x, y) in from.iter().zip(to) {
                *y = round(state.dtype, *x);
            }
        }
    }
    Ok(())
}

/// Variables of an attention expression at one place.
#[derive(Clone, Copy)]
struct Place {
    score: f64,
    head: f64,
    query: f64,
    key: f64,
}

/// Value of an attention expression; bool as 0 and 1.
fn attention(expr: &AttnExpr, at: Place) -> f64 {
    match expr {
        AttnExpr::Var(AttnVar::Score) => at.score,
        AttnExpr::Var(AttnVar::Head) => at.head,
        AttnExpr::Var(AttnVar::Query) => at.query,
        AttnExpr::Var(AttnVar::Key) => at.key,
        AttnExpr::Const(c) => *c,
        AttnExpr::Unary(u, x) => unary(*u, attention(x, at)),
        AttnExpr::Binary(b, x, y) => binary(*b, attention(x, at), attention(y, at)),
        AttnExpr::Compare(c, x, y) => f64::from(u8::from(compare(*c, attention(x, at), attention(y, at)))),
        AttnExpr::True => 1.0,
    }
}

pub(super) fn sdpa(
    state: &State,
    cache: &HashMap<i64, SlotCache>,
    score: &AttnExpr,
    mask: &AttnExpr,
    operands: &[&Tensor],
    rounds: bool,
) -> Result<Vec<f64>, String> {
    let q = operands[0];
    let (rows, heads, d) = (q.shape[0], q.shape[1], q.shape[2]);
    let round_factors = |data: &mut [f64]| {
        if rounds {
            round_all(DType::BF16, data);
        }
    };
    let mut queries = q.data.clone();
    round_factors(&mut queries);
    let kv_heads = state.kv_heads as usize;
    let group = (heads / kv_heads.max(1)).max(1);
    let width = kv_heads * d;
    let mut key_counts: HashMap<i64, usize> = HashMap::new();
    for row in 0..rows {
        let (slot, index) = place(operands[2], operands[3], row)?;
        let count = key_counts.entry(slot).or_default();
        *count = (*count).max(index + 1);
    }
    for (slot, count) in &key_counts {
        let written = cache.get(slot).map_or(&[][..], |c| &c.written);
        if let Some(missing) = (0..*count).find(|i| !written.get(*i).is_some_and(|w| *w)) {
            return Err(format!("kv_index {missing} of slot {slot} was never written"));
        }
    }
    let mut out = vec![0.0; rows * heads * d];
    let (mut keys, mut weights) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let (slot, index) = place(operands[2], operands[3], row)?;
        let cached = &cache[&slot];
        for head in 0..heads {
            let q_row = &queries[(row * heads + head) * d..][..d];
            let kv_start = head / group * d;
            keys.clear();
            weights.clear();
            for key in 0..key_counts[&slot] {
                let at = Place { score: f64::NAN, head: head as f64, query: index as f64, key: key as f64 };
                if attention(mask, at) != 0.0 {
                    let raw = dot(q_row, &cached.keys[key * width + kv_start..][..d]);
                    keys.push(key);
                    weights.push(attention(score, Place { score: raw, ..at }));
                }
            }
            let sum = exponentials(&mut weights);
            round_factors(&mut weights);
            weights.iter_mut().for_each(|w| *w /= sum);
            let out_row = &mut out[(row * heads + head) * d..][..d];
            for (key, weight) in keys.iter().zip(&weights) {
                for (o, v) in out_row.iter_mut().zip(&cached.values[key * width + kv_start..][..d]) {
                    *o += weight * v;
                }
            }
        }
    }
    Ok(out)
}
