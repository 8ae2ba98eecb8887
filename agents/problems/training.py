"""The problems that the agent is trained on: an endless stream, reproducible case by case, in bounded memory.

A case is drawn from its seed and its number alone, so that a run can resume anywhere and processes can share a stream. A
bounded number of captured models, new ones every `REFRESH` cases, is grouped, priced and executed anew for every case; the
other cases are synthetic graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator

from rlplace.agents.cases import Case, is_branchy
from rlplace.agents.problems.changes import limit_memory, vary_hardware
from rlplace.agents.problems.clusters import draw_cluster, draw_hosts, draw_size
from rlplace.agents.problems.graphs import FAMILIES, Recipe, priced, variant
from rlplace.errors import unknown_name
from rlplace.planners.common.evaluate import PLAIN, Execution
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.schedule import GPIPE, LIST, ONE_F_ONE_B

SYNTHETIC = "synthetic"
SHAPES = ("layered", "branchy", "chain")
"""Shapes of synthetic graphs that training sees."""
ALL_FAMILIES = (*FAMILIES, SYNTHETIC)
ZOO_FAMILIES = (*(name for name in FAMILIES if name.startswith("zoo:")), SYNTHETIC)
"""Families that need no further package."""

SYNTHETIC_SHARE = 0.4
GRAPHS = 24
REFRESH = 960
"""Cases that are drawn from one set of captured models."""
GROUPS = (16, 200)
BRANCHED_GROUPS = {"zoo:inception": (48, 200), "zoo:moe_toy": (32, 200)}
"""Range of groups of families whose branches would be merged in fewer."""
MICROBATCHES = (2, 3, 4, 6, 8, 12, 16)
MOST_TASKS = 6000
"""Executions of ops in one step; more micro-batches are not drawn for a problem that has more."""
LOOSE_SHARE = 0.3
TIGHTNESS = (1.0, 3.0)
"""Range of memory factors, log-uniform, of cases whose memory is limited; see `limit_memory`."""
UNLIKE_MEMORY_SHARE = 0.2
MEMORY_SHARES = (1.0, 1.0, 2.0, 4.0)
"""Relative memory of the devices in a fifth of these cases; else the cluster's."""


def training_case(
    seed: int,
    number: int,
    *,
    families: Sequence[str] = ALL_FAMILIES,
    cluster: str | None = None,
    graphs: int = GRAPHS,
    refresh: int = REFRESH,
) -> Case:
    """Case `number` of the stream with this seed; the same in every process.

    Args:
        seed: Seed of the stream.
        number: From 0.
        families: Some of `ALL_FAMILIES`.
        cluster: Text of the one cluster that captured models are priced for; None draws one a case.
        graphs: Captured models that are in use at a time.
        refresh: Cases after which other models take their place.
    """
    for name in families:
        if name not in ALL_FAMILIES:
            raise unknown_name("model family", name, ALL_FAMILIES)
    rng = np.random.default_rng([seed, number])
    models = tuple(name for name in ALL_FAMILIES if name in families and name != SYNTHETIC)
    synthetic = not models or (SYNTHETIC in families and rng.random() < SYNTHETIC_SHARE)
    if synthetic:
        family, problem = _synthetic(rng)
    else:
        slot = (number // refresh) * graphs + int(rng.integers(graphs))
        family, recipe = variant(models, seed, slot)
        problem = _priced(rng, recipe, cluster, BRANCHED_GROUPS.get(family, GROUPS))
    execution = draw_execution(rng, problem.num_ops)
    factor = None if rng.random() < LOOSE_SHARE else log_uniform(rng, *TIGHTNESS)
    shares = rng.choice(MEMORY_SHARES, problem.num_devices) if rng.random() < UNLIKE_MEMORY_SHARE else None
    problem = limit_memory(problem, execution, factor, shares=shares)
    name = f"train-{seed}-{number}"
    return Case(name, family, dataclasses.replace(problem, name=f"{name} {problem.name}"), execution, is_branchy(problem))


def training_cases(seed: int, *, start: int = 0, **options: object) -> Iterator[Case]:
    """The stream from case `start` on; it has no end. `options` are those of `training_case`."""
    for number in itertools.count(start):
        yield training_case(seed, number, **options)  # type: ignore[arg-type]


def draw_execution(rng: Generator, ops: int) -> Execution:
    """One micro-batch in half of the draws, else 2 to 16, mostly as 1f1b."""
    most = max(1, MOST_TASKS // max(1, ops))
    counts = [count for count in MICROBATCHES if count <= most]
    if rng.random() < 0.5 or not counts:
        return PLAIN
    return Execution(int(rng.choice(counts)), str(rng.choice([ONE_F_ONE_B, ONE_F_ONE_B, GPIPE, LIST])))


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """A number whose logarithm is uniform."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _priced(rng: Generator, recipe: Recipe, cluster: str | None, groups: tuple[int, int]) -> Problem:
    text = cluster or draw_cluster(rng)
    problem = priced(recipe, text, round(log_uniform(rng, *groups)), on=text)
    return problem if cluster else vary_hardware(problem, rng)


def _synthetic(rng: Generator) -> tuple[str, Problem]:
    shape, size = str(rng.choice(SHAPES)), draw_size(rng)
    problem = random_problem(
        int(rng.integers(2**31)),
        num_groups=round(log_uniform(rng, *GROUPS)),
        num_devices=size,
        shape=shape,
        width=int(rng.integers(2, 9)),
        training=bool(rng.random() < 0.9),
        unlike=bool(rng.random() < 0.35),
        comm_ratio=log_uniform(rng, 0.05, 2.0),
        hosts=draw_hosts(rng, size),
        shared_parameters=int(rng.integers(1, 5)) if rng.random() < 0.3 else 0,
        null_fraction=0.05 if rng.random() < 0.1 else 0.0,
    )
    return f"{SYNTHETIC}:{shape}", vary_hardware(problem, rng)
