//! The type rule of every op, shared by the builder, the parser, the passes and the verifier.
//!
//! In: an op, the types of its operands and, for ops whose result does not follow from them, the declared type. Out: the type of the
//! result, or what does not fit.

use crate::ops::{Binary, Op, Unary};
use crate::types::{DType, Dim, FuncId, Module, ParamId, StateId, SymbolId, Type};

/// A badly typed node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {what}")]
pub struct TypeError {
    /// Name of the op.
    pub op: String,
    /// What does not fit.
    pub what: String,
}

/// Type of `op` applied to operands of the types `inputs`; `declared` is the declared type for ops that need one.
pub fn infer(module: &Module, op: &Op, inputs: &[&Type], declared: Option<&Type>) -> Result<Type, TypeError> {
    let rule = Rule { module, name: op.name(), inputs, declared };
    match op {
        Op::Input { .. } => rule.takes(0).and_then(|()| rule.declared()),
        Op::Param(id) => rule.param(*id),
        Op::Const(_) => rule.constant(),
        Op::Unary(Unary::Not) => rule.not(),
        Op::Unary(_) => rule.float_to_same(),
        Op::Binary(b) => rule.binary(matches!(b, Binary::And | Binary::Or)),
        Op::Compare(_) => rule.compare(),
        Op::Where => rule.choose(),
        Op::Convert => rule.convert(),
        Op::Reshape => rule.reshape(),
        Op::Permute { perm } => rule.permute(perm),
        Op::Slice { axis, start, end } => rule.slice(*axis, *start, *end),
        Op::Cat { axis } => rule.cat(*axis as usize),
        Op::Expand => rule.expand(),
        Op::Embedding => rule.embedding(),
        Op::IndexSelect => rule.index_select(),
        Op::Mm { rhs_t } => rule.matmul(*rhs_t),
        Op::Reduce { axis, .. } => rule.reduce(*axis),
        Op::Softmax => rule.softmax(),
        Op::RmsNorm { .. } => rule.norm(1),
        Op::LayerNorm { .. } => rule.norm(2),
        Op::Rope => rule.rope(),
        Op::KvAppend { state } => rule.kv_append(*state),
        Op::Sdpa { state, .. } => rule.sdpa(*state),
        Op::Pool(_) => rule.pool(),
        Op::Call { func, params, states } => rule.call(*func, params, states),
    }
}

/// Numpy broadcasting of two shapes.
fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| if i + s.len() >= rank { s[i + s.len() - rank] } else { Dim::Const(1) };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Some(x),
            (Dim::Const(1), y) => Some(y),
            (x, Dim::Const(1)) => Some(x),
            _ => None,
        })
        .collect()
}

/// Product of the constant dimensions and the multiset of symbols: what a reshape keeps.
fn volume(shape: &[Dim]) -> Option<(u64, Vec<SymbolId>)> {
    let mut product = 1u64;
    let mut symbols = Vec::new();
    for d in shape {
        match d {
            Dim::Const(n) => product = product.checked_mul(*n)?,
            Dim::Sym(s) => symbols.push(*s),
        }
    }
    symbols.sort();
    Some((product, symbols))
}

/// A rule at work: the op's name for messages, and the types around it.
struct Rule<'a> {
    module: &'a Module,
    name: &'static str,
    inputs: &'a [&'a Type],
    declared: Option<&'a Type>,
}

type Ruled = Result<Type, TypeError>;

/// What rules have in common.
impl Rule<'_> {
    fn error<T>(&self, what: impl Into<String>) -> Result<T, TypeError> {
        Err(TypeError { op: self.name.to_string(), what: what.into() })
    }
    fn takes(&self, n: usize) -> Result<(), TypeError> {
        if self.inputs.len() == n { Ok(()) } else { self.error(format!("takes {n} operands, found {}", self.inputs.len())) }
    }
    fn declared(&self) -> Ruled {
        self.declared.map_or_else(|| self.error("needs a declared type"), |ty| Ok(ty.clone()))
    }
    fn text(&self, t: &Type) -> String {
        format!("{}{}", t.dtype, self.module.shape_text(&t.shape))
    }
    fn float(&self, t: &Type) -> Result<(), TypeError> {
        if t.dtype.is_float() { Ok(()) } else { self.error(format!("needs a float, found {}", self.text(t))) }
    }
    fn row_table(&self, t: &Type, row: Dim) -> Result<(), TypeError> {
        if t.dtype == DType::I32 && t.shape == [row] {
            Ok(())
        } else {
            self.error(format!("row table must be i32 of the row count, found {}", self.text(t)))
        }
    }
    /// `ty` where `fits`, else an error that names it beside the only operand.
    fn converted(&self, ty: Type, fits: bool) -> Ruled {
        if fits { Ok(ty) } else { self.error(format!("from {} to {}", self.text(self.inputs[0]), self.text(&ty))) }
    }
}

