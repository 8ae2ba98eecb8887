"""Compiler-driven partition of a training step.

Paper: Tavarageri, Sridharan, Kaul, "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support",
arXiv 1906.08168, 2019. No implementation of it is public, and only its abstract was at hand. From the abstract: a compiler
models compute and communication costs of the training graph; heuristics cut the graph so that devices trade little and have
equal loads; hardware *scheduling assistants* are proposed that help the compiler to adjust the split at run time.

Everything else is a reconstruction, not the paper's:

* `nets`: cost of a cut; a tensor is paid once for each device that it is sent to, by latency and bandwidth of the real link.
* `seeds`: contiguous pieces of a topological order, each cut where least crosses near its aim (and streamed bands).
* `coarsen`, `fm`: vertices of one device are fused step by step, and on the way back single moves and swaps lower the cut while
  loads stay within 1 + eps of their fair shares and footprints within memory (gain buckets, locked vertices, best prefix).
* `compiler`: the planner; candidates differ in devices, imbalance and bands, and the simulator picks.

The assistants decide while a step runs: no plan holds what they do and no engine runs them, so they are no part of the package.
"""
