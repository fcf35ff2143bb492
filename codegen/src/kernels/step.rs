//! The step function of a program.
