//! The graph IR: types, ops, builder, text form, verifier, interpreter. Depends on nothing else of ours.

pub mod build;
pub mod infer;
pub mod interp;
pub mod ops;
pub mod parse;
pub mod print;
pub mod quant;
#[cfg(any(test, feature = "random"))]
pub mod random;
pub mod recipe;
pub mod tensor;
pub mod types;
pub mod verify;

pub use build::{Builder, layer_of};
pub use infer::{TypeError, infer};
pub use interp::{Interp, InterpError};
pub use ops::{AttnExpr, AttnVar, Binary, Compare, Op, OpClass, Pool, Reduce, Unary};
pub use parse::{ParseError, parse};
pub use print::print;
pub use quant::Group;
pub use tensor::Tensor;
pub use types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};
pub use verify::{VerifyErrors, verify};