/// Sources and elementwise ops.
impl Rule<'_> {
    fn param(&self, id: ParamId) -> Ruled {
        self.takes(0)?;
        self.module.params.get(id.index()).map_or_else(|| self.error("no such parameter"), |p| Ok(p.ty.clone()))
    }
    fn constant(&self) -> Ruled {
        self.takes(0)?;
        let ty = self.declared()?;
        if ty.rank() == 0 && ty.dtype != DType::State { Ok(ty) } else { self.error("constants are scalars") }
    }
    fn not(&self) -> Ruled {
        self.takes(1)?;
        if self.inputs[0].dtype == DType::Bool { Ok(self.inputs[0].clone()) } else { self.error("needs bool") }
    }
    fn float_to_same(&self) -> Ruled {
        self.takes(1)?;
        self.float(self.inputs[0])?;
        Ok(self.inputs[0].clone())
    }
    fn binary(&self, logic: bool) -> Ruled {
        self.takes(2)?;
        let dtype = self.inputs[0].dtype;
        Ok(Type::new(dtype, self.common_shape(logic == (dtype == DType::Bool))?))
    }
    fn compare(&self) -> Ruled {
        self.takes(2)?;
        Ok(Type::new(DType::Bool, self.common_shape(true)?))
    }
    /// Shape of two operands of one type that is no state and passes, broadcast.
    fn common_shape(&self, passes: bool) -> Result<Vec<Dim>, TypeError> {
        let (a, b) = (self.inputs[0], self.inputs[1]);
        if a.dtype != b.dtype || a.dtype == DType::State || !passes {
            return self.error(format!("operand types {} and {}", self.text(a), self.text(b)));
        }
        let shape = broadcast(&a.shape, &b.shape);
        shape.map_or_else(|| self.error(format!("shapes {} and {} do not broadcast", self.text(a), self.text(b))), Ok)
    }
    fn choose(&self) -> Ruled {
        self.takes(3)?;
        let (which, a, b) = (self.inputs[0], self.inputs[1], self.inputs[2]);
        if which.dtype != DType::Bool || a.dtype != b.dtype || a.dtype == DType::State {
            return self.error(format!("operand types {}, {}, {}", self.text(which), self.text(a), self.text(b)));
        }
        let shape = broadcast(&a.shape, &b.shape).and_then(|s| broadcast(&s, &which.shape));
        shape.map_or_else(|| self.error("shapes do not broadcast"), |s| Ok(Type::new(a.dtype, s)))
    }
    fn convert(&self) -> Ruled {
        self.takes(1)?;
        let (x, ty) = (self.inputs[0], self.declared()?);
        // Groups run along rows of known width.
        let coded = x.dtype.is_float() && ty.rank() == 2 && ty.shape[1].constant().is_some();
        let fits = ty.shape == x.shape
            && ty.dtype != DType::State
            && x.dtype != DType::State
            && !ty.dtype.has_zeros()
            && (!ty.dtype.is_quantised() || coded);
        self.converted(ty, fits)
    }
}

