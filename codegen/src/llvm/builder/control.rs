//! Control flow: loops with carried values, conditions.

use super::{Cmp, Fb, Ty, Value, ok};
use inkwell::IntPredicate;
use inkwell::basic_block::BasicBlock;

impl<'c> Fb<'_, 'c> {
    /// `for i in (begin..end).step_by(step)` (i64, `step > 0`) with carried values: `body(i, carried)` returns the next ones (same
    /// types). The result is what the last iteration returned, or `carried` when there was none.
    pub fn loop_(
        &self,
        begin: Value<'c>,
        end: Value<'c>,
        step: i64,
        carried: &[Value<'c>],
        body: impl FnOnce(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        assert!(step > 0 && begin.ty == Ty::I64 && end.ty == Ty::I64, "loop bounds");
        let c = self.mb.context;
        let before = self.block();
        let head = c.append_basic_block(self.function, "loop");
        let exit = c.append_basic_block(self.function, "loop_end");
        let any = self.cmp(Cmp::Lt, begin, end);
        self.branch(any, head, exit);
        self.builder.position_at_end(head);
        let i_phi = ok(self.builder.build_phi(c.i64_type(), "i"));
        i_phi.add_incoming(&[(&begin.raw, before)]);
        let phis: Vec<_> = carried.iter().map(|v| ok(self.builder.build_phi(self.mb.basic_type(v.ty), ""))).collect();
        let inside: Vec<_> = phis.iter().zip(carried).map(|(p, v)| self.value(p.as_basic_value(), v.ty)).collect();
        let i = self.value(i_phi.as_basic_value(), Ty::I64);
        let next = body(i, &inside);
        assert_eq!(next.len(), carried.len(), "carried values");
        let latch = self.block();
        let step = c.i64_type().const_int(step as u64, false);
        let i_next = ok(self.builder.build_int_nsw_add(i.raw.into_int_value(), step, ""));
        let more = ok(self.builder.build_int_compare(IntPredicate::SLT, i_next, end.raw.into_int_value(), ""));
        ok(self.builder.build_conditional_branch(more, head, exit));
        i_phi.add_incoming(&[(&i_next, latch)]);
        self.builder.position_at_end(exit);
        let mut results = vec![];
        for ((phi, first), last) in phis.iter().zip(carried).zip(&next) {
            assert_eq!(first.ty, last.ty, "carried type");
            phi.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
            let out = ok(self.builder.build_phi(self.mb.basic_type(first.ty), ""));
            out.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
            results.push(self.value(out.as_basic_value(), first.ty));
        }
        results
    }

    /// [`Fb::loop_`] with `unroll` steps in an iteration, and a second loop for what is left. `unroll * step` is a power of two, `begin <=
    /// end`.
    pub fn loop_unrolled(
        &self,
        begin: Value<'c>,
        end: Value<'c>,
        step: i64,
        unroll: i64,
        carried: &[Value<'c>],
        body: impl Fn(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let long = unroll * step;
        assert!(long.count_ones() == 1, "steps of a loop");
        let whole = self.add(begin, self.and(self.sub(end, begin), self.int(-long)));
        let carried = self.loop_(begin, whole, long, carried, |i, carried| {
            (0..unroll).fold(carried.to_vec(), |carried, n| body(self.add_int(i, n * step), &carried))
        });
        self.loop_(whole, end, step, &carried, body)
    }
    /// [`Fb::loop_`] without carried values.
    pub fn for_(&self, begin: Value<'c>, end: Value<'c>, step: i64, body: impl FnOnce(Value<'c>)) {
        self.loop_(begin, end, step, &[], |i, _| {
            body(i);
            vec![]
        });
    }
    /// `do { carried = body(carried) } while more`, where `body` returns `more` first.
    pub fn repeat(&self, carried: &[Value<'c>], body: impl FnOnce(&[Value<'c>]) -> (Value<'c>, Vec<Value<'c>>)) {
        let before = self.block();
        let [head, exit] = ["repeat", "repeat_end"].map(|n| self.mb.context.append_basic_block(self.function, n));
        ok(self.builder.build_unconditional_branch(head));
        self.builder.position_at_end(head);
        let phis: Vec<_> = carried.iter().map(|v| ok(self.builder.build_phi(self.mb.basic_type(v.ty), ""))).collect();
        let inside: Vec<_> = phis.iter().zip(carried).map(|(p, v)| self.value(p.as_basic_value(), v.ty)).collect();
        let (more, next) = body(&inside);
        assert_eq!(next.len(), carried.len(), "carried values");
        let latch = self.block();
        self.branch(more, head, exit);
        for ((phi, first), last) in phis.iter().zip(carried).zip(&next) {
            phi.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
        }
        self.builder.position_at_end(exit);
    }
    fn branch(&self, condition: Value<'c>, then: BasicBlock<'c>, other: BasicBlock<'c>) {
        ok(self.builder.build_conditional_branch(condition.raw.into_int_value(), then, other));
    }
    /// `if condition { then() } else { other() }`; both sides return values of the same types, which are merged.
    pub fn if_else(
        &self,
        condition: Value<'c>,
        then: impl FnOnce() -> Vec<Value<'c>>,
        other: impl FnOnce() -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let c = self.mb.context;
        let [yes, no, join] = ["then", "else", "join"].map(|n| c.append_basic_block(self.function, n));
        self.branch(condition, yes, no);
        self.builder.position_at_end(yes);
        let a = then();
        let yes_end = self.block();
        ok(self.builder.build_unconditional_branch(join));
        self.builder.position_at_end(no);
        let b = other();
        let no_end = self.block();
        ok(self.builder.build_unconditional_branch(join));
        self.builder.position_at_end(join);
        assert_eq!(a.len(), b.len(), "results of if");
        let merge = |(a, b): (&Value<'c>, &Value<'c>)| {
            assert_eq!(a.ty, b.ty, "results of if");
            let phi = ok(self.builder.build_phi(self.mb.basic_type(a.ty), ""));
            phi.add_incoming(&[(&a.raw, yes_end), (&b.raw, no_end)]);
            self.value(phi.as_basic_value(), a.ty)
        };
        a.iter().zip(&b).map(merge).collect()
    }
    /// [`Fb::if_else`] without results.
    pub fn either(&self, condition: Value<'c>, then: impl FnOnce(), other: impl FnOnce()) {
        fn done<'c>(side: impl FnOnce()) -> Vec<Value<'c>> {
            side();
            vec![]
        }
        self.if_else(condition, || done(then), || done(other));
    }
    /// `if condition { then() }`.
    pub fn if_(&self, condition: Value<'c>, then: impl FnOnce()) {
        self.either(condition, then, || ());
    }
}
