"""What tests and benchmarks use and users do not get: the wheel leaves it out."""
