//! Memory plan: buffers whose lives do not overlap share bytes of the arena.
//!
//! In: a program without offsets. Out: offsets and the arena's size. A life is a span of positions in execution order; a buffer that is
//! used inside a layer loop and outside of it, or in two loops, lives through the loops whole.

use rcompile_codegen::program::{Item, Kernel, Operand, Place, Program};

/// Buffers that a kernel names.
fn buffers(kernel: &Kernel) -> Vec<usize> {
    let buffer = |o: &Operand| if let Place::Buffer(b) = o.place { Some(b.index()) } else { None };
    kernel.operands().into_iter().filter_map(buffer).collect()
}

/// Assigns offsets.
pub fn assign(program: &mut Program) {
    // Per buffer: first and last position, and the number of the loop of its first use, 0 outside of loops.
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; program.buffers.len()];
    let mut scope: Vec<Option<usize>> = vec![None; program.buffers.len()];
    let mut loops: Vec<(usize, usize)> = vec![(0, 0)];
    let mut position = 0;
    let mut touch = |buffer: usize, position: usize, number: usize, loops: &[(usize, usize)]| {
        let life = lives[buffer].get_or_insert((position, position));
        life.0 = life.0.min(position);
        life.1 = life.1.max(position);
        match scope[buffer] {
            None => scope[buffer] = Some(number),
            Some(seen) if seen == number => {}
            Some(seen) => {
                // Crosses a loop's edge: lives through all loops that it touches.
                for n in [seen, number] {
                    if n > 0 {
                        life.0 = life.0.min(loops[n].0);
                        life.1 = life.1.max(loops[n].1);
                    }
                }
            }
        }
    };
    for item in &program.body {
        match item {
            Item::Region(r) => {
                for b in buffers(&program.regions[r.index()].kernel) {
                    touch(b, position, 0, &loops);
                }
                position += 1;
            }
            Item::Layers { body, .. } => {
                let regions: Vec<_> = body.iter().filter_map(|i| if let Item::Region(r) = i { Some(*r) } else { None }).collect();
                loops.push((position, position + regions.len().saturating_sub(1)));
                for r in regions {
                    for b in buffers(&program.regions[r.index()].kernel) {
                        touch(b, position, loops.len() - 1, &loops);
                    }
                    position += 1;
                }
            }
            Item::Barrier => {}
        }
    }
    let mut placed: Vec<(usize, usize, u64, u64)> = Vec::new();
    let bytes = |i: usize| {
        (u64::from(program.buffers[i].rows) * u64::from(program.buffers[i].stride) * program.buffers[i].dtype.size()).next_multiple_of(64)
    };
    // Largest first; ties by number, so that the plan is the same on every run.
    let mut order: Vec<usize> = (0..program.buffers.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(bytes(*i)), *i));
    let mut offsets = vec![0u64; program.buffers.len()];
    for i in order {
        let Some((first, last)) = lives[i] else { continue };
        let size = bytes(i);
        let mut taken: Vec<(u64, u64)> =
            placed.iter().filter(|(f, l, ..)| *f <= last && first <= *l).map(|(_, _, start, end)| (*start, *end)).collect();
        taken.sort_unstable();
        let mut offset = 0;
        for (start, end) in taken {
            if offset + size <= start {
                break;
            }
            offset = offset.max(end);
        }
        offsets[i] = offset;
        placed.push((first, last, offset, offset + size));
    }
    program.arena_bytes = placed.iter().map(|p| p.3).max().unwrap_or(0);
    for (buffer, offset) in program.buffers.iter_mut().zip(offsets) {
        buffer.offset = offset;
    }
}
