//! Recipes of parameters: the slow reference of what the pack stage does, and what can be said of a recipe's type without the checkpoint.

use crate::quant::quantise;
use crate::tensor::{Tensor, convert};
use crate::types::{DType, Recipe, Type};

/// Deepest nesting of a recipe (the text form and the verifier refuse more).
pub const DEPTH_MAX: usize = 32;

/// Value of a recipe; `source` reads a tensor of the checkpoint in its stored type.
/// Errors: a missing tensor, shapes that do not fit, a finite value that the target of a conversion cannot hold.
pub fn evaluate(recipe: &Recipe, source: &dyn Fn(&str) -> Result<Tensor, String>) -> Result<Tensor, String> {
    match recipe {
        Recipe::Source { tensor } => source(tensor),
        Recipe::Transpose(of) => {
            let x = evaluate(of, source)?;
            let [rows, cols] = x.shape[..] else { return Err(format!("transpose of shape {:?}: not a matrix", x.shape)) };
            let mut data = Vec::with_capacity(x.data.len());
            for c in 0..cols {
                data.extend((0..rows).map(|r| x.data[r * cols + c]));
            }
            Ok(Tensor { dtype: x.dtype, shape: vec![cols, rows], data })
        }
        Recipe::Concat(parts) => {
            let mut parts = parts.iter().map(|p| evaluate(p, source));
            let mut all = parts.next().ok_or("concat of nothing")??;
            if all.shape.is_empty() {
                return Err("concat of scalars".into());
            }
            for part in parts {
                let part = part?;
                if part.dtype != all.dtype || part.shape.is_empty() || part.shape[1..] != all.shape[1..] {
                    return Err(format!("concat of {}{:?} and {}{:?}", all.dtype, all.shape, part.dtype, part.shape));
                }
                all.shape[0] += part.shape[0];
                all.data.extend(part.data);
            }
            Ok(all)
        }
        Recipe::Slice { of, start, end } => {
            let x = evaluate(of, source)?;
            let rows = x.shape.first().copied().unwrap_or(0) as u64;
            if x.shape.is_empty() || start > end || *end > rows {
                return Err(format!("rows {start}..{end} of shape {:?}", x.shape));
            }
            let width: usize = x.shape[1..].iter().product();
            let mut shape = x.shape.clone();
            shape[0] = (end - start) as usize;
            let data = x.data[*start as usize * width..*end as usize * width].to_vec();
            Ok(Tensor { dtype: x.dtype, shape, data })
        }
        // Part by part, as `pack` does: the checkpoint may store them in different types.
        Recipe::Convert { of, dtype } if let Recipe::Concat(parts) = &**of => {
            let convert = |of: &Recipe| Recipe::Convert { of: Box::new(of.clone()), dtype: *dtype };
            evaluate(&Recipe::Concat(parts.iter().map(convert).collect()), source)
        }
        Recipe::Convert { of, dtype } => {
            let mut x = evaluate(of, source)?;
            if dtype.has_zeros() {
                return Err(format!("conversion to {dtype}"));
            }
            if dtype.is_quantised() {
                return Ok(Tensor { dtype: *dtype, data: quantise(*dtype, &x), shape: x.shape });
            }
            for value in &mut x.data {
                let converted = convert(x.dtype, *dtype, *value);
                let lost = if dtype.is_float() { converted.is_infinite() && value.is_finite() } else { converted != *value };
                if lost {
                    return Err(format!("{value} does not fit in {dtype}"));
                }
                *value = converted;
            }
            x.dtype = *dtype;
            Ok(x)
        }
        Recipe::Rope { sin, inv_freq, scale, positions } => {
            let rows = usize::try_from(*positions).map_err(|e| e.to_string())?;
            let mut data = Vec::new();
            for position in 0..rows {
                for freq in inv_freq {
                    data.push(rope_value(*sin, position as u64, *freq, *scale));
                }
            }
            Ok(Tensor::new(DType::F32, &[rows, inv_freq.len()], data))
        }
    }
}

