//! Text tests: the one place where files of `tests/graph` and `tests/program` meet the API, so that refactors do not touch tests.
//!
//! In: a file with a module in text form and directives in comments. Out: nothing, or what does not hold, with the text that was found.
//!
//! ```text
//! // test: pass=fuse-rms-norm                       run this pass (several, in order, with commas); `compute=bf16` (int8) for compute-dtype,
//!                                                `quantise=q4g32 head=q8` for quantise
//! // test: plan bucket=1                            run all passes, plan for x86-64-v4 with `T` bounded by 1
//! // check: %y = rms_norm %x, @norm.weight {eps=1e-5}   a line has this text; several checks match lines in order
//! // not: rsqrt                                     no line has it
//! // note: mean is not over the last axis           the pass explains itself with this
//! // changed: no                                    the pass refuses
//! // run: rows=1,3 as=rms_norm                      interpreter before == after on random inputs, see [`TOLERANCES`]
//! ```
//! A line that starts with `// ---` begins another test in the same file. A `%name` in a pattern stands for any value, the same at each
//! place. In a checked graph, parameters and constants are written where they are used: `mul %x, @w`, `add %m, 1e-5`. Spaces match any run
//! of spaces, `..` any text within the line.

use crate::reference::inputs_of;
use rcompile::passes::quantise::Quantisation;
use rcompile::passes::{Pass, PassCx};
use rcompile::pipeline::PASSES;
use rcompile::plan::{PlanCx, Planned, Plans, WeightTable, plan, plan_buckets};
use rcompile_codegen::isa::{Isa, X86_64_TRIPLE};
use rcompile_graph::interp::Interp;
use rcompile_graph::random::Rng;
use rcompile_graph::{DType, Module, Recipe, Tensor, parse, print, verify};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Allowed difference of an output, relative to the largest element of its row (or absolute, where the row is smaller than 1).
pub const TOLERANCES: [(&str, f64, &str); 5] = [
    ("exact", 0.0, "the same roundings in the same order"),
    ("rms_norm", 4e-7, "the fused op rounds once, the raw form after each of six steps of f32"),
    ("layer_norm", 1e-6, "the same with ten steps, and a difference of near values"),
    ("bf16", 2e-2, "matmul inputs are rounded to 8 bits"),
    ("int8", 5e-2, "weights, and perhaps matmul inputs, are rounded to 127 steps of the largest"),
];

/// Bound of `T` in `tests/program` when the directive names none.
const DEFAULT_BUCKET: u64 = 8;

/// The tensors that a module's recipes name, with random values.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    /// Random values, scaled by the root of the width, for every tensor that the parameters of a module are made from. Vectors lie
    /// around 1 where the name has `norm`. The same seed and name give the same values.
    pub fn random(module: &Module, seed: u64) -> Checkpoint {
        let mut sources: BTreeMap<String, (DType, Vec<u64>)> = BTreeMap::new();
        for param in &module.params {
            let shape = param.ty.shape.iter().filter_map(|d| d.constant()).collect();
            collect(&param.recipe, param.ty.dtype, shape, &mut sources);
        }
        let tensors = sources.into_iter().map(|(name, (dtype, shape))| {
            let hash = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
            let mut rng = Rng::new(hash);
            let shape: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
            let scale = if shape.len() > 1 { 1.7 / (shape[shape.len() - 1] as f64).sqrt() } else { 0.5 };
            let centre = if shape.len() == 1 && name.contains("norm") { 1.0 } else { 0.0 };
            let count: usize = shape.iter().product();
            let data: Vec<f64> = (0..count).map(|_| centre + rng.signed() * scale).collect();
            (name, Tensor::new(dtype, &shape, data))
        });
        Checkpoint { tensors: tensors.collect() }
    }
    /// A tensor, for recipes.
    pub fn get(&self, name: &str) -> Result<Tensor, String> {
        self.tensors.get(name).cloned().ok_or_else(|| format!("no tensor {name}"))
    }
}

