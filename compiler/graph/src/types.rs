//! Types of values and the containers of the IR: module, function, node, parameter, state.
//!
//! A [`Module`] holds named weights (never their bytes), named states (KV caches) and functions in SSA form in a flat arena. Every
//! node produces exactly one value, so a [`ValueId`] names both. Dimensions are constants or symbols with a bound.

use crate::ops::Op;
use crate::quant::Group;
use std::fmt;

/// Element types. `State` is the type of a state token: it orders reads of a KV cache after writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    BF16,
    I64,
    I32,
    I8,
    U8,
    Bool,
    State,
    /// Eight-bit codes with f32 scales; see [`crate::quant`]. Like `Q4` only read by `mm` and (tables) `embedding`.
    Q8(Group),
    /// Four-bit codes with f16 scales.
    Q4(Group),
    /// Eight-bit codes with f16 scales and zero points. These two come from checkpoints only: nothing is converted to them.
    Z8(Group),
    /// Four-bit codes with f16 scales and zero points.
    Z4(Group),
}

impl DType {
    /// The quantised ones that values are converted to.
    pub const QUANTISED: [DType; 8] = [
        DType::Q8(Group::Row),
        DType::Q8(Group::G32),
        DType::Q8(Group::G64),
        DType::Q8(Group::G128),
        DType::Q8(Group::G256),
        DType::Q4(Group::G32),
        DType::Q4(Group::G64),
        DType::Q4(Group::G128),
    ];
    /// The quantised ones with zero points.
    pub const WITH_ZEROS: [DType; 6] = [
        DType::Z8(Group::G32),
        DType::Z8(Group::G64),
        DType::Z8(Group::G128),
        DType::Z4(Group::G32),
        DType::Z4(Group::G64),
        DType::Z4(Group::G128),
    ];
    /// All others, for tests and parsers.
    pub const ALL: [DType; 9] =
        [DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I8, DType::U8, DType::Bool, DType::State];
    /// Name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::Bool => "bool",
            DType::State => "state",
            DType::Q8(Group::Row) => "q8",
            DType::Q8(Group::G32) => "q8g32",
            DType::Q8(Group::G64) => "q8g64",
            DType::Q8(Group::G128) => "q8g128",
            DType::Q8(Group::G256) => "q8g256",
            DType::Q4(Group::Row) => "q4",
            DType::Q4(Group::G32) => "q4g32",
            DType::Q4(Group::G64) => "q4g64",
            DType::Q4(Group::G128) => "q4g128",
            DType::Q4(Group::G256) => "q4g256",
            DType::Z8(Group::Row) => "z8",
            DType::Z8(Group::G32) => "z8g32",
            DType::Z8(Group::G64) => "z8g64",
            DType::Z8(Group::G128) => "z8g128",
            DType::Z8(Group::G256) => "z8g256",
            DType::Z4(Group::Row) => "z4",
            DType::Z4(Group::G32) => "z4g32",
            DType::Z4(Group::G64) => "z4g64",
            DType::Z4(Group::G128) => "z4g128",
            DType::Z4(Group::G256) => "z4g256",
        }
    }
    /// f32, f16 or bf16.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
    /// i64, i32, i8 or u8.
    pub fn is_int(self) -> bool {
        matches!(self, DType::I64 | DType::I32 | DType::I8 | DType::U8)
    }
    /// Codes with scales.
    pub fn is_quantised(self) -> bool {
        crate::quant::group_of(self).is_some()
    }
    /// Codes with scales and zero points.
    pub fn has_zeros(self) -> bool {
        matches!(self, DType::Z8(_) | DType::Z4(_))
    }
    /// Bytes of one element (0 for `State`; one unpacked code of the quantised, whose size in a file is a matter of layout).
    pub fn size(self) -> u64 {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::Q8(_) | DType::Q4(_) | DType::Z8(_) | DType::Z4(_) => 1,
            DType::State => 0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! ids { ($($(#[$m:meta])* $name:ident),* $(,)?) => { $(
    $(#[$m])*
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct $name(pub u32);
    impl $name {
        /// As an index.
        pub fn index(self) -> usize { self.0 as usize }
    } )* } }
ids! {
    /// A node of one function and the value that it produces.
    ValueId,
    /// Index into [`Module::symbols`].
    SymbolId,
    /// Index into [`Module::params`].
    ParamId,
    /// Index into [`Module::states`].
    StateId,
    /// Index into [`Module::functions`].
    #[derive(Default)]
    FuncId,
}

/// A dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known at build.
    Const(u64),
    /// `1 <= symbol <= bound`, known at run time.
    Sym(SymbolId),
}

impl Dim {
    /// The constant, if it is one.
    pub fn constant(self) -> Option<u64> {
        match self {
            Dim::Const(n) => Some(n),
            Dim::Sym(_) => None,
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Dim {
        Dim::Const(n as u64)
    }
}

/// A symbolic dimension: `T<=512`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Name, `T` rows, `L` rows that want logits, `S` runs.
    pub name: String,
    /// Largest value.
    pub bound: u64,
}

/// Type of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first; empty for scalars and states.
    pub shape: Vec<Dim>,
}

impl Type {
    /// A tensor type.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = Dim>) -> Type {
        Type { dtype, shape: shape.into_iter().collect() }
    }
    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }
}

