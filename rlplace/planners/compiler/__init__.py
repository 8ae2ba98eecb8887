"""Compiler-driven partition of the step with run-time scheduling assistants."""
