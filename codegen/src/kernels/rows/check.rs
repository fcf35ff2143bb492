//! What a product of rows and panels may ask for: combinations of types, panels and arithmetic that the planner must not make otherwise.

use super::super::tiles;
use super::Product;
use crate::isa::{BF16_TILE_K, Isa};
use crate::program::{Coding, Compute, DType, SHORT_GROUP};

/// What is wrong, if anything.
pub(super) fn problems(product: &Product, isa: &Isa, name: &str) -> Vec<String> {
    let (dtype, panels) = (product.weight, &product.panels);
    let mut problems = vec![];
    let is_stored = match panels.coding {
        Coding::Elements => matches!(dtype, DType::F32 | DType::F16 | DType::Bf16),
        Coding::Int8 { group } => matches!(dtype, DType::U8 | DType::I8) && [32, 64, 128, 256].contains(&group),
        Coding::Int8Groups { group, .. } => matches!(dtype, DType::U8 | DType::I8) && [32, 64, 128].contains(&group),
        Coding::Int4 { group, .. } => dtype == DType::U8 && [32, 64, 128].contains(&group),
    };
    if !is_stored {
        problems.push(format!("{name}: weights of type {dtype}, {:?}", panels.coding));
    }
    if panels.k_pack != product.compute.k_pack(dtype, panels.coding) {
        problems.push(format!("{name}: {dtype} weights with k_pack {}", panels.k_pack));
    }
    if !panels.nr.is_multiple_of(isa.lanes) || !(panels.nr / isa.lanes).is_power_of_two() || !(1..=2).contains(&panels.ways) {
        problems.push(format!("{name}: panels of {} columns, {} ways on vectors of {}", panels.nr, panels.ways, isa.lanes));
    }
    if product.compute == Compute::Bf16Dot && (!isa.bf16_dot || dtype != DType::Bf16 || product.a != DType::Bf16) {
        problems.push(format!("{name}: bf16 dot of {} and {dtype} on {}", product.a, isa.name));
    }
    let signed = panels.coding.has_bytes().then(|| isa.code_type());
    let has_dot = isa.int8_dot(isa.lanes).is_some() && signed.is_none_or(|wanted| dtype == wanted);
    let has_codes = panels.coding != Coding::Elements && product.a == DType::U8;
    if product.compute.dots_codes() && !(has_dot && has_codes) {
        problems.push(format!("{name}: int8 dot of {} and {dtype}, {:?} on {}", product.a, panels.coding, isa.name));
    }
    if product.compute == Compute::Int8Mmla
        && !(isa.int8_mmla && signed.is_none_or(|wanted| dtype == wanted) && has_codes && panels.coding.fits_mmla())
    {
        problems.push(format!("{name}: int8 matrix product of {} and {dtype}, {:?} on {}", product.a, panels.coding, isa.name));
    }
    let has_tiles = match product.compute {
        Compute::Int8Tiles => isa.int8_tiles,
        Compute::CodesInBf16Tiles => isa.bf16_tiles && panels.coding == Coding::Int4 { group: SHORT_GROUP, zeros: false },
        Compute::Bf16Tiles => isa.bf16_tiles && dtype == DType::Bf16 && product.a == DType::Bf16 && panels.k.is_multiple_of(BF16_TILE_K),
        _ => true,
    };
    if !has_tiles || product.compute.by_tiles() && ![1, 2].contains(&(panels.nr / tiles::SIDE)) {
        problems
            .push(format!("{name}: tiles of {} and {dtype}, {} k, panels of {} columns on {}", product.a, panels.k, panels.nr, isa.name));
    }
    if product.compute == Compute::Bf16Mmla && (!isa.bf16_mmla || dtype != DType::Bf16 || product.a != DType::Bf16) {
        problems.push(format!("{name}: bf16 matrix product of {} and {dtype} on {}", product.a, isa.name));
    }
    problems
}