/// Shapes of a recipe's sources, given what the recipe yields.
fn collect(recipe: &Recipe, dtype: DType, shape: Vec<u64>, sources: &mut BTreeMap<String, (DType, Vec<u64>)>) {
    match recipe {
        Recipe::Source { tensor } => {
            let known = sources.entry(tensor.clone()).or_insert((dtype, shape.clone()));
            if let (Some(rows), Some(more)) = (known.1.first_mut(), shape.first()) {
                *rows = (*rows).max(*more);
            }
        }
        Recipe::Transpose(of) => collect(of, dtype, shape.into_iter().rev().collect(), sources),
        Recipe::Slice { of, end, .. } => {
            let rows = std::iter::once(*end);
            collect(of, dtype, rows.chain(shape.into_iter().skip(1)).collect(), sources);
        }
        // Converted from f32 unless another parameter says what the tensor is.
        Recipe::Convert { of, .. } => collect(of, DType::F32, shape, sources),
        // The sources of merged parameters are those of the parameters that were merged.
        Recipe::Concat(_) | Recipe::Rope { .. } => {}
    }
}

/// Random inputs of an entry: `rows` rows of one or two slots; ids below 8, positions from 0; floats in -1..1.
pub fn inputs(module: &Module, rows: usize, seed: u64) -> Vec<(String, Tensor)> {
    let rng = &mut Rng::new(seed);
    let main = module.main();
    let first = if rows > 2 { rows - rows / 3 } else { rows };
    let mut all = Vec::new();
    for (name, id) in main.input_names.iter().zip(&main.inputs) {
        let ty = main.ty(*id);
        let shape: Vec<usize> = ty.shape.iter().map(|d| d.constant().map_or(rows, |n| n as usize)).collect();
        let value = |i: usize, rng: &mut Rng| match name.as_str() {
            "slot" => f64::from(u8::from(i >= first)),
            "kv_index" | "position" => (if i >= first { i - first } else { i }) as f64,
            "logit_row" => (rows - 1 - i) as f64,
            _ if ty.dtype.is_float() => rng.signed(),
            _ => rng.below(8) as f64,
        };
        let data: Vec<f64> = (0..shape.iter().product()).map(|i| value(i, rng)).collect();
        all.push((name.clone(), Tensor::new(ty.dtype, &shape, data)));
    }
    all
}

/// Outputs of a module under the interpreter, with empty states.
pub fn interpret(module: &Module, checkpoint: &Checkpoint, inputs: &[(String, Tensor)]) -> Result<Vec<Tensor>, String> {
    let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    Interp::from_checkpoint(module, |name| checkpoint.get(name)).run(&inputs).map_err(|e| e.to_string())
}

/// Largest difference of two outputs, each row against its largest element (at least 1); NaN only where both have it.
pub fn difference(expected: &Tensor, found: &Tensor) -> f64 {
    if expected.shape != found.shape {
        return f64::INFINITY;
    }
    let width = expected.shape.last().copied().unwrap_or(1).max(1);
    let mut worst = 0.0f64;
    for (a, b) in expected.data.chunks(width).zip(found.data.chunks(width)) {
        let size = a.iter().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
        for (x, y) in a.iter().zip(b) {
            if x == y || (x.is_nan() && y.is_nan()) {
                continue;
            }
            let d = (x - y).abs() / size;
            worst = if d.is_finite() { worst.max(d) } else { f64::INFINITY };
        }
    }
    worst
}

/// The registered pass of this name.
pub fn pass(name: &str) -> Result<Pass, String> {
    PASSES.iter().find(|p| p.name == name).copied().ok_or_else(|| format!("no pass {name}"))
}

/// Runs passes in order, verifying after each. Out: did any change something, and the notes.
pub fn run_passes(module: &mut Module, passes: &[Pass], compute: DType) -> Result<(bool, Vec<String>), String> {
    run_passes_in(module, passes, PassCx { inputs: inputs_of(compute), ..PassCx::default() })
}

