//! Kernel generators: one file per kind of kernel, all written with the vector builder.
