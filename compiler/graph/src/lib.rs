//! The graph IR: types, ops, builder, text form, verifier, interpreter. Depends on nothing else of ours.

pub mod build;
pub mod ops;
pub mod types;

pub use build::{Builder, TypeError};
pub use ops::{AttnExpr, AttnVar, Binary, Compare, Op, Pool, Reduce, Unary};
pub use types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};