/// The same with everything that passes may ask.
pub fn run_passes_in(module: &mut Module, passes: &[Pass], mut cx: PassCx) -> Result<(bool, Vec<String>), String> {
    let mut changed = false;
    for pass in passes {
        let before = print(module);
        let says = pass.run(module, &mut cx).map_err(|e| e.to_string())?;
        verify(module).map_err(|e| format!("after {}: {e}", pass.name))?;
        if !says && print(module) != before {
            return Err(format!("{} says that it changed nothing, but did:\n{before}\n{}", pass.name, print(module)));
        }
        changed |= says;
    }
    Ok((changed, cx.notes))
}

/// What programs of tests are planned for.
fn cx(isa: &Isa, slots: u32, ctx_size: u32) -> PlanCx<'_> {
    PlanCx { isa, slots, ctx_size, least_rows: 1, cores: 64, tuning: None }
}

/// A program for `cpu`, which the verifier accepts.
pub fn plan_for(module: &Module, cpu: &str, slots: u32, ctx_size: u32, weights: &mut WeightTable) -> Result<Planned, String> {
    let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).map_err(|e| e.to_string())?;
    let planned = plan(module, &cx(&isa, slots, ctx_size), weights).map_err(|e| e.to_string())?;
    rcompile_codegen::verify::verify(&planned.program).map_err(|e| e.to_string())?;
    Ok(planned)
}

/// The same for all buckets of a model.
pub fn plan_buckets_for(modules: &[Module], cpu: &str, slots: u32, ctx_size: u32) -> Result<Plans, String> {
    let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).map_err(|e| e.to_string())?;
    let plans = plan_buckets(modules, &cx(&isa, slots, ctx_size)).map_err(|e| e.to_string())?;
    for planned in &plans.buckets {
        rcompile_codegen::verify::verify(&planned.program).map_err(|e| format!("bucket {}: {e}", planned.program.bucket))?;
    }
    Ok(plans)
}

/// A directive: `// key: value`.
struct Directives(Vec<(String, String)>);

impl Directives {
    const KEYS: [&str; 6] = ["test", "check", "not", "note", "changed", "run"];

    /// A comment that begins with one word and a colon is a directive, and has to be a known one.
    fn of(text: &str) -> Result<Directives, String> {
        let line = |l: &str| {
            let (key, value) = l.trim().strip_prefix("//")?.trim().split_once(':')?;
            let is_word = !key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase());
            is_word.then(|| match Self::KEYS.contains(&key) {
                true => Ok((key.to_string(), value.trim().to_string())),
                false => Err(format!("unknown directive `{key}`, expected one of {}", Self::KEYS.join(", "))),
            })
        };
        text.lines().filter_map(line).collect::<Result<_, _>>().map(Directives)
    }
    fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |d| d.0 == key).map(|d| d.1.as_str())
    }
    fn one(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|d| d.0 == key).map(|d| d.1.as_str())
    }
}

/// `a b=c d=e,f` -> value of a key; a bare word has the value "".
fn option<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_whitespace().find_map(|w| match w.split_once('=') {
        Some((k, v)) if k == key => Some(v),
        None if w == key => Some(""),
        _ => None,
    })
}

/// Does everything that a file says and compares. Lines that start with `// ---` cut a file into tests of their own.
pub fn check(path: &Path) -> Result<(), String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut sections = vec![(1, String::new())];
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("// ---") {
            sections.push((number + 1, String::new()));
        }
        let last = sections.len() - 1;
        sections[last].1 += line;
        sections[last].1.push('\n');
    }
    let errors: Vec<String> =
        sections.iter().filter_map(|(line, text)| check_text(text).err().map(|e| format!("{}:{line}: {e}", path.display()))).collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// [`check`] on text.
