//! What becomes of a matmul's sums: the expressions of its epilogue, by vectors of columns, and the prefetches of what they read.
//!
//! In: the expressions and stores of a [`Matmul`]. Out: a function for a tile of sums, and one that asks for its other inputs beforehand.

use super::*;

impl<'c> Generator<'_, 'c> {
    /// The function with [`AheadArgs`]: asks for what the epilogue reads of these rows and the columns of a panel: rows lie too far apart
    /// for prefetchers. None: it reads nothing by row and column.
    pub(super) fn ahead(&self) -> Option<Function<'c>> {
        let kernel = self.schedule.kernel;
        let values: Vec<_> = kernel.stores.iter().map(|s| s.value).collect();
        let loads = loads_by_row_and_col(&kernel.exprs, &values, (kernel.row, kernel.col));
        if loads.is_empty() {
            return None;
        }
        Some(AheadArgs::define(self.mb, &format!("{}.ahead", self.name), |fb, AheadArgs { call, row, rows, column }| {
            let scope = Call::new(fb, self.schedule.program, call).scope(&kernel.operands, &kernel.exprs);
            fb.for_(row, fb.add(row, rows), 1, |row| {
                let mut scope = scope.clone();
                scope.set(kernel.row, row);
                for &(operand, index) in &loads {
                    let line = LINE_WORDS * 4 / kernel.operands[operand.index()].dtype.size() as u32;
                    for c in (0..kernel.panels.nr).step_by(line as usize) {
                        let first = fb.add_int(column, c.into());
                        let point = Point { var: Some(kernel.col), first, divisor: 1, lanes: 1, active: 1, acc: vec![], score: None };
                        fb.prefetch(Eval::new(fb, &scope, point).address(operand, index), L2);
                    }
                }
            });
        }))
    }

    /// The function with [`EpilogueArgs`].
    pub(super) fn epilogue(&self) -> Function<'c> {
        EpilogueArgs::define(self.mb, &format!("{}.epilogue", self.name), |fb, args| {
            let EpilogueArgs { tile, row, rows, column, columns, .. } = args;
            let kernel = self.schedule.kernel;
            let call = Call::new(fb, self.schedule.program, args.call);
            let scope = call.scope(&kernel.operands, &kernel.exprs);
            let lanes = fb.lanes();
            // Scales of whole columns lie behind the codes of each panel.
            let panels = &kernel.panels;
            let scales = matches!(panels.coding, Coding::Int8 { .. })
                .then(|| fb.offset_const(call.base(&Place::Weight(kernel.weight)), panels.scales_at()));
            let scale = |c: Value<'c>, way: u32| {
                let scales = scales?;
                let nr = fb.int(panels.nr.into());
                let column = fb.add(column, c);
                let panel = fb.add_int(fb.mul_int(fb.div(column, nr), panels.ways.into()), way.into());
                let at = fb.offset(scales, fb.mul_int(panel, panels.panel_bytes(self.schedule.product.weight) as i64));
                Some(fb.load(Ty::vec(Elem::F32, lanes), fb.index(at, fb.rem(column, nr), 4), (lanes * 4).min(64)))
            };
            let roots: Vec<_> = kernel.stores.iter().flat_map(|s| [s.index, s.value]).collect();
            fb.for_(fb.int(0), rows, 1, |r| {
                let mut scope = scope.clone();
                scope.set(kernel.row, fb.add(row, r));
                let at = |c: Value<'c>, acc: Vec<Value<'c>>| Point {
                    var: Some(kernel.col),
                    first: fb.add(column, c),
                    divisor: lanes.into(),
                    lanes,
                    active: lanes,
                    acc,
                    score: None,
                };
                let zero = fb.zero(Ty::vec(Elem::F32, lanes));
                let outside = Eval::new(fb, &scope, at(fb.int(0), vec![zero; kernel.panels.ways as usize]));
                outside.hoist(&roots);
                fb.for_(fb.int(0), columns, lanes.into(), |c| {
                    let acc = (0..kernel.panels.ways)
                        .map(|way| {
                            let r = fb.add(r, fb.mul_int(rows, way.into()));
                            let at = fb.index(tile, fb.add(fb.mul(r, columns), c), 4);
                            let acc = fb.load(Ty::vec(Elem::F32, lanes), at, lanes * 4);
                            scale(c, way).map_or(acc, |scale| fb.mul(acc, scale))
                        })
                        .collect();
                    let eval = outside.at(at(c, acc));
                    eval.store(&kernel.stores);
                });
            });
        })
    }
}
