"""Biased random-key genetic algorithm from the floor.

Problem: step time of the executor itself, memory included, as in `annealing`. A chromosome is a table of random keys: for
every group an affinity to each device and a priority. A list scheduler turns it into an assignment
(`rlplace.planners.brkga.kernels`): ready ops go by upward rank times priority, and a group goes where it finishes earliest,
where a low affinity counts as a delay and a very low one bars the device. The assignment is simulated. Each generation keeps
the elite, adds mutants (new random keys), and fills up with children that take every key from an elite parent with probability
`rho`, else from another one.

Papers: Goncalves, Resende, "Biased random-key genetic algorithms for combinatorial optimization", Journal of Heuristics 17,
2011; Paliwal et al., "Reinforced genetic algorithm learning for optimizing computation graphs" (REGAL), ICLR 2020, use it for
device placement with affinities and priorities as keys.

Departures: the first generation holds the plans of the floor, encoded as keys, and random ones, so that the answer is never
worse than the floor. Priorities steer the decoder and are not part of the plan (docs/planners/brkga.md says what they are
worth); REGAL's keys for transfers are left out, as the executor queues transfers by itself. Assignments that were simulated
before are not simulated again, and of chromosomes with equal assignments only one can be elite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show, whole_number
from rlplace.planners.brkga import kernels as brkgakernels
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.oparrays import op_arrays, upward_rank
from rlplace.planners.common.search import CALLS, Search
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem

BARRED = 0.1
"""Affinities below this bar a device."""

MAX_POPULATION = 64
"""Chromosomes of a generation where the budget of calls allows it."""

_CHUNK = 16
"""Chromosomes that are decoded and simulated between two looks at the clock."""

_IDLE = 30
"""Generations without a new assignment after which a search ends: there is nothing left to find."""


@dataclass(frozen=True)
class BrkgaSettings:
    """Parameters of the algorithm, tuned on generated problems; see docs/planners/brkga.md.

    Attributes:
        population: Chromosomes of a generation; None: a sixteenth of the calls, 16 to `MAX_POPULATION`.
        elite: Share of a generation that is kept for the next.
        mutants: Share of a generation that is new and random.
        rho: Probability that a child has a key of its elite parent.
        bias: Delay of an affinity of 0, in mean op times.
    """

    population: int | None = None
    elite: float = 0.2
    mutants: float = 0.05
    rho: float = 0.9
    bias: float = 4.0

    def __post_init__(self) -> None:
        if self.population is not None:
            whole_number(self.population, "brkga: population", 4)
        if not (0.0 < self.elite < 1.0 and 0.0 <= self.mutants < 1.0 and self.elite + self.mutants < 1.0):
            shares = f"{show(self.elite)} and {show(self.mutants)}"
            raise InputError(f"brkga: elite must be above 0, mutants at least 0, both together below 1, found {shares}")
        if not 0.5 <= self.rho <= 1.0:
            raise InputError(f"brkga: rho must be in 0.5..1, found {show(self.rho)}")
        if not 0.0 <= self.bias < float("inf"):
            raise InputError(f"brkga: bias must not be negative, found {show(self.bias)}")


SETTINGS = BrkgaSettings


@cache
def warm_up() -> None:
    """Compiles the decoder, or loads it from the cache, so that time limits do not pay for it."""
    problem = random_problem(0, 6, 3)
    Decoder(problem, 1.0)(np.random.default_rng(0).random((1, 6, 4)))


def spend(search: Search, seed: int, settings: BrkgaSettings) -> None:
    """Spends the search's budget; `seed` is the seed of the keys."""
    problem, rng = search.evaluator.problem, np.random.default_rng(seed)
    decoder = Decoder(problem, settings.bias)
    known = {answer.devices.tobytes(): answer.score.descent_s for answer in search.starts}
    size = settings.population or min(MAX_POPULATION, max(16, (CALLS if search.calls is None else search.calls) // 16))
    shape = (problem.num_groups, problem.num_devices + 1)
    num_elite, num_mutants = max(1, round(settings.elite * size)), round(settings.mutants * size)
    known_keys = np.stack([encode(answer.devices, problem.num_devices) for answer in search.starts[:size]])
    keys = mix(known_keys[rng.integers(len(known_keys), size=size)], rng.random((size, *shape)), settings.rho, rng)
    keys[: len(known_keys)] = known_keys
    value, plans = np.full(size, np.inf), np.zeros((size, problem.num_groups), dtype=np.int32)
    fresh, idle = 0, 0
    while idle < _IDLE:
        before = len(known)
        for first in range(fresh, size, _CHUNK):
            part = slice(first, min(size, first + _CHUNK))
            plans[part] = decoder(keys[part])
            if not _evaluate(search, known, plans[part], value[part]):
                return
        idle = idle + 1 if len(known) == before else 0
        order = _ranking(value, plans)
        elite, rest = order[:num_elite], order[num_elite:]
        children = size - num_elite - num_mutants
        first_parent, second_parent = rng.choice(elite, children), rng.choice(rest, children)
        young = mix(keys[first_parent], keys[second_parent], settings.rho, rng)
        keys = np.concatenate([keys[elite], young, rng.random((num_mutants, *shape))])
        value[:num_elite], plans[:num_elite] = value[elite], plans[elite]
        fresh = num_elite


def mix(elite: NDArray[np.float64], other: NDArray[np.float64], rho: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Parameterized uniform crossover: every key of the elite parent with probability `rho`."""
    return np.where(rng.random(elite.shape) < rho, elite, other)


def _evaluate(search: Search, known: dict[bytes, float], plans: NDArray[np.int32], value: NDArray[np.float64]) -> bool:
    """Fills `value` [K] with the objective of the plans [K, G], simulating new ones; False when the budget is spent."""
    if search.progress() >= 1.0:
        return False
    new: dict[bytes, int] = {}
    for row, plan in enumerate(plans):
        text = plan.tobytes()
        if text not in known:
            new.setdefault(text, row)
    left = len(new) if search.calls is None else search.calls - search.used()
    chosen = dict(list(new.items())[:left])
    if chosen:
        scores = search.evaluate_many(plans[list(chosen.values())])
        known.update((text, score.descent_s) for text, score in zip(chosen, scores, strict=True))
    if len(chosen) < len(new):
        return False
    value[:] = [known[plan.tobytes()] for plan in plans]
    return True


def _ranking(value: NDArray[np.float64], plans: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows from best to worst; of equal plans all but the first come last."""
    seen: set[bytes] = set()
    ranked: list[int] = []
    again: list[int] = []
    for row in np.argsort(value, kind="stable").tolist():
        text = plans[row].tobytes()
        (again if text in seen else ranked).append(row)
        seen.add(text)
    return np.array(ranked + again)


def encode(devices: Assignment, num_devices: int) -> NDArray[np.float64]:
    """float64 [G, D + 1], keys that decode to an assignment: its device alone is not barred, priorities are neutral."""
    keys = np.zeros((len(devices), num_devices + 1))
    keys[np.arange(len(devices)), devices] = 1.0
    keys[:, num_devices] = 0.5
    return keys


class Decoder:
    """Turns keys float64 [P, G, D + 1] into assignments int32 [P, G]; holds the working memory."""

    def __init__(self, problem: Problem, bias: float) -> None:
        arrays = op_arrays(problem)
        ops, devices = problem.num_ops, problem.num_devices
        finite = np.isfinite(arrays.time_s)
        mean = float(arrays.time_s[finite].mean()) if finite.any() else 0.0
        self._groups = problem.num_groups
        self._rules = (BARRED, bias * mean, upward_rank(problem, communication=True), problem.memory_limit_bytes)
        self._work = (
            np.zeros(devices), np.zeros(ops), np.zeros((problem.num_tensors, devices)), np.zeros(arrays.num_channels),
            np.zeros(devices), np.zeros(ops, dtype=np.int64), np.zeros((1, ops)), np.zeros((1, ops), dtype=np.int64),
            np.zeros(1, dtype=np.int64),
        )  # fmt: skip
        self._arrays = (
            arrays.num_made_inputs, arrays.order, arrays.output_ptr, arrays.outputs, arrays.consumer_ptr, arrays.consumers,
            arrays.time_s, arrays.op_group, arrays.footprint, *arrays.links(),
        )  # fmt: skip

    def __call__(self, keys: NDArray[np.float64]) -> NDArray[np.int32]:
        result = np.empty((len(keys), self._groups), dtype=np.int32)
        brkgakernels.decode(np.ascontiguousarray(keys), *self._rules, result, *self._work, *self._arrays)
        return result