pub fn check_text(text: &str) -> Result<(), String> {
    let directives = Directives::of(text)?;
    let test = directives.one("test").ok_or("no `// test:` line")?;
    let mut module = parse(text).map_err(|e| e.to_string())?;
    verify(&module).map_err(|e| e.to_string())?;
    let printed = print(&module);
    if parse(&printed).as_ref() != Ok(&module) {
        return Err(format!("does not survive printing and parsing:\n{printed}"));
    }
    if directives.0.iter().all(|d| d.0 == "test") {
        return Err("expects nothing".into());
    }
    let compute = match option(test, "compute") {
        Some("bf16") => DType::BF16,
        Some("int8") => DType::I8,
        _ => DType::F32,
    };
    if option(test, "plan").is_some() {
        return check_plan(&directives, test, module, compute);
    }
    let names = option(test, "pass").ok_or("`// test:` names neither a pass nor `plan`")?;
    let passes = names.split(',').map(pass).collect::<Result<Vec<Pass>, _>>()?;
    let before = module.clone();
    let code = |name: &str| match option(test, name) {
        Some(name) => DType::QUANTISED.into_iter().find(|d| d.name() == name).map(Some).ok_or_else(|| format!("no quantised type {name}")),
        None => Ok(None),
    };
    let quantisation = Quantisation { body: code("quantise")?, head: code("head")?, ..Quantisation::default() };
    let (changed, notes) = run_passes_in(&mut module, &passes, PassCx { inputs: inputs_of(compute), quantisation, ..PassCx::default() })?;
    let after = print(&module);
    if let Some(expected) = directives.one("changed")
        && (expected == "yes") != changed
    {
        return Err(format!("changed is {changed}\n{after}"));
    }
    for note in directives.all("note") {
        if !notes.iter().any(|n| n.contains(note)) {
            return Err(format!("no note has '{note}': {notes:?}"));
        }
    }
    check_lines(&directives, &inlined(&after))?;
    for run in directives.all("run") {
        let name = option(run, "as").unwrap_or("exact");
        let (_, tolerance, _) = TOLERANCES.iter().find(|t| t.0 == name).ok_or_else(|| format!("no tolerance {name}"))?;
        for rows in option(run, "rows").unwrap_or("1,3").split(',') {
            let rows: usize = rows.parse().map_err(|_| "rows is no list of numbers")?;
            same_meaning(&before, &module, rows, *tolerance)?;
        }
    }
    Ok(())
}

fn check_plan(directives: &Directives, test: &str, mut module: Module, compute: DType) -> Result<(), String> {
    let number = |key: &str, default: u64| option(test, key).map_or(Ok(default), |v| v.parse::<u64>().map_err(|_| format!("{key}={v}")));
    let bucket = number("bucket", DEFAULT_BUCKET)?;
    for symbol in &mut module.symbols {
        symbol.bound = bucket;
    }
    run_passes(&mut module, PASSES, compute)?;
    let cpu = option(test, "cpu").unwrap_or("x86-64-v4");
    let mut weights = WeightTable::default();
    let planned = plan_for(&module, cpu, number("slots", 1)? as u32, number("ctx", 512)? as u32, &mut weights)
        .map_err(|e| format!("{e}\n{}", print(&module)))?;
    check_lines(directives, &planned.program.to_string()).map_err(|e| format!("{e}\nof\n{}", print(&module)))
}

/// Interpreter before == after.
pub fn same_meaning(before: &Module, after: &Module, rows: usize, tolerance: f64) -> Result<(), String> {
    let checkpoint = Checkpoint::random(before, 1);
    let inputs = inputs(before, rows, 2);
    let (expected, found) = (interpret(before, &checkpoint, &inputs)?, interpret(after, &checkpoint, &inputs)?);
    if expected.len() != found.len() {
        return Err(format!("{} outputs became {}\n{}", expected.len(), found.len(), print(after)));
    }
    for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
        let d = difference(a, b);
        if d > tolerance {
            return Err(format!("{rows} rows: output {i} differs by {d:e}, tolerance {tolerance:e}\n{}", print(after)));
        }
    }
    Ok(())
}

/// Parameters and constants written where they are used.
fn inlined(text: &str) -> String {
    let mut short: HashMap<String, String> = HashMap::new();
    let mut out = String::new();
    for line in text.lines() {
        let line = line.split("   //").next().unwrap_or_default();
        if line.trim_start().starts_with("func ") {
            short.clear();
        }
        let mut replaced = String::new();
        for token in tokens(line) {
            replaced.push_str(short.get(token).map_or(token, |s| s.as_str()));
        }
        let definition = line.trim().split_once(" = ").filter(|(v, _)| v.starts_with('%'));
        if let Some((value, rest)) = definition
            && let Some(what) = rest.strip_prefix("param ").or(rest.strip_prefix("const "))
        {
            short.insert(value.into(), what.split(" : ").next().unwrap_or_default().into());
            continue;
        }
        out.push_str(&replaced);
        out.push('\n');
    }
    out
}

