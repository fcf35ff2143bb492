//! What assembly text says about the hot loops of a kernel: how many accumulators live in registers, how often each is updated, and what
//! touches the stack.
//!
//! In: the assembly of a module (`--emit asm`, or `Compiled::asm`) and the name of a function in it. Out: its innermost loops that multiply
//! and add, as [`HotLoop`]s. What an architecture's text looks like is one [`Syntax`]; a new architecture is a row of [`SYNTAXES`].
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;

/// How an architecture writes what this module looks for.
#[derive(Debug)]
struct Syntax {
    /// First part of the target triple.
    arch: &'static str,
    /// Beginnings of mnemonics that multiply and add into their destination.
    multiply_adds: &'static [&'static str],
    /// Beginnings of mnemonics that jump to a label.
    jumps: &'static [&'static str],
    /// Beginning of mnemonics that call a function.
    call: &'static str,
    /// Beginnings of mnemonics that only read.
    compares: &'static [&'static str],
    /// Beginnings of mnemonics that only move a whole vector.
    moves: &'static [&'static str],
    /// Is the destination the last operand (AT&T) or the first?
    destination_last: bool,
    /// Which operand of these mnemonics is added to; of all others it is the destination.
    addends: &'static [(&'static str, usize)],
    /// Beginning of an operand that is a vector register.
    vector_registers: &'static [&'static str],
    /// An address on the stack.
    stack: &'static str,
    /// An address in the frame, and the instruction of a function that has a frame pointer (else the register is like any other).
    frame: (&'static str, &'static str),
}

const SYNTAXES: &[Syntax] = &[X86_64, AARCH64];

const X86_64: Syntax = Syntax {
    arch: "x86_64",
    multiply_adds: &["vfmadd", "vfnmadd", "vdpbf16ps", "vpdpbusd", "vpmaddubsw"],
    jumps: &["j"],
    call: "call",
    compares: &["cmp", "test"],
    moves: &["vmova", "vmovu", "vmovdq"],
    destination_last: true,
    addends: &[("vfmadd213", 0), ("vfmadd132", 1), ("vfnmadd213", 0), ("vfnmadd132", 1)],
    vector_registers: &["%xmm", "%ymm", "%zmm"],
    stack: "(%rsp",
    frame: ("(%rbp", "movq\t%rsp, %rbp"),
};

const AARCH64: Syntax = Syntax {
    arch: "aarch64",
    multiply_adds: &["fmla", "fmls", "bfmmla", "smmla", "sdot"],
    jumps: &["b.", "b\t", "cb", "tb"],
    call: "bl\t",
    compares: &["cmp", "ccmp", "tst", "prfm"],
    moves: &["mov\tv"],
    destination_last: false,
    addends: &[],
    vector_registers: &["v", "q"],
    stack: "[sp",
    frame: ("[x29", "mov\tx29, sp"),
};

/// An innermost loop with multiply-adds: the lines from its label to the jump back.
#[derive(Clone, Debug)]
pub struct HotLoop<'a> {
    /// Instructions, trimmed.
    pub lines: Vec<&'a str>,
    syntax: &'static Syntax,
    has_frame: bool,
}

/// All hot loops of the function `name`, in order.
pub fn hot_loops<'a>(asm: &'a str, triple: &str, name: &str) -> Vec<HotLoop<'a>> {
    hot_places(asm, triple, name).1.into_iter().map(|(_, hot)| hot).collect()
}

/// First and last line of a loop in its function.
type Place = (usize, usize);

/// A hot loop with what stands around it in the smallest loop that it is in.
#[derive(Clone, Debug)]
pub struct GroupLoop<'a> {
    /// Lines from the outer loop's label on.
    pub before: Vec<&'a str>,
    /// The hot loop.
    pub inner: HotLoop<'a>,
    /// Lines to the jump back.
    pub after: Vec<&'a str>,
}