/// How the bytes of a parameter come from the checkpoint; evaluated by the pack stage.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    /// A tensor of the checkpoint, in its stored type.
    Source {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// Transpose of a matrix.
    Transpose(Box<Recipe>),
    /// Concatenation along axis 0.
    Concat(Vec<Recipe>),
    /// Rows `start..end` of axis 0.
    Slice {
        /// What is cut.
        of: Box<Recipe>,
        /// First row.
        start: u64,
        /// End.
        end: u64,
    },
    /// Conversion of the element type (round to nearest even; overflow is an error).
    Convert {
        /// What is converted.
        of: Box<Recipe>,
        /// Target type; a quantised one takes groups along the last axis.
        dtype: DType,
    },
    /// Table of rotary embeddings, `f32[positions, inv_freq.len()]`: `f(position as f32 * inv_freq[i]) * scale`, the product in f32, `f`
    /// in f64 and rounded once.
    Rope {
        /// Sine instead of cosine.
        sin: bool,
        /// Inverse frequencies.
        inv_freq: Vec<f32>,
        /// Attention factor (yarn), else 1.
        scale: f32,
        /// Rows.
        positions: u64,
    },
}

/// A named weight. Its type is the type of what the recipe gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// HF parameter path, or a name made from several.
    pub name: String,
    /// Constant shape.
    pub ty: Type,
    /// Where the bytes come from.
    pub recipe: Recipe,
}

/// A named KV cache of one layer: for each slot and position a key and a value per kv head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// `layers.3.kv`
    pub name: String,
    /// Number of kv heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Stored type: values are rounded to it when appended.
    pub dtype: DType,
    /// False for encoders: nothing is read in a later step, so that all layers may share the memory.
    pub persistent: bool,
}

/// One node of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Operation with its attributes.
    pub op: Op,
    /// Operands: values of earlier nodes.
    pub inputs: Vec<ValueId>,
    /// Type of the result.
    pub ty: Type,
    /// HF module path that it came from (`layers.0.mlp`), for messages and outlining.
    pub origin: String,
}

/// A function in SSA form: nodes in an order in which operands come before users.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Function {
    /// Name: the entry's, or `layer0`, `layer1`, ... for outlined ones.
    pub name: String,
    /// Nodes with [`Op::Input`], in order of their index.
    pub inputs: Vec<ValueId>,
    /// Input names.
    pub input_names: Vec<String>,
    /// Arena.
    pub nodes: Vec<Node>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Parameters that calls replace, in the order of [`Op::Call`]'s list; the body names those of the first layer.
    pub params: Vec<ParamId>,
    /// States that calls replace likewise.
    pub states: Vec<StateId>,
}

impl Function {
    /// The node.
    pub fn node(&self, id: ValueId) -> &Node {
        &self.nodes[id.index()]
    }
    /// Type of a value.
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.nodes[id.index()].ty
    }
    /// Input by name.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.input_names.iter().position(|n| n == name).and_then(|i| self.inputs.get(i)).copied()
    }
    /// All ids in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.nodes.len() as u32).map(ValueId)
    }
    /// Users of every value (a user appears once per operand place); outputs are not counted.
    pub fn users(&self) -> Vec<Vec<ValueId>> {
        let mut users = vec![Vec::new(); self.nodes.len()];
        for id in self.ids() {
            for input in &self.node(id).inputs {
                users[input.index()].push(id);
            }
        }
        users
    }
}

/// Everything that one entry at one bucket computes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Module {
    /// Symbols with bounds.
    pub symbols: Vec<Symbol>,
    /// Weights.
    pub params: Vec<Param>,
    /// KV caches.
    pub states: Vec<State>,
    /// Functions; callees may come in any order, calls are not recursive.
    pub functions: Vec<Function>,
    /// The entry.
    pub main: FuncId,
}

impl Module {
    /// Shape as text for messages: `[T, 64]`.
    pub fn shape_text(&self, shape: &[Dim]) -> String {
        let dims: Vec<String> = shape
            .iter()
            .map(|d| match d {
                Dim::Const(n) => n.to_string(),
                Dim::Sym(s) => self.symbols.get(s.index()).map_or_else(|| format!("?{}", s.0), |s| s.name.clone()),
            })
            .collect();
        format!("[{}]", dims.join(", "))
    }
    /// The entry function.
    pub fn main(&self) -> &Function {
        &self.functions[self.main.index()]
    }
    /// The entry function.
    pub fn main_mut(&mut self) -> &mut Function {
        &mut self.functions[self.main.index()]
    }
    /// Symbol by name.
    pub fn symbol(&self, name: &str) -> Option<SymbolId> {
        self.symbols.iter().position(|s| s.name == name).map(|i| SymbolId(i as u32))
    }
    /// Its bound.
    pub fn bound(&self, name: &str) -> Option<u64> {
        self.symbols.iter().find(|s| s.name == name).map(|s| s.bound)
    }
}
