//! Tolerances, each with its reason; widening one needs a sentence.

use crate::compare::Difference;

/// What a result may differ by from the reference.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Largest `max |a - b| / max |b|`.
    pub max_rel: f64,
    /// Smallest cosine.
    pub cosine: f64,
    /// Largest divergence of the softmax (logits only).
    pub kld: f64,
}

impl Gate {
    /// Does the difference pass?
    pub fn holds(&self, d: &Difference) -> bool {
        // NaN fails every comparison.
        d.max_rel <= self.max_rel && d.cosine >= self.cosine && d.kld <= self.kld
    }
}

/// Logits and pooled vectors, f32 arithmetic on weights stored in any type, against transformers in f32. The references have 6 digits
/// (5e-7), the golden models agree to 2e-6; the smallest planted fault (the other GELU) moves them by 1e-4. The cosine and the
/// divergence are those of the table.
pub const F32: Gate = Gate { max_rel: 2e-5, cosine: 0.99999, kld: 1e-6 };

/// Logits with matmul inputs in bf16 against the interpreter that rounds at the same places: the table's row "bf16 activations", with
/// a tighter cosine. Most golden models agree to 1e-7; one ulp of f32 before such a rounding can become one ulp of bf16 (2^-8), which
/// moved one of them by 5e-3 (`granite`, with its multipliers).
pub const BF16: Gate = Gate { max_rel: 2e-2, cosine: 0.9999, kld: 1e-3 };

/// Logits with matmul inputs as int8 codes against the interpreter that has the same codes: sums are exact, but one ulp of f32 before the
/// rounding can become one code (1/127 of the largest of a group, twice that of bf16), which moved one golden model by 2.3e-2 (`qwen2`)
/// and, of 39 prompts of a random toy, one by 4.4e-2 on x86-64 and Arm alike; the prompts of the tests are below. Cosine and divergence are
/// those of the table's row "int8".
pub const INT8: Gate = Gate { max_rel: 4e-2, cosine: 0.999, kld: 3e-3 };

/// Logits with matmul inputs in bf16 against f32: what the rounding itself costs. The cosine is the table's. Its mean divergence of
/// 1e-3 is one of trained models: weights with a standard deviation of 0.25 amplify the rounding, up to 2e-3 (`qwen2`).
pub const BF16_TO_F32: Gate = Gate { max_rel: 6e-2, cosine: 0.999, kld: 5e-3 };

/// Top logits of a trained model of at most 20 in size: absolute. Sums in another order move them by 1e-5.
pub const TOP_LOGITS_ABS: f64 = 1e-4;

/// Perplexity of a trained model, relative: the references have six digits, and sums over thousands of tokens in another order agree with
/// them.
pub const PERPLEXITY_REL: f64 = 1e-5;

/// `1 - cosine` of a sentence embedding in f32; a wrong GELU already gives 1e-6.
pub const EMBEDDING_COSINE: f64 = 5e-7;

/// A greedy decision counts only where the reference's margin is above this: both sides are sums in another order.
pub const GREEDY_MARGIN: f64 = 1e-3;

/// Pooled vectors with matmul inputs in bf16 against f32: the table's row of embeddings. A vector is no distribution.
pub const EMBEDDING_BF16: Gate = Gate { max_rel: 2e-2, cosine: 0.9999, kld: f64::INFINITY };