/// All hot loops of the function `name` that are in another loop of their own.
pub fn group_loops<'a>(asm: &'a str, triple: &str, name: &str) -> Vec<GroupLoop<'a>> {
    let (body, hot) = hot_places(asm, triple, name);
    let all = all_loops(&body, syntax_of(triple));
    let around = |inner: &Place| {
        let outer = all.iter().filter(|l| l.0 < inner.0 && inner.1 < l.1).min_by_key(|l| l.1 - l.0)?;
        Some((body[outer.0..inner.0].to_vec(), body[inner.1 + 1..=outer.1].to_vec()))
    };
    let found = hot.into_iter().filter_map(|(place, inner)| around(&place).map(|(before, after)| GroupLoop { before, inner, after }));
    found.collect()
}

/// Lines of the function `name`, and its hot loops with their first and last line.
fn hot_places<'a>(asm: &'a str, triple: &str, name: &str) -> (Vec<&'a str>, Vec<(Place, HotLoop<'a>)>) {
    let syntax = syntax_of(triple);
    let body = function(asm, name);
    let has_frame = body.contains(&syntax.frame.1);
    let hot = |place: Place| (place, HotLoop { lines: body[place.0..=place.1].to_vec(), syntax, has_frame });
    // A jump back around a call is no inner loop, whatever the order of blocks.
    let is_hot = |l: &(Place, HotLoop<'a>)| l.1.multiply_adds() > 0 && l.1.count(syntax.call) == 0;
    let found = inner_places(&body, syntax).into_iter().map(hot).filter(is_hot).collect();
    (body, found)
}

fn syntax_of(triple: &str) -> &'static Syntax {
    let arch = triple.split('-').next().unwrap_or_default();
    SYNTAXES.iter().find(|s| s.arch == arch).unwrap_or_else(|| panic!("no assembly syntax for {triple}"))
}

/// Innermost loops of the function `name` that only move data: they load and store vectors, and call nothing.
pub fn packing_loops<'a>(asm: &'a str, triple: &str, name: &str) -> Vec<Vec<&'a str>> {
    let syntax = syntax_of(triple);
    let starts = |line: &&str, list: &[&str]| list.iter().any(|word| line.starts_with(word));
    let is_store = |l: &&str| l.starts_with("st") && operands(l).iter().any(|o| starts(&o.as_str(), syntax.vector_registers));
    let packs = |lines: &Vec<&str>| {
        lines.iter().any(is_store) && !lines.iter().any(|l| starts(l, syntax.multiply_adds) || l.starts_with(syntax.call))
    };
    let body = function(asm, name);
    inner_places(&body, syntax).into_iter().map(|l| body[l.0..=l.1].to_vec()).filter(packs).collect()
}

