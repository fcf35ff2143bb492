//! Numbers against numbers.

use std::fmt;

/// How far a vector is from its reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// `max |found - expected| / max |expected|`
    pub max_rel: f64,
    /// Cosine of the two.
    pub cosine: f64,
    /// Kullback-Leibler divergence of their softmaxes, `sum p (ln p - ln q)` with p the reference.
    pub kld: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "max error {:.2e}, 1 - cosine {:.2e}, divergence {:.2e}", self.max_rel, 1.0 - self.cosine, self.kld)
    }
}

/// Compares `found` with the reference `expected`; NaN where one of them has a NaN or an infinity.
pub fn difference(found: &[f64], expected: &[f64]) -> Difference {
    assert_eq!(found.len(), expected.len(), "vectors of one length are compared");
    let size = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let (mut error, mut dot, mut aa, mut bb) = (0.0f64, 0.0, 0.0, 0.0);
    for (a, b) in found.iter().zip(expected) {
        let d = (a - b).abs();
        // `f64::max` would drop a NaN.
        error = if d.is_nan() || error.is_nan() { f64::NAN } else { error.max(d) };
        dot += a * b;
        aa += a * a;
        bb += b * b;
    }
    let (log_q, log_p) = (log_softmax(found), log_softmax(expected));
    let kld = log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
    // Rounding can make a divergence of 0 slightly negative.
    let kld = if kld < 0.0 { 0.0 } else { kld };
    Difference { max_rel: error / size, cosine: dot / (aa.sqrt() * bb.sqrt()), kld }
}

fn log_softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|v| (v - max).exp()).sum();
    x.iter().map(|v| v - max - sum.ln()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_vectors_do_not_differ_and_nan_never_passes() {
        let x = [1.0, -2.0, 3.0];
        let same = difference(&x, &x);
        assert_eq!((same.max_rel, same.kld), (0.0, 0.0));
        assert!((same.cosine - 1.0).abs() < 1e-15);
        let other = difference(&[1.0, -2.0, 3.3], &x);
        assert!((other.max_rel - 0.1).abs() < 1e-12 && other.cosine < 1.0 && other.kld > 0.0);
        let loose = crate::tol::Gate { max_rel: f64::INFINITY, cosine: -1.0, kld: f64::INFINITY };
        for bad in [f64::NAN, f64::INFINITY] {
            assert!(!loose.holds(&difference(&[1.0, bad, 3.0], &x)), "{bad}");
        }
    }
}
