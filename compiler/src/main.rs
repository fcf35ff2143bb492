//! driver
fn main() {}
