//! Rotary position embedding: the inverse frequencies, computed as the reference computes them.
//!
//! In: a [`RopeConfig`] and the width of a head. Out: one `f32` per rotated pair and the factor on cos and sin. All
//! tensor arithmetic is f32 in the reference's order of operations; its Python scalars are f64 until they meet a tensor.
//! `powf` is the correctly rounded one (through f64), which the reference's vector library matches to one unit in the
//! last place.
//!
//! Source: HF `modeling_rope_utils.py` and `LlamaRotaryEmbedding`; YaRN: Peng et al. 2023; Llama 3.1's scaling.

use crate::config::{self, ConfigReader, RopeConfig, RopeKind};
use crate::error::{Error, Kind};

/// Largest inverse frequency: its product with any position is finite in f32.
const FREQUENCY_MAX: f32 = 1e20;
/// Largest factor on cos and sin.
const ATTENTION_FACTOR_MAX: f32 = 1e6;

/// How many of a head's elements are rotated: `int(head_dim * partial_rotary_factor)`.
pub fn rotary_dim(rope: &RopeConfig, head_dim: usize) -> usize {
    (head_dim as f64 * rope.partial_rotary_factor) as usize
}

/// Inverse frequencies of the `rotary_dim / 2` pairs and the factor that cos and sin are multiplied with.
/// Pair `i` is elements `i` and `i + rotary_dim / 2`; the angle at position `p` is `p as f32 * inv_freq[i]`.
/// `dynamic` gives the frequencies of positions below `max_positions`, where it equals the plain kind.
pub fn inv_freq(rope: &RopeConfig, head_dim: usize, max_positions: usize) -> (Vec<f32>, f32) {
    let dim = rotary_dim(rope, head_dim);
    match rope.kind {
        RopeKind::Default => (plain(rope.theta, dim), 1.0),
        RopeKind::Linear { factor } => {
            let factor = factor as f32;
            (plain(rope.theta, dim).into_iter().map(|f| f / factor).collect(), 1.0)
        }
        RopeKind::Dynamic { factor } => {
            // The reference goes through this formula at the trained length too; its rounding is kept.
            let length = max_positions as f64;
            let growth = (factor * length / length) - (factor - 1.0);
            let theta = rope.theta * libm::pow(growth, dim as f64 / (dim as f64 - 2.0));
            (plain(theta, dim), 1.0)
        }
        RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let length = original_max_position_embeddings as f64;
            let low_wavelength = (length / low_freq_factor) as f32;
            let high_wavelength = (length / high_freq_factor) as f32;
            let (scale, span) = (factor as f32, (high_freq_factor - low_freq_factor) as f32);
            let scaled = plain(rope.theta, dim).into_iter().map(|f| {
                // The reference divides a number by a tensor as reciprocal and product.
                let wavelength = (1.0 / f) * std::f64::consts::TAU as f32;
                if wavelength > low_wavelength {
                    f / scale
                } else if wavelength < high_wavelength {
                    f
                } else {
                    let smooth = ((1.0 / wavelength) * length as f32 - low_freq_factor as f32) / span;
                    (1.0 - smooth) * f / scale + smooth * f
                }
            });
            (scaled.collect(), 1.0)
        }
        RopeKind::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } => {
            let length = original_max_position_embeddings as f64;
            let dim_of = |rotations: f64| {
                let turns = libm::log(length / (rotations * 2.0 * std::f64::consts::PI));
                (dim as f64 * turns) / (2.0 * libm::log(rope.theta))
            };
            let (mut low, mut high) = (dim_of(beta_fast), dim_of(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let frequencies = powers(rope.theta, dim).into_iter().enumerate().map(|(i, power)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let extrapolate = 1.0 - ramp;
                let (interpolated, extrapolated) = (1.0 / (factor as f32 * power), 1.0 / power);
                interpolated * (1.0 - extrapolate) + extrapolated * extrapolate
            });
            (frequencies.collect(), yarn_attention_factor(&rope.kind) as f32)
        }
    }
}

