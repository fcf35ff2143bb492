//! What a matmul may ask for.

use super::*;

/// What the planner must not ask for otherwise.
pub(super) fn check(isa: &Isa, program: &Program, name: &str, kernel: &Matmul) -> Result<(), Error> {
    let mut problems = Product::new(program, kernel).problems(isa, name);
    let needed = private_bytes(isa, program, kernel);
    if program.private_bytes < needed {
        problems.push(format!("{name}: needs {needed} bytes of private scratch, has {}", program.private_bytes));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
}
