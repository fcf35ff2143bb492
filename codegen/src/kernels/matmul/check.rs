//! What a matmul may ask for: combinations of types, panels, arithmetic and scratch that the planner must not make otherwise.

use super::*;

/// Combinations that the planner must not ask for.
pub(super) fn check(isa: &Isa, program: &Program, name: &str, kernel: &Matmul) -> Result<(), Error> {
    let dtype = program.weights[kernel.weight.index()].dtype;
    let panels = &kernel.panels;
    let mut problems = vec![];
    let wanted_pack = match (dtype, panels.coding) {
        (DType::F32 | DType::F16, Coding::Elements) => 1,
        (DType::Bf16, Coding::Elements) if kernel.compute == Compute::Bf16Mmla => mmla::K,
        (DType::Bf16, Coding::Elements) => 2,
        (DType::U8 | DType::I8, Coding::Int8 { group: 32 | 64 | 128 | 256 } | Coding::Int8Groups { group: 32 | 64 | 128, .. })
        | (DType::U8, Coding::Int4 { group: 32 | 64 | 128, .. }) => panels.coding.k_pack(kernel.compute).expect("codes"),
        (dtype, coding) => {
            problems.push(format!("{name}: weights of type {dtype}, {coding:?}"));
            panels.k_pack
        }
    };
    if panels.k_pack != wanted_pack {
        problems.push(format!("{name}: {dtype} weights with k_pack {}", panels.k_pack));
    }
    if !panels.nr.is_multiple_of(isa.lanes) || !(panels.nr / isa.lanes).is_power_of_two() || !(1..=2).contains(&panels.ways) {
        problems.push(format!("{name}: panels of {} columns, {} ways on vectors of {}", panels.nr, panels.ways, isa.lanes));
    }
    if kernel.compute == Compute::Bf16Dot && (!isa.bf16_dot || dtype != DType::Bf16 || kernel.a.dtype != DType::Bf16) {
        problems.push(format!("{name}: bf16 dot of {} and {dtype} on {}", kernel.a.dtype, isa.name));
    }
    let signed = panels.coding.has_bytes().then(|| isa.code_type());
    let has_dot = isa.int8_dot(isa.lanes).is_some() && signed.is_none_or(|wanted| dtype == wanted);
    let has_codes = panels.coding != Coding::Elements && kernel.a.dtype == DType::U8;
    if kernel.compute.dots_codes() && !(has_dot && has_codes) {
        problems.push(format!("{name}: int8 dot of {} and {dtype}, {:?} on {}", kernel.a.dtype, panels.coding, isa.name));
    }
    if kernel.compute == Compute::Int8Mmla
        && !(isa.int8_mmla && signed.is_none_or(|wanted| dtype == wanted) && has_codes && panels.coding.fits_mmla())
    {
        problems.push(format!("{name}: int8 matrix product of {} and {dtype}, {:?} on {}", kernel.a.dtype, panels.coding, isa.name));
    }
    let has_tiles = match kernel.compute {
        Compute::Int8Tiles => isa.int8_tiles,
        Compute::CodesInBf16Tiles => isa.bf16_tiles && panels.coding == Coding::Int4 { group: SHORT_GROUP, zeros: false },
        Compute::Bf16Tiles => {
            isa.bf16_tiles && dtype == DType::Bf16 && kernel.a.dtype == DType::Bf16 && panels.k.is_multiple_of(BF16_TILE_K)
        }
        _ => true,
    };
    if !has_tiles || kernel.compute.by_tiles() && ![1, 2].contains(&(panels.nr / tiles::SIDE)) {
        problems.push(format!(
            "{name}: tiles of {} and {dtype}, {} k, panels of {} columns on {}",
            kernel.a.dtype, panels.k, panels.nr, isa.name
        ));
    }
    if kernel.compute == Compute::Bf16Mmla && (!isa.bf16_mmla || dtype != DType::Bf16 || kernel.a.dtype != DType::Bf16) {
        problems.push(format!("{name}: bf16 matrix product of {} and {dtype} on {}", kernel.a.dtype, isa.name));
    }
    let needed = private_bytes(isa, program, kernel);
    if program.private_bytes < needed {
        problems.push(format!("{name}: needs {needed} bytes of private scratch, has {}", program.private_bytes));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
}