/// Views.
impl Rule<'_> {
    fn reshape(&self) -> Ruled {
        self.takes(1)?;
        let (x, ty) = (self.inputs[0], self.declared()?);
        let fits = volume(&ty.shape).is_some() && volume(&ty.shape) == volume(&x.shape) && ty.dtype == x.dtype;
        self.converted(ty, fits)
    }
    fn expand(&self) -> Ruled {
        self.takes(1)?;
        let (x, ty) = (self.inputs[0], self.declared()?);
        let fits = ty.dtype == x.dtype && broadcast(&x.shape, &ty.shape).as_deref() == Some(&ty.shape[..]);
        self.converted(ty, fits)
    }
    fn permute(&self, perm: &[u32]) -> Ruled {
        self.takes(1)?;
        let x = self.inputs[0];
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        if sorted.iter().map(|p| *p as usize).ne(0..x.rank()) {
            return self.error(format!("{perm:?} is no permutation of the axes of {}", self.text(x)));
        }
        Ok(Type::new(x.dtype, perm.iter().map(|p| x.shape[*p as usize])))
    }
    fn slice(&self, axis: u32, start: u64, end: u64) -> Ruled {
        self.takes(1)?;
        let mut ty = self.inputs[0].clone();
        match ty.shape.get_mut(axis as usize) {
            Some(Dim::Const(n)) if start < end && end <= *n => {
                *n = end - start;
                Ok(ty)
            }
            _ => self.error(format!("{start}..{end} of axis {axis} of {}", self.text(self.inputs[0]))),
        }
    }
    fn cat(&self, axis: usize) -> Ruled {
        let Some(first) = self.inputs.first() else { return self.error("needs an operand") };
        let mut sum = 0u64;
        for t in self.inputs {
            let fits = t.dtype == first.dtype
                && t.rank() == first.rank()
                && t.shape.iter().zip(&first.shape).enumerate().all(|(i, (a, b))| i == axis || a == b);
            match (fits, t.shape.get(axis)) {
                (true, Some(Dim::Const(n))) if sum.checked_add(*n).is_some() => sum += n,
                _ => return self.error(format!("axis {axis} of {} beside {}", self.text(t), self.text(first))),
            }
        }
        let mut ty = (*first).clone();
        ty.shape[axis] = Dim::Const(sum);
        Ok(ty)
    }
    fn embedding(&self) -> Ruled {
        self.takes(2)?;
        let (table, ids) = (self.inputs[0], self.inputs[1]);
        if table.rank() < 1 || ids.dtype != DType::I32 || ids.rank() != 1 {
            return self.error(format!("table {} and ids {}", self.text(table), self.text(ids)));
        }
        let dtype = if table.dtype.is_quantised() { DType::F32 } else { table.dtype };
        Ok(Type::new(dtype, std::iter::once(ids.shape[0]).chain(table.shape[1..].iter().copied())))
    }
    fn index_select(&self) -> Ruled {
        self.takes(2)?;
        let (x, index) = (self.inputs[0], self.inputs[1]);
        let fits = x.dtype != DType::State && x.rank() >= 1 && index.dtype == DType::I32 && index.rank() == 1;
        if !fits || x.shape[x.rank() - 1].constant().is_none() || index.shape[0].constant().is_none() {
            return self.error(format!("{} by {}", self.text(x), self.text(index)));
        }
        let mut ty = x.clone();
        ty.shape[x.rank() - 1] = index.shape[0];
        Ok(ty)
    }
}

/// Products, reductions and norms.
impl Rule<'_> {
    fn matmul(&self, rhs_t: bool) -> Ruled {
        self.takes(2)?;
        for operand in self.inputs.iter().filter(|t| !t.dtype.is_quantised()) {
            self.float(operand)?;
        }
        let (a, b) = (self.inputs[0], self.inputs[1]);
        let ([m, a_k], [b_rows, b_columns]) = (&a.shape[..], &b.shape[..]) else {
            return self.error(format!("operands {} and {} must be matrices", self.text(a), self.text(b)));
        };
        let (n, k) = if rhs_t { (b_rows, b_columns) } else { (b_columns, b_rows) };
        if a_k != k {
            return self.error(format!("inner dimensions of {} and {} differ", self.text(a), self.text(b)));
        }
        Ok(Type::new(DType::F32, [*m, *n]))
    }
    fn reduce(&self, axis: u32) -> Ruled {
        self.takes(1)?;
        self.float(self.inputs[0])?;
        let mut ty = self.inputs[0].clone();
        match ty.shape.get_mut(axis as usize) {
            Some(d) => *d = Dim::Const(1),
            None => return self.error(format!("axis {axis} of {}", self.text(self.inputs[0]))),
        }
        Ok(ty)
    }
    fn softmax(&self) -> Ruled {
        let ty = self.float_to_same()?;
        if ty.rank() == 0 { self.error("needs an axis") } else { Ok(ty) }
    }
    /// A norm of the last axis with so many vectors of weights.
    fn norm(&self, weights: usize) -> Ruled {
        self.takes(1 + weights)?;
        for t in self.inputs {
            self.float(t)?;
        }
        let x = self.inputs[0];
        match self.inputs[1..].iter().find(|w| x.shape.last().is_none_or(|last| w.shape != [*last])) {
            Some(w) => self.error(format!("weight {} for {}", self.text(w), self.text(x))),
            None => Ok(x.clone()),
        }
    }
    fn rope(&self) -> Ruled {
        self.takes(3)?;
        let (x, cos, sin) = (self.inputs[0], self.inputs[1], self.inputs[2]);
        self.float(x)?;
        let fits = match (&x.shape[..], &cos.shape[..]) {
            ([t, _, Dim::Const(d)], [u, Dim::Const(half)]) => t == u && *half <= *d / 2,
            _ => false,
        };
        if fits && cos == sin && cos.dtype == DType::F32 {
            Ok(x.clone())
        } else {
            self.error(format!("x {}, cos {}, sin {}", self.text(x), self.text(cos), self.text(sin)))
        }
    }
    fn pool(&self) -> Ruled {
        self.takes(2)?;
        let (x, slot) = (self.inputs[0], self.inputs[1]);
        self.float(x)?;
        let [rows, width] = x.shape[..] else { return self.error(format!("needs a matrix, found {}", self.text(x))) };
        self.row_table(slot, rows)?;
        match self.module.symbol("S") {
            Some(s) => Ok(Type::new(x.dtype, [Dim::Sym(s), width])),
            None => self.error("needs the symbol S (runs)"),
        }
    }
}

