//! Text form of a program (`--emit program`): everything that codegen obeys, readable, one stable format.
//!
//! ```text
//! program @step.8 {rows 1 to 8, logit_rows 8, runs 8, tile_rows 8, arena 4096, private 0} {
//!   buffer b0 x: f32[8 x 64] at 0 (2048 bytes)
//!   weight w0 model.norm.weight: f32 plain at [0]
//!   region r0 norm = loops for (v0 < rows) {
//!     o0 = b0: f32
//!     reduce v1 in 0..64: s0 = sum(o0[v0 * 64 + v1])
//!     store v1 in 0..64: o1[v1] = o0[v0 * 64 + v1] * s0
//!   }
//!   body {
//!     r0 norm
//!     barrier
//!     layers 16 { ... }
//!   }
//! }
//! ```
//! Expressions are infix and written out at every use, except those used several times, which get a name: `e7 = ...`.

use crate::expr::children;
use crate::program::*;
use std::fmt::{self, Display, Write};

impl Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program @{}.{} {{rows {} to {}, logit_rows {}, runs {}, tile_rows {}, arena {}, private {}}} {{",
            self.entry,
            self.bucket,
            self.least_rows,
            self.bucket,
            self.max_logit_rows,
            self.max_runs,
            self.tile_rows,
            self.arena_bytes,
            self.private_bytes
        )?;
        for (i, b) in self.buffers.iter().enumerate() {
            writeln!(f, "  buffer b{i} {}: {}[{} x {}] at {} ({} bytes)", b.name, b.dtype, b.rows, b.stride, b.offset, b.bytes())?;
        }
        for (i, w) in self.weights.iter().enumerate() {
            writeln!(f, "  weight w{i} {}: {} {} at {:?}", w.name, w.dtype, w.layout, w.offsets)?;
        }
        for (i, region) in self.regions.iter().enumerate() {
            write!(f, "  region r{i} {} = ", region.name)?;
            let mut out = String::new();
            kernel(&mut out, &region.kernel)?;
            f.write_str(&indent(&out, 2))?;
        }
        writeln!(f, "  body {{")?;
        let mut out = String::new();
        items(&mut out, self, &self.body)?;
        f.write_str(&indent(&format!("    {out}"), 4))?;
        writeln!(f, "  }}\n}}")
    }
}

/// All lines but the first moved to the right.
fn indent(text: &str, by: usize) -> String {
    let space = " ".repeat(by);
    let lines: Vec<&str> = text.lines().collect();
    let mut out = lines.join(&format!("\n{space}"));
    if !out.is_empty() {
        out.push('\n');
    }
    out
}

fn items(out: &mut String, program: &Program, list: &[Item]) -> fmt::Result {
    for item in list {
        match item {
            Item::Region(id) => {
                let name = program.regions.get(id.index()).map_or("?", |r| &r.name);
                writeln!(out, "r{} {name}", id.0)?;
            }
            Item::Barrier => writeln!(out, "barrier")?,
            Item::Layers { count, body } => {
                writeln!(out, "layers {count} {{")?;
                let mut inner = String::new();
                items(&mut inner, program, body)?;
                write!(out, "  {}", indent(&inner, 2))?;
                writeln!(out, "}}")?;
            }
        }
    }
    Ok(())
}

impl Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Plain => f.write_str("plain"),
            Layout::Panels(p) => p.fmt(f),
        }
    }
}

impl Display for Panels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "panels {{k {}, nr {}, k_pack {}, groups {} x {} columns", self.k, self.nr, self.k_pack, self.groups, self.group_cols)?;
        if self.ways != 1 {
            write!(f, ", ways {}", self.ways)?;
        }
        match self.coding {
            Coding::Elements => {}
            Coding::Int8 { group } => write!(f, ", int8 by {group}")?,
            Coding::Int8Groups { group, .. } => write!(f, ", int8 scaled by {group}")?,
            Coding::Int4 { group, .. } => write!(f, ", int4 by {group}")?,
        }
        if self.coding.has_zeros() {
            f.write_str(" with zeros")?;
        }
        f.write_str("}")
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Weight(id) => write!(f, "w{}", id.0),
            Place::Buffer(id) => write!(f, "b{}", id.0),
            Place::Private(offset) => write!(f, "private + {offset}"),
            Place::State(offsets) => write!(f, "state + {offsets:?}"),
            Place::Output => f.write_str("output"),
            Place::Table(table) => {
                f.write_str("table.")?;
                f.write_str(match table {
                    Table::Token => "token",
                    Table::Slot => "slot",
                    Table::Position => "position",
                    Table::KvIndex => "kv_index",
                    Table::Segment => "segment",
                    Table::LogitRow => "logit_row",
                    Table::RunBegin => "run_begin",
                    Table::PageTable => "page_table",
                })
            }
        }
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.dtype)
    }
}

