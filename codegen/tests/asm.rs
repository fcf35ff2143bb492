//! The checker of assembly text, on text with known faults.

mod asm_check;

use asm_check::hot_loops;

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Two rows of two vectors, in a loop inside a loop, beside a loop without arithmetic; `extra` is the last instruction.
fn tile(extra: &str, prologue: &str) -> String {
    format!(
        "other:
\tvmovaps\t%zmm0, (%rsp)
\tretq
.Lfunc_end0:
tile:
\tpushq\t%rbp
\t{prologue}
.LBB1_1:
\tvmovaps\t%zmm3, 64(%rsp)
.LBB1_2:
\tvmovups\t(%rdi,%rax), %zmm4
\tvmovups\t64(%rdi,%rax), %zmm5
\tvfmadd231ps\t(%rsi,%rax){{1to16}}, %zmm4, %zmm0
\tvfmadd231ps\t(%rsi,%rax){{1to16}}, %zmm5, %zmm1
\tvfmadd231ps\t8192(%rsi,%rax){{1to16}}, %zmm4, %zmm2
\tvfmadd231ps\t8192(%rsi,%rax){{1to16}}, %zmm5, %zmm3
\t{extra}
\taddq\t$4, %rax
\tjne\t.LBB1_2
.LBB1_22:
\tincq\t%rcx
\tjne\t.LBB1_22
\tdecq\t%rbx
\tjne\t.LBB1_1
\tretq
.Lfunc_end1:
"
    )
}

fn check(extra: &str, prologue: &str, rows: u32) -> Vec<String> {
    let asm = tile(extra, prologue);
    let loops = hot_loops(&asm, TRIPLE, "tile");
    assert_eq!(loops.len(), 1, "{loops:#?}");
    loops[0].problems(rows)
}

#[test]
fn a_good_tile() {
    assert_eq!(check("nop", "nop", 2), [""; 0]);
    let asm = tile("vmovaps\t%zmm4, %zmm7", "nop");
    let hot = &hot_loops(&asm, TRIPLE, "tile")[0];
    assert_eq!((hot.multiply_adds(), hot.accumulators(), hot.copies().len(), hot.count("vmovups")), (4, 4, 1, 2));
}

#[test]
fn faults_are_noticed() {
    for (extra, prologue, word) in [
        ("vmovaps\t%zmm0, 64(%rsp)", "nop", "1 stack accesses"),
        ("vmovaps\t128(%rsp), %zmm0", "nop", "1 stack accesses"),
        ("vfmadd231ps\t-64(%rbp), %zmm4, %zmm0", "movq\t%rsp, %rbp", "1 stack accesses"),
        ("vfmadd231ps\t(%rdx), %zmm4, %zmm6", "nop", "5 accumulators for 2 rows"),
        ("vfmadd231ps\t(%rdx), %zmm4, %zmm0", "nop", "unequally"),
    ] {
        let problems = check(extra, prologue, 2);
        assert!(problems.iter().any(|p| p.contains(word)), "{extra}: {problems:?}");
    }
    // The third sum goes on in the register of a weight and comes back.
    let rotated = "vfmadd213ps\t%zmm2, %zmm8, %zmm9\n\tvfmadd213ps\t%zmm9, %zmm8, %zmm2";
    let asm = tile(rotated, "nop");
    let hot = &hot_loops(&asm, TRIPLE, "tile")[0];
    assert_eq!((hot.accumulators(), hot.multiply_adds()), (4, 6));
    // A bound or an address may be read from the stack; a store is a store.
    assert_eq!(check("cmpq\t%rdx, 32(%rsp)", "nop", 2), [""; 0]);
    assert_eq!(check("movq\t32(%rsp), %rdx", "nop", 2), [""; 0]);
    assert_eq!(check("movq\t%rdx, 32(%rsp)", "nop", 2).len(), 1);
    // Without a frame pointer the register is like any other.
    assert_eq!(check("vmovaps\t(%rbp), %zmm9", "nop", 2), [""; 0]);
}

/// The same on Arm: two rows of one vector by lane, a pair of rows by matrix instructions.
#[test]
fn arm() {
    let check = |extra: &str| {
        let asm = format!(
            "tile:
\tstp\td9, d8, [sp, #-32]!
.LBB0_1:
\tldp\tq0, q1, [x0]
\tldr\tq2, [x1], #16
\tfmla\tv8.4s, v2.4s, v0.s[0]
\tfmla\tv9.4s, v2.4s, v1.s[0]
\t{extra}
\tsubs\tx2, x2, #1
\tb.ne\t.LBB0_1
\tldp\td9, d8, [sp], #32
\tret
.Lfunc_end0:
"
        );
        let loops = hot_loops(&asm, "aarch64-unknown-linux-gnu", "tile");
        assert_eq!(loops.len(), 1, "{loops:#?}");
        (loops[0].problems(2), loops[0].multiply_adds(), loops[0].copies().len())
    };
    assert_eq!(check("prfm\tpldl1keep, [sp, #64]"), (vec![], 2, 0));
    assert_eq!(check("mov\tv7.16b, v8.16b"), (vec![], 2, 1));
    assert_eq!(check("bfmmla\tv10.4s, v2.8h, v0.8h\n\tbfmmla\tv11.4s, v2.8h, v1.8h"), (vec![], 4, 0));
    for (extra, word) in [
        ("str\tq8, [sp, #16]", "1 stack accesses"),
        ("ldr\tq3, [sp, #16]", "1 stack accesses"),
        ("fmla\tv10.4s, v2.4s, v1.s[0]", "3 accumulators for 2 rows"),
        ("fmla\tv8.4s, v2.4s, v0.s[1]", "unequally"),
    ] {
        let (problems, ..) = check(extra);
        assert!(problems.iter().any(|p| p.contains(word)), "{extra}: {problems:?}");
    }
}
