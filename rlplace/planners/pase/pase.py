"""PaSE on captured models: the best way to cut every layer over the first devices.

Problem: the sum of layer and edge costs over configurations of layers, without overlap or memory limit; among several answers
the step time of the cut step.

Paper: Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021 (arXiv 2407.04001). Exact dynamic
programming over an elimination order of small degree, in `rlplace.planners.pase.dp`; the layer graph of a captured step is that
of `rlplace.planners.pase.captured`.

Departures: the search runs for all devices and for powers of two below, with weight gradients at full price (the paper) and
hidden by the backward pass, since the paper's sum knows no overlap; every strategy is lowered and simulated, and the
fastest that fits is the plan. Where none fits, the bytes of copies get a price that rises until one does. Devices are the first
ones of the problem; all groups sit on device 0, from which the parts of an op go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from rlplace.errors import InfeasibleError, InputError
from rlplace.plan import PlacementPlan, make_plan
from rlplace.planners.common.evaluate import Deadline, Evaluator, Execution
from rlplace.planners.common.shortage import raise_infeasible
from rlplace.planners.pase.captured import layer_graph, machine_of, sharding_of, shards_of
from rlplace.planners.pase.dp import least_cost_strategy
from rlplace.problem import Problem
from rlplace.schedule import LIST
from rlplace.simulator import Timeline, simulate

Shards = Mapping[str, Mapping[str, int]]

GRADIENT_PRICES = (1.0, 0.5, 0.0)
"""Shares of the all-reduces of weight gradients that strategies are searched with."""

_MEMORY_PRICES = (1e-12, 1e-11, 1e-10, 1e-9)


def pase(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    gradient_prices: tuple[float, ...] = GRADIENT_PRICES,
    **execution: Any,
) -> PlacementPlan:
    """The fastest of the strategies that PaSE finds; see the module docstring.

    Args:
        problem: Priced at level "op" with sharding, no group fixed to a device.
        seed: Nothing is random.
        time_limit_s: No further strategy is searched once it has passed and one fits.
        gradient_prices: See `rlplace.planners.pase.captured.layer_graph`; ``(1.0,)`` is the paper's cost alone.
        **execution: As for all planners, but shards exclude micro-batches and schedules.

    Returns:
        A plan with `shards` (without, where one device is fastest), all groups on device 0. ``predicted.pase`` says what its
        strategy was searched with, and which numbers of devices were too many for the search (`skipped`, with the reason).

    Raises:
        InputError: The problem does not say how its ops can be cut, fixes groups, or an option does not apply.
        InfeasibleError: No strategy fits.
    """
    sharding_of(problem)
    if Execution(**execution) != Execution():
        raise InputError("pase: cut ops exclude micro-batches and schedules; leave microbatches and schedule out")
    most = problem.num_devices
    if (problem.group_device >= 0).any():
        raise InputError("pase: a problem with fixed groups cannot be cut; free the groups")
    deadline, evaluator = Deadline(time_limit_s), Evaluator(problem)
    tried: list[_Candidate] = []
    skipped: dict[str, str] = {}
    for searched, shards in _strategies(problem, most, gradient_prices, skipped):
        tried.append(_simulate(problem, shards, seed, evaluator, searched))
        deadline.secured |= tried[-1].line.feasible
        if deadline.passed():
            break
    for price in () if deadline.secured else _MEMORY_PRICES:
        try:
            shards = _search(problem, most, gradient_prices[0], price)
        except InputError as error:
            skipped[str(most)] = str(error)
            break
        searched = {"devices": most, "gradient_price": gradient_prices[0], "memory_price_s_per_byte": price}
        tried.append(_simulate(problem, shards, seed, evaluator, searched))
        if tried[-1].line.feasible or deadline.passed():
            break
    fitting = [candidate for candidate in tried if candidate.line.feasible]
    if not fitting:
        _refuse(problem, min(tried, key=lambda candidate: candidate.overflow).line)
    best = min(fitting, key=lambda candidate: candidate.line.step_time_s or 0.0)
    report = {**best.searched, **({"skipped": skipped} if skipped else {})}
    return best.plan.with_predicted(best.line.predicted(problem).told(pase=report))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A simulated strategy, what it was searched with, and the bytes that do not fit (inf where the step does not complete)."""

    searched: Mapping[str, Any]
    plan: PlacementPlan
    line: Timeline
    overflow: float


def _strategies(
    problem: Problem, most: int, prices: tuple[float, ...], skipped: dict[str, str]
) -> Iterator[tuple[dict[str, Any], Shards]]:
    """Different strategies and what they were searched with: all devices first, then powers of two below, one device last.

    Numbers of devices for which the search refuses the graph as too large are noted in `skipped`.
    """
    counts = [most, *(1 << power for power in range(most.bit_length() - 1, 0, -1) if 1 << power < most)]
    seen: list[Shards] = []
    for count in counts:
        for price in prices:
            try:
                shards = _search(problem, count, price)
            except InputError as error:
                skipped[str(count)] = str(error)
                break
            if shards not in seen:
                seen.append(shards)
                yield {"devices": count, "gradient_price": price}, shards
    if {} not in seen:
        yield {"devices": 1}, {}


def _search(problem: Problem, devices: int, gradient_price: float, memory_price: float = 0.0) -> Shards:
    graph = layer_graph(problem, devices, gradient_price=gradient_price, memory_price=memory_price)
    return shards_of(problem, least_cost_strategy(graph, devices, machine=machine_of(problem, devices)))


def _simulate(problem: Problem, shards: Shards, seed: int, evaluator: Evaluator, searched: Mapping[str, Any]) -> _Candidate:
    plan = make_plan(problem, np.zeros(problem.num_groups, dtype=np.int32), planner="pase", seed=seed, shards=shards or None)
    evaluator.count()
    line = simulate(problem, plan)
    reserved = np.array([device.reserved_bytes for device in problem.devices], dtype=np.float64)
    over = np.maximum(line.peak_memory_bytes - problem.memory_limit_bytes - reserved, 0.0)
    return _Candidate(searched, plan, line, float(over.sum()) if line.step_time_s is not None else float("inf"))


def _refuse(problem: Problem, line: Timeline) -> NoReturn:
    """Raises with the reason of the strategy that was closest to fitting."""
    if line.step_time_s is not None:
        raise InfeasibleError(
            f"pase found no strategy that fits ({line.violations[0]}); use more or larger devices, or a smaller batch"
        )
    raise_infeasible(problem, line, planner="pase", schedule=LIST)
