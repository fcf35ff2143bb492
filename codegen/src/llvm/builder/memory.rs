//! Addresses, loads and stores, prefetches.

use super::{Elem, Fb, Ty, Value, mangle, ok, storage};
use crate::program::DType;
use inkwell::values::{BasicValue, IntValue, PointerValue};
use inkwell::{AtomicOrdering, AtomicRMWBinOp};

impl<'c> Fb<'_, 'c> {
    /// `pointer + bytes` (i64).
    pub fn offset(&self, pointer: Value<'c>, bytes: Value<'c>) -> Value<'c> {
        self.index(pointer, bytes, 1)
    }
    /// `pointer + bytes`.
    pub fn offset_const(&self, pointer: Value<'c>, bytes: u64) -> Value<'c> {
        if bytes == 0 { pointer } else { self.offset(pointer, self.int(bytes as i64)) }
    }
    /// Address of element `index` (i64) of elements of `size` bytes.
    pub fn index(&self, pointer: Value<'c>, index: Value<'c>, size: u64) -> Value<'c> {
        assert_eq!((pointer.ty, index.ty), (Ty::PTR, Ty::I64), "index");
        let (elem, index) = match size {
            1 => (Elem::I8, index),
            2 => (Elem::I16, index),
            4 => (Elem::I32, index),
            8 => (Elem::I64, index),
            _ => (Elem::I8, self.mul_int(index, size as i64)),
        };
        let raw = self.gep(elem, pointer.raw.into_pointer_value(), index.raw.into_int_value());
        self.value(raw.into(), Ty::PTR)
    }
    fn gep(&self, elem: Elem, pointer: PointerValue<'c>, index: IntValue<'c>) -> PointerValue<'c> {
        let ty = self.mb.basic_type(Ty::scalar(elem));
        // SAFETY: LLVM only builds an address computation; inkwell marks it unsafe because a wrong index is undefined behaviour
        // of the generated program. The planner's verifier keeps indices inside their operands.
        ok(unsafe { self.builder.build_gep(ty, pointer, &[index], "") })
    }
    /// Memory of a fixed size that lives until the function returns (an `alloca` in its entry block, wherever this is called).
    pub fn stack(&self, bytes: u64, align: u32) -> Value<'c> {
        let c = self.mb.context;
        let entry = self.function.get_first_basic_block().expect("entry");
        let at_entry = c.create_builder();
        match entry.get_first_instruction() {
            Some(first) => at_entry.position_before(&first),
            None => at_entry.position_at_end(entry),
        }
        let size = u32::try_from(bytes).expect("stack memory is small");
        let slot = ok(at_entry.build_alloca(c.i8_type().array_type(size), ""));
        ok(slot.as_instruction_value().expect("alloca").set_alignment(align));
        self.value(slot.into(), Ty::PTR)
    }
    /// Load of any type; `align` in bytes.
    pub fn load(&self, ty: Ty, pointer: Value<'c>, align: u32) -> Value<'c> {
        let raw = ok(self.builder.build_load(self.mb.basic_type(ty), pointer.raw.into_pointer_value(), ""));
        ok(raw.as_instruction_value().expect("load").set_alignment(align));
        self.value(raw, ty)
    }
    /// As [`Fb::load`], but never merged with another load of the same address (volatile): reads again what would otherwise wait in a
    /// register.
    pub fn load_again(&self, ty: Ty, pointer: Value<'c>, align: u32) -> Value<'c> {
        let value = self.load(ty, pointer, align);
        ok(value.raw.as_instruction_value().expect("load").set_volatile(true));
        value
    }
    /// Store of any type.
    pub fn store(&self, value: Value<'c>, pointer: Value<'c>, align: u32) {
        let store = ok(self.builder.build_store(pointer.raw.into_pointer_value(), value.raw));
        ok(store.set_alignment(align));
    }
    /// Load of the lanes whose mask bit is set; the others are zero and not touched in memory.
    pub fn load_masked(&self, ty: Ty, pointer: Value<'c>, mask: Value<'c>, align: u32) -> Value<'c> {
        assert_eq!(mask.ty, ty.with(Elem::I1), "load_masked");
        let name = format!("llvm.masked.load.{}.p0", mangle(ty));
        self.intrinsic(&name, ty, &[pointer, self.i32(align as i32), mask, self.zero(ty)])
    }
    /// Store of the lanes whose mask bit is set.
    pub fn store_masked(&self, value: Value<'c>, pointer: Value<'c>, mask: Value<'c>, align: u32) {
        assert_eq!(mask.ty, value.ty.with(Elem::I1), "store_masked");
        let name = format!("llvm.masked.store.{}.p0", mangle(value.ty));
        self.intrinsic_void(&name, &[value, pointer, self.i32(align as i32), mask]);
    }
    /// `lanes` neighbours of a stored float type, widened to f32.
    pub fn load_f32(&self, dtype: DType, lanes: u32, pointer: Value<'c>, align: u32) -> Value<'c> {
        self.widen(dtype, self.load(Ty::vec(storage(dtype), lanes), pointer, align))
    }
    /// As [`Fb::load_f32`], masked.
    pub fn load_f32_masked(&self, dtype: DType, pointer: Value<'c>, mask: Value<'c>, align: u32) -> Value<'c> {
        self.widen(dtype, self.load_masked(mask.ty.with(storage(dtype)), pointer, mask, align))
    }
    /// `lanes` neighbours of a stored integer type, widened to i64.
    pub fn load_i64(&self, dtype: DType, lanes: u32, pointer: Value<'c>, align: u32) -> Value<'c> {
        let v = self.load(Ty::vec(storage(dtype), lanes), pointer, align);
        if dtype == DType::U8 { self.zext(v, Elem::I64) } else { self.sext(v, Elem::I64) }
    }
    /// One stored float, widened, in all lanes.
    pub fn load_broadcast(&self, dtype: DType, lanes: u32, pointer: Value<'c>) -> Value<'c> {
        self.splat(self.load_f32(dtype, 1, pointer, dtype.size() as u32), lanes)
    }
    /// `[lanes][2]` bf16 (one vector register, as words): the even and the odd elements as f32, even = low half. Both are exact.
    pub fn split_bf16_pair(&self, words: Value<'c>) -> (Value<'c>, Value<'c>) {
        let f32s = words.ty.with(Elem::F32);
        let high = self.splat(self.int_of(Elem::I32, 0xffff_0000), words.ty.lanes);
        (self.bitcast(self.shl(words, 16), f32s), self.bitcast(self.and(words, high), f32s))
    }
    /// Stores f32 lanes rounded to a float type.
    pub fn store_f32(&self, dtype: DType, value: Value<'c>, pointer: Value<'c>, align: u32) {
        self.store(self.narrow(dtype, value), pointer, align);
    }
    /// As [`Fb::store_f32`], masked.
    pub fn store_f32_masked(&self, dtype: DType, value: Value<'c>, pointer: Value<'c>, mask: Value<'c>, align: u32) {
        self.store_masked(self.narrow(dtype, value), pointer, mask, align);
    }
    /// Load of an i64 that other threads change. Orders no other access.
    pub fn load_shared(&self, pointer: Value<'c>) -> Value<'c> {
        let value = self.load(Ty::I64, pointer, 8);
        ok(value.raw.as_instruction_value().expect("load").set_atomic_ordering(AtomicOrdering::Monotonic));
        value
    }
    /// Store of an i64 that other threads read or change. Orders no other access.
    pub fn store_shared(&self, value: Value<'c>, pointer: Value<'c>) {
        let store = ok(self.builder.build_store(pointer.raw.into_pointer_value(), value.raw));
        ok(store.set_alignment(8));
        ok(store.set_atomic_ordering(AtomicOrdering::Monotonic));
    }
    /// Adds to an i64 that other threads add to as well, and returns what it was. Orders no other access.
    pub fn fetch_add(&self, pointer: Value<'c>, value: Value<'c>) -> Value<'c> {
        let (at, value) = (pointer.raw.into_pointer_value(), value.raw.into_int_value());
        let old = ok(self.builder.build_atomicrmw(AtomicRMWBinOp::Add, at, value, AtomicOrdering::Monotonic));
        self.value(old.into(), Ty::I64)
    }
    /// Hint to read soon. `locality` 3: L1, 2: L2, 1: L3, 0: streaming.
    pub fn prefetch(&self, pointer: Value<'c>, locality: u32) {
        let args = [pointer, self.i32(0), self.i32(locality as i32), self.i32(1)];
        self.intrinsic_void("llvm.prefetch.p0", &args);
    }
}