impl Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Extent::Const(n) => n.fmt(f),
            Extent::Rows => f.write_str("rows"),
            Extent::LogitRows => f.write_str("logit_rows"),
            Extent::Runs => f.write_str("runs"),
        }
    }
}

/// A kernel's text, ending with a line break.
fn kernel(out: &mut String, kernel: &Kernel) -> fmt::Result {
    match kernel {
        Kernel::Loops(nest) => {
            write!(out, "loops ")?;
            loops(out, nest)
        }
        Kernel::Matmul(m) => matmul(out, m),
        Kernel::Attention(a) => attention(out, a),
        Kernel::Quantise(q) => quantise(out, q),
    }
}

fn quantise(out: &mut String, q: &Quantise) -> fmt::Result {
    let (group, stride) = (q.group, q.out_stride);
    writeln!(
        out,
        "quantise {} x {} of {} stride {} to {}, groups of {group} in {} bytes{}, {stride} bytes per row, bias factor {}",
        q.rows,
        q.k,
        q.x,
        q.x_stride,
        q.out,
        q.record(),
        if q.values_at().is_some() { " with values" } else { "" },
        q.bias_factor
    )
}

fn loops(out: &mut String, nest: &LoopNest) -> fmt::Result {
    let outer: Vec<_> = nest.outer.iter().map(|(v, e)| format!("v{} < {e}", v.0)).collect();
    writeln!(out, "for ({}) {{", outer.join(", "))?;
    operands(out, &nest.operands)?;
    let mut roots = vec![];
    for stage in &nest.stages {
        match &stage.kind {
            StageKind::Reduce { value, .. } => roots.push(*value),
            StageKind::Store(stores) => roots.extend(stores.iter().flat_map(|s| [s.index, s.value])),
        }
    }
    let text = Text::new(&nest.exprs, &roots);
    text.names(out)?;
    for stage in &nest.stages {
        let range = format!("v{} in {}..{}", stage.var.0, stage.range.start, stage.range.end);
        match &stage.kind {
            StageKind::Reduce { op, value, into } => {
                writeln!(out, "  reduce {range}: s{} = {}({})", into.0, reduce_name(*op), text.get(*value))?;
            }
            StageKind::Store(stores) => {
                let all: Vec<_> = stores.iter().map(|s| text.store(s)).collect();
                writeln!(out, "  store {range}: {}", all.join("; "))?;
            }
        }
    }
    writeln!(out, "}}")
}

fn operands(out: &mut String, operands: &[Operand]) -> fmt::Result {
    for (i, o) in operands.iter().enumerate() {
        writeln!(out, "  o{i} = {o}")?;
    }
    Ok(())
}

