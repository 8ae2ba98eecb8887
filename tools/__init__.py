"""Tools of tests and benchmarks, which the wheel leaves out."""