/// Caches of keys and values, and calls.
impl Rule<'_> {
    fn kv_append(&self, state: StateId) -> Ruled {
        // Further operands are tokens of earlier writes.
        if self.inputs.len() < 4 || self.inputs[4..].iter().any(|t| t.dtype != DType::State) {
            return self.error(format!("takes 4 operands and states, found {}", self.inputs.len()));
        }
        let Some(s) = self.module.states.get(state.index()) else { return self.error("no such state") };
        let want = [Dim::Const(s.kv_heads), Dim::Const(s.head_dim)];
        let rows = self.inputs[0].shape.first();
        for t in &self.inputs[..2] {
            self.float(t)?;
            if t.rank() != 3 || t.shape[1..] != want || t.shape.first() != rows {
                return self.error(format!("{} for a state of {} heads of {}", self.text(t), s.kv_heads, s.head_dim));
            }
        }
        for table in &self.inputs[2..4] {
            self.row_table(table, self.inputs[0].shape[0])?;
        }
        Ok(Type::new(DType::State, []))
    }
    fn sdpa(&self, state: StateId) -> Ruled {
        self.takes(4)?;
        let q = self.inputs[0];
        self.float(q)?;
        let Some(s) = self.module.states.get(state.index()) else { return self.error("no such state") };
        match q.shape[..] {
            [row, Dim::Const(h), Dim::Const(d)] if h % s.kv_heads.max(1) == 0 && d == s.head_dim => {
                self.row_table(self.inputs[2], row)?;
                self.row_table(self.inputs[3], row)?;
            }
            _ => return self.error(format!("q {} for a state of {} heads of {}", self.text(q), s.kv_heads, s.head_dim)),
        }
        if self.inputs[1].dtype == DType::State { Ok(q.clone()) } else { self.error("second operand must be a state") }
    }
    fn call(&self, func: FuncId, params: &[ParamId], states: &[StateId]) -> Ruled {
        let Some(f) = self.module.functions.get(func.index()) else { return self.error("no such function") };
        if f.outputs.len() != 1 || f.inputs.len() != self.inputs.len() || f.params.len() != params.len() || f.states.len() != states.len() {
            return self.error(format!("@{} takes other operands", f.name));
        }
        for (i, t) in self.inputs.iter().enumerate() {
            let Some(formal) = f.nodes.get(f.inputs[i].index()).map(|n| &n.ty) else { return self.error("no such input") };
            if formal != *t {
                return self.error(format!("operand {i} of @{} is {}, found {}", f.name, self.text(formal), self.text(t)));
            }
        }
        let type_of = |id: &ParamId| self.module.params.get(id.index()).map(|p| &p.ty);
        if f.params.iter().zip(params).any(|(formal, actual)| type_of(formal).is_none() || type_of(formal) != type_of(actual)) {
            return self.error(format!("parameters of @{} have other types", f.name));
        }
        f.nodes.get(f.outputs[0].index()).map_or_else(|| self.error("no such output"), |node| Ok(node.ty.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Pool;
    use crate::parse::parse;

    /// Two kv heads of width 4, and values of all kinds.
    const HEAD: &str = r#"module {
        symbol T<=4
        symbol S<=4
        state @kv {kv_heads=2, head_dim=4, dtype=f32}
        func @f(%one: f32, %x: f32[4], %five: f32[5], %bf: bf16[4], %i: i32[4], %bool: bool[4], %token: state, %tokens: state[4],
                %m: f32[4, 4], %wide: f32[4, 5], %mt: f32[4, T], %tm: f32[T, 4], %ii: i32[4, 4], %q8: q8[4, 4], %bm: bf16[4, 4],
                %slot: i32[T], %runs: i32[S], %float_slot: f32[T], %it: i32[T, 4], %rows: f32[2, 32], %huge: f32[4294967296, 4294967296],
                %most: f32[18446744073709551615], %q: f32[T, 4, 4], %k: f32[T, 2, 4], %ks: f32[S, 2, 4], %ki: i32[T, 2, 4],
                %q3: f32[T, 3, 4], %q5: f32[T, 4, 5], %cos: f32[T, 2], %cos3: f32[T, 3], %cos1: f32[T, 1], %cos_s: f32[S, 2],
                %cos_b: bf16[T, 2])
        { %y = "#;

    /// What is inferred for one line; where it declares no type, f32 is declared.
    fn inferred(line: &str) -> Result<String, String> {
        let line = line.replace("@kv", "{state=@kv}").replace("@see", r#"{state=@kv, score="score", mask="true"}"#);
        let declared = if line.contains(" : ") { "" } else { " : f32" };
        let module = parse(&format!("{HEAD}{line}{declared} return %y }} }}")).unwrap_or_else(|e| panic!("{line}: {e}"));
        let node = module.main().nodes.last().unwrap();
        let types: Vec<&Type> = node.inputs.iter().map(|i| module.main().ty(*i)).collect();
        infer(&module, &node.op, &types, Some(&node.ty))
            .map(|ty| format!("{}{}", ty.dtype, module.shape_text(&ty.shape)))
            .map_err(|e| e.what)
    }

    #[test]
    fn every_op_has_a_type_and_its_number_of_operands() {
        for (line, ty) in [
            ("neg %x", "f32[4]"),
            ("not %bool", "bool[4]"),
            ("add %i, %i", "i32[4]"),
            ("and %bool, %bool", "bool[4]"),
            ("lt %x, %one", "bool[4]"),
            ("where %bool, %bf, %bf", "bf16[4]"),
            ("convert %rows : q8g32[2, 32]", "q8g32[2, 32]"),
            ("reshape %tm : f32[2, T, 2]", "f32[2, T, 2]"),
            ("permute %tm {perm=[1, 0]}", "f32[4, T]"),
            ("slice %x {axis=0, start=0, end=4}", "f32[4]"),
            ("expand %one : f32[T]", "f32[T]"),
            ("embedding %q8, %slot", "f32[T, 4]"),
            ("embedding %bm, %slot", "bf16[T, 4]"),
            ("index_select %tm, %i", "f32[T, 4]"),
            ("index_select %x, %i", "f32[4]"),
            ("mm %m, %wide", "f32[4, 5]"),
            ("mm %bm, %q8 {rhs_t}", "f32[4, 4]"),
            ("sum %m {axis=1}", "f32[4, 1]"),
            ("softmax %tm", "f32[T, 4]"),
            ("rms_norm %bm, %x {eps=1}", "bf16[4, 4]"),
            ("layer_norm %m, %x, %bf {eps=1}", "f32[4, 4]"),
            ("rope %q, %cos, %cos", "f32[T, 4, 4]"),
            ("kv_append %k, %k, %slot, %slot @kv", "state[]"),
            ("sdpa %q, %token, %slot, %slot @see", "f32[T, 4, 4]"),
            ("pool_mean %tm, %slot", "f32[S, 4]"),
        ] {
            assert_eq!(inferred(line).as_deref(), Ok(ty), "{line}");
            let operands = line.rfind('%').unwrap();
            let end = line[operands..].find(' ').map_or(line.len(), |at| operands + at);
            let error = inferred(&format!("{}, %one{}", &line[..end], &line[end..])).unwrap_err();
            assert!(error.starts_with("takes "), "{line}: {error}");
        }
        assert_eq!(inferred("kv_append %k, %k, %slot, %slot, %token, %token @kv").as_deref(), Ok("state[]"));
        let one = Type::new(DType::F32, []);
        for op in [Op::Input { index: 0 }, Op::Const(1.0), Op::Param(ParamId(0))] {
            let error = infer(&Module::default(), &op, &[&one], Some(&one)).unwrap_err();
            assert_eq!(error.what, "takes 0 operands, found 1", "{op:?}");
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        for line in [
            "neg %i",
            "not %x",
            "const 1 : f32[4]",
            "const 1 : state",
            "add %x, %bf",
            "add %bool, %bool",
            "add %token, %token",
            "add %x, %five",
            "and %i, %i",
            "lt %x, %i",
            "lt %token, %token",
            "lt %x, %five",
            "where %x, %x, %x",
            "where %bool, %x, %bf",
            "where %bool, %token, %token",
            "where %bool, %five, %five",
            "convert %x : bf16[5]",
            "convert %x : state[4]",
            "convert %token : f32",
            "convert %rows : z8g32[2, 32]",
            "convert %ii : q8[4, 4]",
            "convert %x : q8[4]",
            "convert %mt : q8[4, T]",
            "reshape %x : f32[5]",
            "reshape %x : bf16[4]",
            "reshape %tm : f32[S, 4]",
            "reshape %huge : f32[4294967296, 4294967296, 2]",
            "permute %m {perm=[0, 0]}",
            "permute %m {perm=[0]}",
            "slice %x {axis=0, start=2, end=2}",
            "slice %x {axis=0, start=0, end=5}",
            "slice %x {axis=1, start=0, end=1}",
            "slice %tm {axis=0, start=0, end=1}",
            "cat {axis=0}",
            "cat %x, %bf {axis=0}",
            "cat %x, %m {axis=0}",
            "cat %m, %wide {axis=0}",
            "cat %tm, %tm {axis=0}",
            "cat %x {axis=1}",
            "cat %most, %most {axis=0}",
            "expand %x : bf16[4]",
            "expand %x : f32[5]",
            "expand %m : f32[4]",
            "embedding %m, %x",
            "embedding %m, %ii",
            "embedding %one, %i",
            "index_select %mt, %i",
            "index_select %m, %slot",
            "index_select %m, %x",
            "index_select %m, %ii",
            "index_select %one, %i",
            "index_select %tokens, %i",
            "mm %ii, %m",
            "mm %m, %ii",
            "mm %m, %x",
            "mm %x, %m",
            "mm %wide, %m",
            "mm %m, %wide {rhs_t}",
            "sum %i {axis=0}",
            "sum %x {axis=1}",
            "softmax %i",
            "softmax %one",
            "rms_norm %i, %x {eps=1}",
            "rms_norm %x, %i {eps=1}",
            "rms_norm %x, %five {eps=1}",
            "rms_norm %one, %x {eps=1}",
            "layer_norm %x, %x, %five {eps=1}",
            "rope %ki, %cos, %cos",
            "rope %tm, %cos, %cos",
            "rope %q, %cos3, %cos3",
            "rope %q, %cos_s, %cos_s",
            "rope %q, %cos, %cos1",
            "rope %q, %cos_b, %cos_b",
            "kv_append %k, %k, %slot @kv",
            "kv_append %k, %k, %slot, %slot, %slot @kv",
            "kv_append %q, %q, %slot, %slot @kv",
            "kv_append %k, %q, %slot, %slot @kv",
            "kv_append %k, %ks, %slot, %slot @kv",
            "kv_append %ki, %ki, %slot, %slot @kv",
            "kv_append %one, %one, %slot, %slot @kv",
            "kv_append %k, %k, %runs, %slot @kv",
            "kv_append %k, %k, %slot, %runs @kv",
            "kv_append %k, %k, %float_slot, %slot @kv",
            "sdpa %ki, %token, %slot, %slot @see",
            "sdpa %q3, %token, %slot, %slot @see",
            "sdpa %q5, %token, %slot, %slot @see",
            "sdpa %tm, %token, %slot, %slot @see",
            "sdpa %q, %token, %runs, %slot @see",
            "sdpa %q, %token, %slot, %runs @see",
            "sdpa %q, %one, %slot, %slot @see",
            "pool_mean %it, %slot",
            "pool_mean %float_slot, %slot",
            "pool_mean %tm, %runs",
        ] {
            assert!(inferred(line).is_err(), "{line}: {:?}", inferred(line));
        }
        let (matrix, table) = (Type::new(DType::F32, [Dim::Const(4); 2]), Type::new(DType::I32, [Dim::Const(4)]));
        let error = infer(&Module::default(), &Op::Pool(Pool::Mean), &[&matrix, &table], None).unwrap_err();
        assert_eq!(error.to_string(), "pool_mean: needs the symbol S (runs)");
    }
}