fn matmul(out: &mut String, m: &Matmul) -> fmt::Result {
    writeln!(out, "matmul {} (v{} < {}, v{}) {{", m.compute.name(), m.row.0, m.rows, m.col.0)?;
    writeln!(out, "  a = {} stride {}", m.a, m.a_stride)?;
    writeln!(out, "  w = w{}: {}", m.weight.0, m.panels)?;
    let t = &m.tile;
    writeln!(
        out,
        "  tile {{mr {} {}, k_block {}, m_block {}, n_block {}, widen {}}}",
        t.mr, t.block_mr, t.k_block, t.m_block, t.n_block, t.widen
    )?;
    let others = m.fetch_by_cpu.iter().map(|(kind, fetch)| (format!(" on {kind:?}"), fetch));
    for (cpu, f) in [(String::new(), &t.fetch)].into_iter().chain(others) {
        let past_l2 = if f.past_l2 { " past l2" } else { "" };
        let busy = f.busy.map_or(String::new(), |busy| format!(", from {} rows on l1 {}", busy.rows, busy.l1));
        let near = f.near.map_or(String::new(), |near| format!(", from {} streams on {}", near.streams, near.ahead));
        writeln!(out, "  fetch{cpu} {{streams {}, ahead {}{past_l2}{busy}{near}}}", f.streams, f.ahead)?;
    }
    if let Some(q) = &m.quantise {
        write!(out, "  ")?;
        quantise(out, q)?;
    }
    if let Some(nest) = &m.prologue {
        let mut text = String::from("prologue ");
        loops(&mut text, nest)?;
        write!(out, "  {}", indent(&text, 2))?;
    }
    operands(out, &m.operands)?;
    let roots: Vec<_> = m.stores.iter().flat_map(|s| [s.index, s.value]).collect();
    let text = Text::new(&m.exprs, &roots);
    text.names(out)?;
    for s in &m.stores {
        writeln!(out, "  {}", text.store(s))?;
    }
    for g in &m.group_nests {
        let mut text = format!("groups {}..{} ", g.groups.start, g.groups.end);
        loops(&mut text, &g.nest)?;
        write!(out, "  {}", indent(&text, 2))?;
    }
    writeln!(out, "}}")
}

fn attention(out: &mut String, a: &Attention) -> fmt::Result {
    let shape = format!("heads {}, kv_heads {}, head_dim {}, tile_rows {}", a.heads, a.kv_heads, a.kv.head_dim, a.tile_rows);
    writeln!(out, "attention {} {{{shape}}} {{", a.compute.name())?;
    writeln!(out, "  q = {} stride {} head_stride {}", a.q, a.q_stride, a.q_head_stride)?;
    writeln!(out, "  out = {} stride {}", a.out, a.out_stride)?;
    writeln!(out, "  cache {} {{page {}, head {}}} at {:?}", a.kv.dtype, a.page_bytes, a.kv.bytes(), a.state_offsets)?;
    let roots: Vec<ExprId> = std::iter::once(a.score).chain(a.mask).collect();
    let text = Text::new(&a.exprs, &roots);
    writeln!(out, "  head v{}, query v{}, key v{}", a.head_var.0, a.query_var.0, a.key_var.0)?;
    text.names(out)?;
    writeln!(out, "  score = {}", text.get(a.score))?;
    for (name, offset) in [("key_lower", a.key_lower), ("key_upper", a.key_upper)] {
        if let Some(offset) = offset {
            let sign = if offset < 0 { '-' } else { '+' };
            writeln!(out, "  {name} = v{} {sign} {}", a.query_var.0, offset.unsigned_abs())?;
        }
    }
    if let Some(mask) = a.mask {
        writeln!(out, "  mask = {}", text.get(mask))?;
    }
    writeln!(out, "}}")
}

fn reduce_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "sum",
        ReduceOp::Max => "max",
    }
}

/// Printer of one kernel's expressions.
struct Text<'a> {
    exprs: &'a Exprs,
    /// Gets a name: used more than once, worth it, and not below a fold (whose variable would be free).
    named: Vec<bool>,
}