impl HotLoop<'_> {
    /// Instructions that multiply and add.
    pub fn multiply_adds(&self) -> usize {
        self.updates().values().sum()
    }

    /// Registers that are multiplied and added into.
    pub fn accumulators(&self) -> usize {
        self.updates().len()
    }

    /// Instructions whose mnemonic begins like this.
    pub fn count(&self, mnemonic: &str) -> usize {
        self.lines.iter().filter(|l| l.starts_with(mnemonic)).count()
    }

    /// Instructions that store to the stack or use a vector there. Reading an address or a bound from it is free.
    pub fn stack_accesses(&self) -> Vec<&str> {
        let on_stack = |o: &str| o.contains(self.syntax.stack) || (self.has_frame && o.contains(self.syntax.frame.0));
        let is_access = |l: &&str| {
            let operands = operands(l);
            let destination = if self.syntax.destination_last { operands.last() } else { operands.first() };
            let has_vector = operands.iter().any(|o| self.syntax.vector_registers.iter().any(|r| o.starts_with(r)));
            let stores = !self.syntax.compares.iter().any(|c| l.starts_with(c)) && destination.is_some_and(|o| on_stack(o));
            operands.iter().any(|o| on_stack(o)) && (has_vector || stores)
        };
        self.lines.iter().copied().filter(is_access).collect()
    }

    /// Copies of a vector register.
    pub fn copies(&self) -> Vec<&str> {
        let is_register = |o: &String| self.syntax.vector_registers.iter().any(|r| o.starts_with(r));
        let is_copy = |l: &&str| self.syntax.moves.iter().any(|m| l.starts_with(m)) && operands(l).iter().all(is_register);
        self.lines.iter().copied().filter(is_copy).collect()
    }

    /// What is wrong with a register tile of `rows` rows: something on the stack; a number of accumulators that is no multiple of the rows;
    /// accumulators that are not all updated equally often, which is what copies or a second set of registers look like.
    pub fn problems(&self, rows: u32) -> Vec<String> {
        let mut problems = vec![];
        let stack = self.stack_accesses();
        if !stack.is_empty() {
            problems.push(format!("{} stack accesses, the first: {}", stack.len(), stack[0]));
        }
        let updates = self.updates();
        if !updates.len().is_multiple_of(rows as usize) {
            problems.push(format!("{} accumulators for {rows} rows", updates.len()));
        }
        let (least, most) = (updates.values().min(), updates.values().max());
        if least != most {
            problems.push(format!("accumulators are updated unequally: {updates:?}"));
        }
        problems
    }

    /// The loop as text.
    pub fn text(&self) -> String {
        self.lines.join("\n")
    }

    /// How often each accumulator is multiplied and added into, by the register that it begins in: a sum may go on in another one.
    fn updates(&self) -> BTreeMap<String, usize> {
        let (mut updates, mut begun_in) = (BTreeMap::new(), BTreeMap::new());
        for line in self.lines.iter().filter(|l| self.syntax.multiply_adds.iter().any(|m| l.starts_with(m))) {
            // `%zmm0 {%k1}` is `%zmm0`.
            let registers: Vec<String> =
                operands(line).iter().map(|o| o.split_whitespace().next().unwrap_or_default().to_string()).collect();
            let destination = if self.syntax.destination_last { registers.len() - 1 } else { 0 };
            let addend = self.syntax.addends.iter().find(|a| line.starts_with(a.0)).map_or(destination, |a| a.1);
            let begin = begun_in.remove(&registers[addend]).unwrap_or(registers[addend].clone());
            *updates.entry(begin.clone()).or_insert(0) += 1;
            begun_in.insert(registers[destination].clone(), begin);
        }
        updates
    }
}

/// Lines of a function, trimmed.
fn function<'a>(asm: &'a str, name: &str) -> Vec<&'a str> {
    // `{vex}` in front of a mnemonic chooses an encoding.
    let lines: Vec<&str> = asm.lines().map(|l| l.trim().trim_start_matches("{vex}").trim_start()).collect();
    let labels = [format!("{name}:"), format!("\"{name}\":")];
    let begin = lines.iter().position(|l| labels.iter().any(|label| l.starts_with(label)));
    let begin = begin.unwrap_or_else(|| panic!("no function {name}"));
    let end = lines[begin..].iter().position(|l| l.starts_with(".Lfunc_end")).map_or(lines.len(), |n| begin + n);
    lines[begin..end].to_vec()
}

/// Innermost loops: those that hold no other.
fn inner_places(body: &[&str], syntax: &Syntax) -> Vec<Place> {
    let loops = all_loops(body, syntax);
    let inner = |a: &Place| !loops.iter().any(|b| b != a && a.0 <= b.0 && b.1 <= a.1);
    loops.iter().copied().filter(inner).collect()
}

/// All loops: from a label to the jump back to it.
fn all_loops(body: &[&str], syntax: &Syntax) -> Vec<Place> {
    let mut loops: Vec<Place> = vec![];
    for (at, line) in body.iter().enumerate() {
        if !syntax.jumps.iter().any(|j| line.starts_with(j)) {
            continue;
        }
        let operands = operands(line);
        let Some(target) = operands.last() else { continue };
        if let Some(label) = body[..at].iter().rposition(|l| l.strip_prefix(target.as_str()).is_some_and(|rest| rest.starts_with(':'))) {
            loops.push((label, at));
        }
    }
    loops
}

/// Operands of an instruction: split at commas outside of brackets.
fn operands(line: &str) -> Vec<String> {
    let Some((_, rest)) = line.split_once(char::is_whitespace) else { return vec![] };
    let (mut list, mut depth) = (vec![String::new()], 0);
    for c in rest.split(['#', ';']).next().unwrap_or_default().chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        match (c, list.last_mut()) {
            (',', _) if depth == 0 => list.push(String::new()),
            (_, Some(last)) => last.push(c),
            _ => {}
        }
    }
    list.iter().map(|o| o.trim().to_string()).collect()
}
