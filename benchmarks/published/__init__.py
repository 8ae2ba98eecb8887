"""Training steps that others published with their whole strategy, as `benchmarks/truth.py` prices them."""