/// Refuses parameters, each sound in itself, that together give frequencies or a factor of which cos and sin are not finite.
pub fn check(config: &ConfigReader<'_>, rope: &RopeConfig, head_dim: usize, max_positions: usize) -> Result<(), Error> {
    let (frequencies, factor) = inv_freq(rope, head_dim, max_positions);
    let bad = |frequencies: &[f32]| frequencies.iter().copied().find(|f| !(0.0..=FREQUENCY_MAX).contains(f));
    let refuse = |field: &str, what: &str, expected: String, found: f32| {
        let place = config::rope_place(config, field);
        Err(Error::new(Kind::Malformed, config.file(), place, what, expected, format!("{found:e}")))
    };
    if let Some(found) = bad(&frequencies) {
        let of_theta = bad(&plain(rope.theta, rotary_dim(rope, head_dim))).is_some();
        let field = if of_theta { "rope_theta" } else { "factor" };
        return refuse(field, "gives frequencies that are out of range", format!("0 to {FREQUENCY_MAX:e}"), found);
    }
    if !(-ATTENTION_FACTOR_MAX..=ATTENTION_FACTOR_MAX).contains(&factor) {
        let given = matches!(rope.kind, RopeKind::Yarn { attention_factor: Some(_), .. });
        let field = if given { "attention_factor" } else { "mscale_all_dim" };
        return refuse(field, "gives a factor on cos and sin that is out of range", format!("at most {ATTENTION_FACTOR_MAX:e}"), factor);
    }
    Ok(())
}

/// YaRN's factor on cos and sin: given, or from `mscale` and `mscale_all_dim`, or from `factor`.
fn yarn_attention_factor(kind: &RopeKind) -> f64 {
    let RopeKind::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = *kind else { return 1.0 };
    let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 };
    match (attention_factor, mscale, mscale_all_dim) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => of(m) / of(all),
        _ => of(1.0),
    }
}

/// `1 / theta^(2i / dim)`.
fn plain(theta: f64, dim: usize) -> Vec<f32> {
    powers(theta, dim).into_iter().map(|p| 1.0 / p).collect()
}

