"""Compiler-driven partition: run-time scheduling assistants, simulated.

Assistants decide while a step runs, so that no plan can hold what they do, and no engine runs them: they stand beside the
planner `compiler`, which never reads them.
"""