/// One element of a rotary table before the rounding to f32: the angle is an f32 product, the rest is f64.
pub fn rope_value(sin: bool, position: u64, inv_freq: f32, scale: f32) -> f64 {
    let angle = f64::from(position as f32 * inv_freq);
    (if sin { libm::sin(angle) } else { libm::cos(angle) }) * f64::from(scale)
}

/// What is known of a recipe's type without reading the checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Element type.
    pub dtype: Option<DType>,
    /// Number of axes: two, where it is known.
    pub rank: Option<usize>,
    /// Extents of the leading axes as far as known.
    pub dims: Vec<Option<u64>>,
}

impl Known {
    /// True unless the type contradicts what is known.
    pub fn allows(&self, ty: &Type) -> bool {
        self.dtype.is_none_or(|d| d == ty.dtype)
            && self.rank.is_none_or(|r| r == ty.rank())
            && self.dims.len() <= ty.rank()
            && self.dims.iter().zip(&ty.shape).all(|(known, dim)| known.is_none_or(|n| dim.constant() == Some(n)))
    }
    fn first(&self) -> Option<u64> {
        self.dims.first().copied().flatten()
    }
}

/// What is known of the recipe's type. Errors: it can have no value at all (too deep, empty, rows out of range, parts that differ).
pub fn known_type(recipe: &Recipe) -> Result<Known, String> {
    known_at(recipe, 0)
}

