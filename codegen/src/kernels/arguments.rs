//! Arguments of generated functions, by name: one struct says what a function is given, what a call passes, and in which order.
//!
//! In: a struct of fields with types of the builder, or with other such structs. Out: the parameter list, and ways to define and call.

use crate::llvm::builder::{Fb, Function, ModuleBuilder, Ty, Value, Visibility};

/// Arguments of a function.
pub trait Arguments<'c>: Sized {
    /// Adds their types, in order.
    fn types_to(types: &mut Vec<Ty>);
    /// Takes them from the front of a list.
    fn take(args: &mut std::slice::Iter<'_, Value<'c>>) -> Self;
    /// Adds them, in order.
    fn values_to(&self, values: &mut Vec<Value<'c>>);

    /// Parameters of the function.
    fn types() -> Vec<Ty> {
        let mut types = vec![];
        Self::types_to(&mut types);
        types
    }
    /// What the function finds. Panics if these are not all of a list.
    fn of(args: &[Value<'c>]) -> Self {
        let mut args = args.iter();
        let all = Self::take(&mut args);
        assert!(args.next().is_none(), "more arguments than parameters");
        all
    }
    /// What a call passes.
    fn values(&self) -> Vec<Value<'c>> {
        let mut values = vec![];
        self.values_to(&mut values);
        values
    }
    /// A function of the module's own, which is never inlined.
    fn define(mb: &ModuleBuilder<'c>, name: &str, body: impl FnOnce(&Fb<'_, 'c>, Self)) -> Function<'c> {
        mb.define(name, &Self::types(), None, Visibility::InternalNoInline, |fb, args| body(fb, Self::of(args)))
    }
    /// Calls a function with them.
    fn call(&self, fb: &Fb<'_, 'c>, function: &Function<'c>) {
        fb.call(function, &self.values());
    }
    /// Calls the function at this address with them.
    fn call_at(&self, fb: &Fb<'_, 'c>, address: Value<'c>) {
        fb.call_at(address, &Self::types(), &self.values());
    }
}

impl<'c, A: Arguments<'c>, B: Arguments<'c>> Arguments<'c> for (A, B) {
    fn types_to(types: &mut Vec<Ty>) {
        A::types_to(types);
        B::types_to(types);
    }
    fn take(args: &mut std::slice::Iter<'_, Value<'c>>) -> Self {
        (A::take(args), B::take(args))
    }
    fn values_to(&self, values: &mut Vec<Value<'c>>) {
        self.0.values_to(values);
        self.1.values_to(values);
    }
}

/// Defines structs of [`Arguments`]: `struct Name { field: TY, others: [Other] }`, where `TY` is a constant of [`Ty`], whose field is a
/// value, and `Other` another such struct.
macro_rules! arguments {
    ($($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:tt,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy)]
            $vis struct $name<'c> {
                $($(#[$field_doc])* pub $field: arguments!(@field $ty),)*
            }

            impl<'c> $crate::kernels::arguments::Arguments<'c> for $name<'c> {
                fn types_to(types: &mut Vec<Ty>) {
                    $(arguments!(@type types $ty);)*
                }
                fn take(args: &mut std::slice::Iter<'_, Value<'c>>) -> Self {
                    $name { $($field: arguments!(@take args $ty),)* }
                }
                fn values_to(&self, values: &mut Vec<Value<'c>>) {
                    $(arguments!(@value values (self.$field) $ty);)*
                }
            }
        )*
    };
    (@field [$inner:ident]) => { $inner<'c> };
    (@field $ty:ident) => { Value<'c> };
    (@type $types:ident [$inner:ident]) => { $inner::types_to($types) };
    (@type $types:ident $ty:ident) => { $types.push(Ty::$ty) };
    (@take $args:ident [$inner:ident]) => { $inner::take($args) };
    (@take $args:ident $ty:ident) => { *$args.next().expect("as many arguments as parameters") };
    (@value $values:ident $field:tt [$inner:ident]) => { $field.values_to($values) };
    (@value $values:ident $field:tt $ty:ident) => { $values.push($field) };
}
pub(super) use arguments;