/// Cuts a line into `%names`, words and single characters; runs of spaces are one token.
fn tokens(line: &str) -> Vec<&str> {
    let word = |c: char| c.is_alphanumeric() || "_.@%-+".contains(c);
    let mut all = Vec::new();
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let same = |c: char| if first == ' ' { c == ' ' } else { word(first) && word(c) };
        let end = rest.char_indices().skip(1).find(|(_, c)| !same(*c)).map_or(rest.len(), |(i, _)| i);
        all.push(&rest[..end]);
        rest = &rest[end..];
    }
    all
}

/// Where a pattern is found in a line: the values that its names stand for.
fn find(pattern: &[&str], line: &[&str], bound: &HashMap<String, String>) -> Option<HashMap<String, String>> {
    (0..line.len().max(1)).find_map(|start| matches(pattern, &line[start.min(line.len())..], bound.clone()))
}

fn matches(pattern: &[&str], line: &[&str], mut bound: HashMap<String, String>) -> Option<HashMap<String, String>> {
    let Some((p, rest)) = pattern.split_first() else { return Some(bound) };
    if *p == ".." {
        return (0..=line.len()).find_map(|skip| matches(rest, &line[skip..], bound.clone()));
    }
    let (l, after) = line.split_first()?;
    let fits = if p.len() > 1 && p.starts_with('%') && l.starts_with('%') {
        *bound.entry(p.to_string()).or_insert_with(|| l.to_string()) == *l
    } else {
        p == l || (p.starts_with(' ') && l.starts_with(' '))
    };
    if fits { matches(rest, after, bound) } else { None }
}

/// `check:` lines in order, `not:` lines nowhere.
fn check_lines(directives: &Directives, text: &str) -> Result<(), String> {
    let lines: Vec<Vec<&str>> = text.lines().map(tokens).collect();
    let mut bound = HashMap::new();
    let mut next = 0;
    for pattern in directives.all("check") {
        let wanted = tokens(pattern);
        let place = lines[next..].iter().enumerate().find_map(|(i, line)| Some((i, find(&wanted, line, &bound)?)));
        let Some((at, found)) = place else {
            return Err(format!("'{pattern}' is not found from line {} on in\n{text}", next + 1));
        };
        bound = found;
        next += at + 1;
    }
    for pattern in directives.all("not") {
        let wanted = tokens(pattern);
        if let Some(line) = text.lines().find(|l| find(&wanted, &tokens(l), &HashMap::new()).is_some()) {
            return Err(format!("'{pattern}' is found: {line}\nin\n{text}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_bind_names_and_keep_order() {
        let text = "  %1 = mul %x, %x : f32[T, 8]\n  %2 = mean %1 {axis=1}\n  return %2\n";
        let says = |d: &str| check_lines(&Directives::of(d)?, text);
        says("// check: %a = mul %b, %b\n// check: %m = mean %a {axis=1}\n// check: return %m").unwrap();
        says("// check: mul .. f32[T, 8]\n// not: rsqrt").unwrap();
        for wrong in ["// check: mean\n// check: mul", "// check: %a = mul %b, %b\n// check: mean %b", "// not: mean %q", "// check: mea"] {
            assert!(says(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_text_test_can_fail() {
        let text = "module {\n symbol T<=4\n func @f(%x: f32[T, 4]) {\n %1 = mul %x, 1.0\n return %1\n }\n main @f\n}";
        assert!(check_text(text).is_err(), "no directive");
        let misspelt = check_text(&format!("// test: plan\n// chek: mul\n{text}")).unwrap_err();
        assert!(misspelt.contains("unknown directive `chek`"), "{misspelt}");
    }
}