fn known_at(recipe: &Recipe, depth: usize) -> Result<Known, String> {
    if depth >= DEPTH_MAX {
        return Err(format!("recipe nested deeper than {DEPTH_MAX}"));
    }
    match recipe {
        Recipe::Source { .. } => Ok(Known::default()),
        Recipe::Transpose(of) => {
            let x = known_at(of, depth + 1)?;
            let second = x.dims.get(1).copied().flatten();
            Ok(Known { dtype: x.dtype, rank: Some(2), dims: vec![second, x.first()] })
        }
        Recipe::Concat(parts) => {
            let mut sum = Some(0u64);
            let mut all = Known::default();
            for part in parts {
                let part = known_at(part, depth + 1)?;
                let clash = |what: &str| format!("concat of different {what}");
                if let (Some(a), Some(b)) = (all.dtype, part.dtype)
                    && a != b
                {
                    return Err(clash("types"));
                }
                sum = match (sum, part.first()) {
                    (Some(a), Some(b)) => Some(a.checked_add(b).ok_or("concat is too long")?),
                    _ => None,
                };
                all.dtype = all.dtype.or(part.dtype);
                all.rank = all.rank.or(part.rank);
                for (axis, known) in part.dims.iter().enumerate().skip(1) {
                    if all.dims.len() <= axis {
                        all.dims.resize(axis + 1, None);
                    }
                    match (all.dims[axis], known) {
                        (Some(a), Some(b)) if a != *b => return Err(clash("widths")),
                        (None, Some(b)) => all.dims[axis] = Some(*b),
                        _ => {}
                    }
                }
            }
            if parts.is_empty() {
                return Err("concat of nothing".into());
            }
            if all.dims.is_empty() {
                all.dims.push(None);
            }
            all.dims[0] = sum;
            Ok(all)
        }
        Recipe::Slice { of, start, end } => {
            let mut x = known_at(of, depth + 1)?;
            if start >= end || x.first().is_some_and(|rows| *end > rows) {
                return Err(format!("rows {start}..{end} are empty or out of range"));
            }
            if x.dims.is_empty() {
                x.dims.push(None);
            }
            x.dims[0] = Some(end - start);
            Ok(x)
        }
        Recipe::Convert { of, dtype } => {
            if *dtype == DType::State || dtype.has_zeros() {
                return Err(format!("conversion to {dtype}"));
            }
            Ok(Known { dtype: Some(*dtype), ..known_at(of, depth + 1)? })
        }
        Recipe::Rope { inv_freq, positions, .. } => {
            Ok(Known { dtype: Some(DType::F32), rank: Some(2), dims: vec![Some(*positions), Some(inv_freq.len() as u64)] })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str) -> Result<Tensor, String> {
        match name {
            "a" => Ok(Tensor::new(DType::BF16, &[2, 3], (0..6).map(f64::from))),
            "b" => Ok(Tensor::new(DType::BF16, &[1, 3], [7.0, 8.0, 9.0])),
            "fine" => Ok(Tensor::new(DType::F32, &[1, 2], [1.0 + 2f64.powi(-9), 1.5])),
            "big" => Ok(Tensor::new(DType::F32, &[1], [70000.0])),
            "infinite" => Ok(Tensor::new(DType::F32, &[1], [f64::INFINITY])),
            "one" => Ok(Tensor::new(DType::BF16, &[], [1.0])),
            _ => Err(format!("no tensor {name:?}")),
        }
    }
    fn leaf(name: &str) -> Recipe {
        Recipe::Source { tensor: name.into() }
    }
    fn convert(name: &str, dtype: DType) -> Recipe {
        Recipe::Convert { of: Box::new(leaf(name)), dtype }
    }
    fn value(recipe: Recipe) -> Result<Tensor, String> {
        evaluate(&recipe, &source)
    }

    #[test]
    fn every_recipe_has_the_value_that_it_says() {
        assert_eq!(value(Recipe::Transpose(Box::new(leaf("a")))).unwrap().data, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        let cat = value(Recipe::Concat(vec![leaf("a"), leaf("b")])).unwrap();
        assert_eq!((cat.shape, cat.data), (vec![3, 3], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0]));
        let cut = value(Recipe::Slice { of: Box::new(leaf("a")), start: 1, end: 2 }).unwrap();
        assert_eq!((cut.shape, cut.data), (vec![1, 3], vec![3.0, 4.0, 5.0]));
        let f32 = value(convert("b", DType::F32)).unwrap();
        assert_eq!((f32.dtype, f32.data), (DType::F32, vec![7.0, 8.0, 9.0]));
        let bf16 = value(convert("fine", DType::BF16)).unwrap();
        assert_eq!((bf16.dtype, bf16.data), (DType::BF16, vec![1.0, 1.5]));
        let i32 = value(convert("b", DType::I32)).unwrap();
        assert_eq!((i32.dtype, i32.data), (DType::I32, vec![7.0, 8.0, 9.0]));
        // Parts may be stored in different types if all become one.
        let mixed = Recipe::Concat(vec![leaf("fine"), Recipe::Transpose(Box::new(leaf("a")))]);
        let mixed = value(Recipe::Convert { of: Box::new(mixed), dtype: DType::BF16 }).unwrap();
        assert_eq!((mixed.dtype, mixed.shape, mixed.data), (DType::BF16, vec![4, 2], vec![1.0, 1.5, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
        let q8 = DType::Q8(crate::quant::Group::Row);
        let coded = value(convert("fine", q8)).unwrap();
        assert_eq!((coded.dtype, coded.shape, coded.data), (q8, vec![1, 2], quantise(q8, &source("fine").unwrap())));
    }

    #[test]
    fn rope_rounds_the_angle_to_f32_and_the_result_once() {
        let table = |sin| value(Recipe::Rope { sin, inv_freq: vec![1.0, 0.1], scale: 1.5, positions: 4 }).unwrap();
        let (cos, sin) = (table(false), table(true));
        assert_eq!(cos.shape, [4, 2]);
        assert_eq!((cos.data[0], sin.data[0]), (1.5, 0.0));
        let angle = f64::from(3.0f32 * 0.1f32);
        assert_eq!(cos.data[7], f64::from((libm::cos(angle) * 1.5) as f32));
        assert_eq!(sin.data[7], f64::from((libm::sin(angle) * 1.5) as f32));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(value(leaf("c")).is_err());
        assert!(value(Recipe::Transpose(Box::new(leaf("big")))).is_err());
        assert!(value(Recipe::Concat(vec![leaf("a"), leaf("big")])).is_err());
        assert!(value(Recipe::Concat(vec![])).is_err());
        assert_eq!(value(Recipe::Concat(vec![leaf("one"), leaf("one")])).unwrap_err(), "concat of scalars");
        assert!(value(Recipe::Concat(vec![leaf("a"), leaf("one")])).is_err());
        assert!(value(Recipe::Concat(vec![leaf("a"), convert("b", DType::F32)])).is_err());
        assert!(value(Recipe::Concat(vec![leaf("a"), Recipe::Transpose(Box::new(leaf("a")))])).is_err());
        assert!(value(Recipe::Slice { of: Box::new(leaf("a")), start: 2, end: 1 }).is_err());
        assert!(value(Recipe::Slice { of: Box::new(leaf("a")), start: 1, end: 3 }).is_err());
        assert!(value(convert("big", DType::F16)).unwrap_err().contains("does not fit"));
        assert_eq!(value(convert("infinite", DType::F16)).unwrap().data, [f64::INFINITY]);
        assert_eq!(value(convert("fine", DType::I32)).unwrap_err(), "1.001953125 does not fit in i32");
        assert_eq!(value(convert("fine", DType::Z8(crate::quant::Group::G32))).unwrap_err(), "conversion to z8g32");
    }

    #[test]
    fn types_are_known_as_far_as_possible() {
        use crate::types::Dim;
        let slice = |of, start, end| Recipe::Slice { of: Box::new(of), start, end };
        let known = known_type(&Recipe::Transpose(Box::new(slice(leaf("a"), 2, 5)))).unwrap();
        assert_eq!(known, Known { dtype: None, rank: Some(2), dims: vec![None, Some(3)] });
        assert!(known.allows(&Type::new(DType::F16, [Dim::Const(9), Dim::Const(3)])));
        assert!(!known.allows(&Type::new(DType::F16, [Dim::Const(3), Dim::Const(9)])));
        assert!(!known.allows(&Type::new(DType::F16, [9, 3, 1].map(Dim::Const))));
        let rows = known_type(&slice(leaf("a"), 2, 5)).unwrap();
        assert!(rows.allows(&Type::new(DType::F16, [Dim::Const(3)])) && !rows.allows(&Type::new(DType::F16, [])));
        let rope = Recipe::Rope { sin: false, inv_freq: vec![1.0; 4], scale: 1.0, positions: 10 };
        let cat = known_type(&Recipe::Concat(vec![rope.clone(), rope.clone()])).unwrap();
        assert_eq!(cat, Known { dtype: Some(DType::F32), rank: Some(2), dims: vec![Some(20), Some(4)] });
        assert_eq!(known_type(&Recipe::Transpose(Box::new(rope.clone()))).unwrap().dims, [Some(4), Some(10)]);
        assert_eq!(known_type(&slice(rope.clone(), 0, 10)).unwrap().dims, [Some(10), Some(4)]);
        assert!(known_type(&Recipe::Concat(vec![rope.clone(), slice(leaf("a"), 0, 2)])).is_ok());
        let narrow = Recipe::Rope { sin: false, inv_freq: vec![1.0; 3], scale: 1.0, positions: 10 };
        let long = |end| slice(leaf("a"), 0, end);
        for (impossible, what) in [
            (slice(rope.clone(), 5, 11), "rows 5..11 are empty or out of range"),
            (slice(leaf("a"), 2, 2), "rows 2..2 are empty or out of range"),
            (Recipe::Concat(vec![rope.clone(), narrow]), "concat of different widths"),
            (Recipe::Concat(vec![rope, convert("a", DType::BF16)]), "concat of different types"),
            (Recipe::Concat(vec![long(u64::MAX), long(1)]), "concat is too long"),
            (convert("a", DType::State), "conversion to state"),
            (convert("a", DType::Z8(crate::quant::Group::G32)), "conversion to z8g32"),
        ] {
            assert_eq!(known_type(&impossible).unwrap_err(), what);
        }
        let deeper: [fn(Recipe) -> Recipe; 4] = [
            |of| Recipe::Transpose(Box::new(of)),
            |of| Recipe::Concat(vec![of]),
            |of| Recipe::Slice { of: Box::new(of), start: 0, end: 1 },
            |of| Recipe::Convert { of: Box::new(of), dtype: DType::F16 },
        ];
        for deeper in deeper {
            let deepest = (1..DEPTH_MAX).fold(leaf("a"), |of, _| deeper(of));
            assert!(known_type(&deepest).is_ok() && known_type(&deeper(deepest)).is_err());
        }
    }
}
