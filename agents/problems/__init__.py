"""Problem sets: an endless training stream, fixed validation and test splits, people's own files (docs/agent/problems.md)."""

from rlplace.agents.problems.earlier import (
    CLUSTERS,
    TEST_CLUSTERS,
    TEST_MODELS,
    TRAIN_MODELS,
    capture_problems,
    held_out_problems,
    load_problems,
    training_problems,
    with_memory,
)
from rlplace.agents.problems.files import load_cases, save_cases
from rlplace.agents.problems.sources import CaseSource, cases_of, default_set
from rlplace.agents.problems.splits import closing_cases, test_cases, validation_cases
from rlplace.agents.problems.training import training_case, training_cases

__all__ = [
    "CLUSTERS",
    "CaseSource",
    "TEST_CLUSTERS",
    "TEST_MODELS",
    "TRAIN_MODELS",
    "capture_problems",
    "cases_of",
    "closing_cases",
    "default_set",
    "held_out_problems",
    "load_cases",
    "load_problems",
    "save_cases",
    "test_cases",
    "training_case",
    "training_cases",
    "training_problems",
    "validation_cases",
    "with_memory",
]
