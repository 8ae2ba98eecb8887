"""Environments on the splits, by id: ``rlplace/Placement-train-v0``, ``-val-v0``, ``-test-v0`` and ``-branchy-v0``, and so on.

Problems and floors are made on first use, which takes minutes, and kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from typing import Any

import numpy as np

from rlplace.agents.problems.cases import is_branchy, made_by, set_folder
from rlplace.agents.problems.questions import strategy_questions
from rlplace.agents.problems.splits import split_cases
from rlplace.envs.base import PlacerEnv
from rlplace.envs.instance import PlacementInstance, make_instance
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv
from rlplace.envs.strategy import StrategyEnv
from rlplace.envs.vector import PlacementVectorEnv, PlacerVectorEnv, RefinementVectorEnv
from rlplace.errors import InputError, unknown_name
from rlplace.files import read_json, write_json

_CASES = {"train": "train", "val": "validation", "test": "test"}
SPLITS = (*_CASES, "branchy")
"""Splits by the name in an id; *branchy* is the part of *test* whose graphs offer parallel work."""

_KINDS: dict[str, tuple[type[PlacerEnv], type[PlacerVectorEnv]]] = {
    "Placement": (PlacementEnv, PlacementVectorEnv),
    "Refinement": (RefinementEnv, RefinementVectorEnv),
}

FORMAT, VERSION = "rlplace.floors", 1


@cache
def instances_of(split: str) -> tuple[PlacementInstance, ...]:
    """Returns the instances of a split, with the plan of `best` as floor.

    Args:
        split: One of `SPLITS`.

    Raises:
        InputError: There is no such split.
        MissingError: Captures need the transformers extra.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if split == "branchy":
        return tuple(instance for instance in instances_of("test") if is_branchy(instance.problem))
    cases = split_cases(_CASES[split], progress=lambda line: print(f"rlplace: {line}", file=sys.stderr))
    folder, kept = set_folder("floors"), {}
    path = None if folder is None else folder / f"{split}.json"
    if path is not None:
        with contextlib.suppress(InputError):
            kept = read_json(path, FORMAT, VERSION)
    if kept.get("made_by") != made_by():
        print(f"rlplace: planning {len(cases)} floors of {split} (minutes), kept in {path or 'no file'}", file=sys.stderr)
        floors = {case.problem.fingerprint: make_instance(case.problem).floor for case in cases}
        kept = {"made_by": made_by(), "floors": {key: None if plan is None else plan.tolist() for key, plan in floors.items()}}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"format": FORMAT, "version": VERSION, **kept})
    plans = [kept["floors"][case.problem.fingerprint] for case in cases]
    return tuple(
        make_instance(case.problem, floor=None if plan is None else np.array(plan, dtype=np.int32), compute_floor=False)
        for case, plan in zip(cases, plans, strict=True)
    )


def single(kind: str, split: str, **options: Any) -> PlacerEnv | StrategyEnv:
    """Returns an environment on a split: `kind` is ``"Placement"``, ``"Refinement"`` or ``"Strategy"``."""
    if kind == "Strategy":
        return StrategyEnv(**{"problems": strategy_questions(split), **options})
    return _KINDS[kind][0](**{"problems": instances_of(split), **options})


def vector(num_envs: int, kind: str, split: str, **options: Any) -> PlacerVectorEnv:
    """Returns the same as a vector environment."""
    return _KINDS[kind][1](num_envs, **{"problems": instances_of(split), **options})
