//! Memory plan: buffers whose lives do not overlap share bytes of the arena.
//!
//! In: a program without offsets, and the next larger bucket's with them. Out: offsets and the arena's size. A life is a span of positions
//! in execution order; a buffer that is used inside a layer loop and outside of it, or in two loops, lives through the loops whole.
//!
//! Offsets are constants of kernels' code. Buckets that lie alike share all kernels whose data do not depend on the bucket: matmuls for the
//! rows that want logits, where both have as many, norms, lookups. So the smaller one takes the larger one's offsets.

use rcompile_codegen::program::{Area, Buffer, Item, Kernel, Matmul, Program};

/// Buffers that a kernel reads or writes.
fn buffers(kernel: &Kernel) -> impl Iterator<Item = usize> {
    kernel.accesses().into_iter().filter_map(|access| if let Area::Buffer(b) = access.area { Some(b.index()) } else { None })
}

/// First and last position of each buffer; `None`: never used.
fn lives(program: &Program) -> Vec<Option<(usize, usize)>> {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; program.buffers.len()];
    // The number of the loop of a buffer's first use, 0 outside of loops.
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
    lives
}

/// Assigns offsets: those of `larger`, the next larger bucket's program, where code can be shared so, else the fewest bytes.
pub fn assign(program: &mut Program, larger: Option<&Program>) {
    let lives = lives(program);
    let offsets = match larger.filter(|larger| shares_code(program, larger) && fits(program, &lives, larger)) {
        Some(larger) => larger.buffers.iter().map(|b| b.offset).collect(),
        None => fewest_bytes(program, &lives),
    };
    for (buffer, offset) in program.buffers.iter_mut().zip(offsets) {
        buffer.offset = offset;
    }
    let used = program.buffers.iter().zip(&lives).filter(|(_, life)| life.is_some());
    program.arena_bytes = used.map(|(b, _)| b.offset + bytes(b)).max().unwrap_or(0);
}

/// Whole lines.
fn bytes(buffer: &Buffer) -> u64 {
    buffer.bytes().next_multiple_of(64)
}

/// Each buffer at the first place that is free while it lives.
fn fewest_bytes(program: &Program, lives: &[Option<(usize, usize)>]) -> Vec<u64> {
    let mut placed: Vec<(usize, usize, u64, u64)> = Vec::new();
    // Largest first; ties by number, so that the plan is the same on every run.
    let mut order: Vec<usize> = (0..program.buffers.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(bytes(&program.buffers[*i])), *i));
    let mut offsets = vec![0u64; program.buffers.len()];
    for i in order {
        let Some((first, last)) = lives[i] else { continue };
        let size = bytes(&program.buffers[i]);
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
    offsets
}

/// Has it a matmul whose code would be that of the larger bucket's, but for the offsets? (Then both have as many rows that want logits:
/// other rows are more in the larger one.)
fn shares_code(program: &Program, larger: &Program) -> bool {
    let rows = |program: &Program, kernel: &Matmul| (program.least(kernel.rows), program.capacity(kernel.rows));
    program.regions.iter().zip(&larger.regions).any(|(region, other)| match (&region.kernel, &other.kernel) {
        (Kernel::Matmul(a), Kernel::Matmul(b)) => a == b && rows(program, a) == rows(larger, b),
        _ => false,
    })
}

/// Do the offsets of `larger` hold for this program: the same buffers, no larger ones, that live as long?
fn fits(program: &Program, lives: &[Option<(usize, usize)>], larger: &Program) -> bool {
    let same = |(a, b): (&Buffer, &Buffer)| a.dtype == b.dtype && a.stride == b.stride && a.rows <= b.rows;
    program.buffers.len() == larger.buffers.len() && program.buffers.iter().zip(&larger.buffers).all(same) && lives == self::lives(larger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan_text;

    /// A chain of matmuls of up to `rows` rows, to whose result `%{added}` is added.
    fn chain(rows: u32, added: &str) -> Program {
        let text = format!(
            "module {{
            symbol T<={rows}
            param @table : f32[19, 32] = source \"table\"
            param @w : f32[32, 32] = source \"w\"
            func @step(%token: i32[T]) {{
                %x = embedding @table, %token
                %a = mm %x, @w {{rhs_t}}
                %b = mm %a, @w {{rhs_t}}
                %c = mm %b, @w {{rhs_t}}
                %d = mm %c, @w {{rhs_t}}
                %y = add %d, %{added}
                return %y
            }}
        }}"
        );
        plan_text(&text).unwrap_or_else(|e| panic!("{e}")).program
    }

    /// A larger bucket's offsets hold for the same program with fewer rows, and not where a value lives longer, nor for more rows.
    #[test]
    fn offsets_hold_for_equal_lives_and_fewer_rows() {
        let (few, many) = (chain(16, "c"), chain(64, "c"));
        assert!(fits(&few, &lives(&few), &many));
        assert!(!fits(&many, &lives(&many), &few));
        let longer = chain(16, "a");
        assert_eq!(longer.buffers.len(), many.buffers.len());
        assert!(!fits(&longer, &lives(&longer), &many), "{longer}");
        assert!(longer.arena_bytes > few.arena_bytes, "a value that lives longer needs bytes of its own");
        // Nothing is shared: all rows are other rows in the larger bucket.
        let mut placed = few.clone();
        assign(&mut placed, Some(&many));
        assert_eq!((&placed.buffers, placed.arena_bytes), (&few.buffers, few.arena_bytes));
    }
}
