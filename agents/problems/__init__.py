"""Problem sets: an endless training stream, fixed validation and test splits, people's own files (docs/agent/problems.md)."""

from rlplace.agents.problems.cases import ProblemCase, load_cases, save_cases
from rlplace.agents.problems.sources import CaseSource, cases_of, default_set
from rlplace.agents.problems.splits import closing_cases, split_cases
from rlplace.agents.problems.training import training_case

__all__ = [
    "CaseSource",
    "ProblemCase",
    "cases_of",
    "closing_cases",
    "default_set",
    "load_cases",
    "save_cases",
    "split_cases",
    "training_case",
]