/// `theta^(2i / dim)` for `i` in `0..dim / 2`.
fn powers(theta: f64, dim: usize) -> Vec<f32> {
    let theta = f64::from(theta as f32);
    (0..dim).step_by(2).map(|i| libm::pow(theta, f64::from(i as f32 / dim as f32)) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigReader, rope};

    /// Bits computed by transformers 5.23.0 with torch 2.15.0 on the CPU, head width 8.
    #[test]
    #[rustfmt::skip]
    fn equal_to_the_reference_bit_for_bit() {
        let cases: &[(&str, [u32; 4], f32)] = &[
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 512}"#, [0x3f800000, 0x3dcccccd, 0x3c23d70a, 0x3a83126f], 1.0),
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}"#, [0x3ecccccd, 0x3d23d70a, 0x3b83126e, 0x39d1b718], 1.0),
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 1000, "rope_scaling": {"rope_type": "dynamic", "factor": 1.1}}"#, [0x3f800000, 0x3dcccccd, 0x3c23d70a, 0x3a83126f], 1.0),
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#, [0x3f800000, 0x3dcccccd, 0x3c23d70a, 0x3907a276], 1.0),
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}"#, [0x3f800000, 0x3dcccccd, 0x3c23d70a, 0x3a23d70b], 1.138_629_4),
            (r#"{"rope_theta": 10000.0, "max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": false}}"#, [0x3f800000, 0x3c4ccccd, 0x3aa3d70a, 0x3903126f], 0.948_355_85),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 512}"#, [0x3f800000, 0x3d1a08c8, 0x3ab95d21, 0x385f10c4], 1.0),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}"#, [0x3ecccccd, 0x3c767473, 0x3a144a81, 0x37b273d0], 1.0),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 1000, "rope_scaling": {"rope_type": "dynamic", "factor": 1.1}}"#, [0x3f800000, 0x3d1a08c8, 0x3ab95d21, 0x385f10c4], 1.0),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#, [0x3f800000, 0x3d1a08c8, 0x39e13620, 0x35df10c4], 1.0),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}"#, [0x3f800000, 0x3d1a08c8, 0x3a67b469, 0x375f10c4], 1.138_629_4),
            (r#"{"rope_theta": 500000.0, "max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": false}}"#, [0x3f800000, 0x3b9a08c8, 0x39395d21, 0x36df10c4], 0.948_355_85),
        ];
        for (config, bits, factor) in cases {
            let map: serde_json::Map<String, serde_json::Value> = serde_json::from_str(config).unwrap();
            let c = ConfigReader::new("config.json", &map);
            let max_positions = c.usize("max_position_embeddings", 1..=1 << 20).unwrap();
            let (frequencies, attention_factor) = inv_freq(&rope(&c, max_positions).unwrap(), 8, max_positions);
            let found: Vec<u32> = frequencies.iter().map(|f| f.to_bits()).collect();
            assert_eq!((found.as_slice(), attention_factor), (&bits[..], *factor), "{config}");
        }
    }

    fn yarn(
        factor: f64,
        (beta_fast, beta_slow): (f64, f64),
        [mscale, mscale_all_dim]: [Option<f64>; 2],
        (original_max_position_embeddings, truncate): (usize, bool),
    ) -> RopeKind {
        let attention_factor = None;
        RopeKind::Yarn {
            factor,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale,
            mscale_all_dim,
            original_max_position_embeddings,
            truncate,
        }
    }

    #[test]
    fn yarn_factors() {
        let of = |factor, mscale, mscale_all_dim| yarn_attention_factor(&yarn(factor, (32.0, 1.0), [mscale, mscale_all_dim], (64, true)));
        let plain = of(4.0, None, None);
        assert_eq!(plain, 0.1 * libm::log(4.0) + 1.0);
        // Zero counts as absent.
        for (mscale, all) in [(Some(0.0), Some(1.0)), (Some(2.0), Some(0.0)), (Some(2.0), None), (None, Some(2.0))] {
            assert_eq!(of(4.0, mscale, all), plain, "{mscale:?} {all:?}");
        }
        assert_eq!(of(0.5, Some(2.0), Some(1.0)), 1.0);
    }

    /// Wavelengths of 6 and 11 are short, of 20 between, of 35 long.
    #[test]
    fn llama3_by_both_factors() {
        let (factor, low, high, trained) = (3.0, 2.0, 4.0, 60);
        let kind = RopeKind::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_position_embeddings: trained };
        let (found, _) = inv_freq(&RopeConfig { theta: 10.0, kind, partial_rotary_factor: 1.0 }, 8, 512);
        let plain = [0.0, -0.25, -0.5, -0.75].map(|power| libm::pow(10.0, power));
        let smooth = (trained as f64 * plain[2] / std::f64::consts::TAU - low) / (high - low);
        let wanted = [plain[0], plain[1], (1.0 - smooth) * plain[2] / factor + smooth * plain[2], plain[3] / factor];
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((f64::from(*found) / wanted - 1.0).abs() < 1e-6, "{found}, not {wanted}");
        }
    }

    /// Ends of YaRN's ramp between two pairs, behind the head's last element, and both in one place.
    #[test]
    fn yarn_ramps() {
        let cases = [
            (4096, 512.0, 1.0, false, 0.419_640_47, 7.0),
            (4096, 512.0, 1.0, true, 0.0, 7.0),
            (64, 32.0, 1.0, false, 0.0, 4.032_000_4),
            (64, 32.0, 1.0, true, 0.0, 5.0),
            (1000, 32.0, 1.0, false, 2.786_680_6, 7.0),
            (6, 32.0, 1.0, true, 0.0, 0.001),
        ];
        for (trained, beta_fast, beta_slow, truncate, low, high) in cases {
            let factor = 1.5;
            let kind = yarn(factor, (beta_fast, beta_slow), [None; 2], (trained, truncate));
            let (found, on_both) = inv_freq(&RopeConfig { theta: 10.0, kind, partial_rotary_factor: 1.0 }, 8, 8192);
            assert_eq!(on_both, (0.1 * libm::log(factor) + 1.0) as f32);
            for (i, found) in found.into_iter().enumerate() {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let wanted = libm::pow(10.0, -(i as f64) / 4.0) * (1.0 - ramp + ramp / factor);
                assert!((f64::from(found) / wanted - 1.0).abs() < 1e-6, "{trained} {truncate} {i}: {found}, not {wanted}");
            }
        }
    }

    #[test]
    fn partial_rotation_narrows_the_series() {
        let config = |factor| RopeConfig { theta: 10_000.0, kind: RopeKind::Default, partial_rotary_factor: factor };
        assert_eq!(inv_freq(&config(0.5), 16, 64), inv_freq(&config(1.0), 8, 64));
        assert_eq!(rotary_dim(&config(0.75), 128), 96);
    }
}