impl<'a> Text<'a> {
    fn new(exprs: &'a Exprs, roots: &[ExprId]) -> Text<'a> {
        let nodes = exprs.nodes();
        let mut uses = vec![0u32; nodes.len()];
        let mut in_fold = vec![false; nodes.len()];
        let mut count = |id: ExprId| {
            if let Some(n) = uses.get_mut(id.index()) {
                *n += 1;
            }
        };
        roots.iter().for_each(|r| count(*r));
        // Users come after operands: one backward walk counts reachable uses only.
        for i in (0..nodes.len()).rev() {
            if uses[i] == 0 {
                continue;
            }
            for (n, child) in children(&nodes[i]).iter().enumerate() {
                let Some(c) = uses.get_mut(child.index()) else { continue };
                *c += 1;
                let fold_body = matches!(nodes[i], Expr::Fold { .. }) && n == 2;
                in_fold[child.index()] |= in_fold[i] || fold_body;
            }
        }
        let simple = |e: &Expr| children(e).is_empty();
        let named = (0..nodes.len()).map(|i| uses[i] > 1 && !in_fold[i] && !simple(&nodes[i])).collect();
        Text { exprs, named }
    }

    /// Lines `e7 = ...`.
    fn names(&self, out: &mut String) -> fmt::Result {
        for (i, node) in self.exprs.nodes().iter().enumerate() {
            if self.named[i] {
                writeln!(out, "  e{i} = {}", self.node(node))?;
            }
        }
        Ok(())
    }

    fn get(&self, id: ExprId) -> String {
        self.at_least(id, 0)
    }

    /// With parentheses where it binds less than `binding`.
    fn at_least(&self, id: ExprId, binding: u32) -> String {
        match self.named.get(id.index()) {
            None => format!("?{}", id.0),
            Some(true) => format!("e{}", id.0),
            Some(false) => {
                let node = &self.exprs.nodes()[id.index()];
                let text = self.node(node);
                if self.binding(node) < binding { format!("({text})") } else { text }
            }
        }
    }

    fn binding(&self, node: &Expr) -> u32 {
        match node {
            Expr::Binary(BinaryOp::Or, ..) => 1,
            Expr::Binary(BinaryOp::And, ..) => 2,
            Expr::Cmp(..) => 3,
            Expr::Binary(BinaryOp::Add | BinaryOp::Sub, ..) => 4,
            Expr::Binary(BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem, ..) => 5,
            Expr::Int(v) if *v < 0 => 5,
            Expr::Float(v) if v.is_sign_negative() => 5,
            _ => 6,
        }
    }

    fn store(&self, s: &Store) -> String {
        format!("o{}[{}] = {}", s.operand.0, self.get(s.index), self.get(s.value))
    }

    fn node(&self, node: &Expr) -> String {
        let plain = |id: &ExprId| self.get(*id);
        // Left to right: the right side of an operator of the same strength keeps its parentheses.
        let infix = |sign: &str, a: &ExprId, b: &ExprId| {
            let binding = self.binding(node);
            format!("{} {sign} {}", self.at_least(*a, binding), self.at_least(*b, binding + 1))
        };
        match node {
            Expr::Int(v) => v.to_string(),
            Expr::Float(v) => format!("{v:?}"),
            Expr::Var(v) => format!("v{}", v.0),
            Expr::Scalar(s) => format!("s{}", s.0),
            Expr::PagesPerSlot => "pages_per_slot".into(),
            Expr::Acc(way) => format!("acc{way}"),
            Expr::Score => "score".into(),
            Expr::Load(o, index) => format!("o{}[{}]", o.0, plain(index)),
            Expr::Unary(op, a) => format!("{}({})", format!("{op:?}").to_lowercase(), plain(a)),
            Expr::Round(dtype, a) => format!("{dtype}({})", plain(a)),
            Expr::Binary(BinaryOp::Min, a, b) => format!("min({}, {})", plain(a), plain(b)),
            Expr::Binary(BinaryOp::Max, a, b) => format!("max({}, {})", plain(a), plain(b)),
            Expr::Binary(op, a, b) => {
                let sign = match op {
                    BinaryOp::Add => "+",
                    BinaryOp::Sub => "-",
                    BinaryOp::Mul => "*",
                    BinaryOp::Div => "/",
                    BinaryOp::Rem => "%",
                    BinaryOp::And => "&&",
                    _ => "||",
                };
                infix(sign, a, b)
            }
            Expr::Cmp(op, a, b) => {
                let sign = match op {
                    CmpOp::Lt => "<",
                    CmpOp::Le => "<=",
                    CmpOp::Gt => ">",
                    CmpOp::Ge => ">=",
                    CmpOp::Eq => "==",
                    CmpOp::Ne => "!=",
                };
                infix(sign, a, b)
            }
            Expr::Select(c, a, b) => format!("select({}, {}, {})", plain(c), plain(a), plain(b)),
            Expr::Fold { op, var, begin, end, body } => {
                format!("{}(v{} in {}..{}: {})", reduce_name(*op), var.0, self.at_least(*begin, 4), self.at_least(*end, 4), plain(body))
            }
        }
    }
}
