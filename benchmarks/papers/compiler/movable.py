"""Which groups scheduling assistants may move: those whose move to some other device costs next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.compiler.assist import simulate_assisted
from rlplace.placement.common.groupgraph import finite_links
from rlplace.placement.published.compiler.nets import problem_nets
from rlplace.problem import Problem
from rlplace.simulator import simulate

DELTA = 0.01
"""Cost of a move, in shares of the step time, below which a group is movable."""


def movable(
    problem: Problem,
    device_of_group: Sequence[int] | NDArray[Any],
    *,
    delta: float = DELTA,
    move_weights: bool = False,
    step_time_s: float | None = None,
) -> NDArray[np.bool_]:
    """Tags the groups that assistants may move.

    Args:
        problem: The priced graph.
        device_of_group: int [G].
        delta: Share of the step time that the cheapest move of a group may add in transfers.
        move_weights: Whether groups with parameters may move; weights and gradients then count as transfers.
        step_time_s: Step time of the plan; simulated by default.

    Returns:
        bool [G].
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    if step_time_s is None:
        step_time_s = simulate(problem, devices).step_time_s
    if step_time_s is None or problem.num_devices == 1:
        return np.zeros(problem.num_groups, dtype=bool)
    cost = move_costs(problem, devices)
    if move_weights:
        weights = np.where(problem.weight_bytes >= 0, problem.weight_bytes, problem.resident_bytes)
        gradients = np.where(problem.gradient_bytes >= 0, problem.gradient_bytes, problem.resident_bytes)
        latency, inverse = finite_links(problem)
        both = (latency + latency.T)[devices] + weights[:, None] * inverse[devices] + gradients[:, None] * inverse.T[devices]
        cost = cost + np.where((weights > 0)[:, None], both, 0.0)
        may = np.ones(problem.num_groups, dtype=bool)
    else:
        may = problem.resident_bytes == 0
    cost[np.arange(problem.num_groups), devices] = np.inf
    may = may & (problem.group_device < 0)
    return may & (cost.min(axis=1) < delta * step_time_s)


@dataclass(frozen=True, eq=False)
class Assistance:
    """The settings of assistants by the compiler; `options` are arguments of `simulate_assisted`.

    Attributes:
        movable: bool [G].
        move_weights: Whether groups with parameters are among them.
        only_late: Assistants take only what is late; False where the rehearsal was not slower for it.
        rehearsed_s: Step time of the assisted step at planned times.
    """

    movable: NDArray[np.bool_]
    move_weights: bool
    only_late: bool
    rehearsed_s: float | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `simulate_assisted`."""
        return {"movable": self.movable, "move_weights": self.move_weights, "only_late": self.only_late}


def prepare_assistants(
    problem: Problem, device_of_group: Sequence[int] | NDArray[Any], *, delta: float = DELTA, move_weights: bool = True
) -> Assistance:
    """Tags movable groups and rehearses the assisted step at planned times.

    Assistants may take whatever they find worth it if that does not slow the rehearsal down; otherwise only what is late, which
    at planned times is nothing. Either way assistants never slow a step that goes as planned.

    Args:
        problem: The priced graph.
        device_of_group: int [G].
        delta: See `movable`.
        move_weights: See `movable`.
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    planned = simulate(problem, devices)
    tags = movable(problem, devices, delta=delta, move_weights=move_weights, step_time_s=planned.step_time_s)
    line = simulate_assisted(problem, devices, movable=tags, move_weights=move_weights, only_late=False).timeline
    eager = (
        line.step_time_s is not None
        and planned.step_time_s is not None
        and line.step_time_s <= planned.step_time_s
        and (line.feasible or not planned.feasible)
    )
    return Assistance(tags, move_weights, not eager, line.step_time_s if eager else planned.step_time_s)


def move_costs(problem: Problem, device_of_group: NDArray[np.int32]) -> NDArray[np.float64]:
    """Prices moves: float64 [G, D], seconds of transfers that moving a group alone to a device adds; inf where barred."""
    nets, (latency, inverse) = problem_nets(problem), finite_links(problem)
    shape = (len(nets.source), problem.num_devices)
    net, pin = np.repeat(np.arange(shape[0]), np.diff(nets.pin_ptr)), nets.pins
    readers = np.zeros(shape, dtype=np.int64)
    np.add.at(readers, (net, device_of_group[pin]), 1)
    seconds = nets.tensors[:, None, None] * latency + nets.size_bytes[:, None, None] * inverse + nets.fixed_s[:, None, None]
    seconds[:, np.arange(shape[1]), np.arange(shape[1])] = 0.0
    added = np.zeros((problem.num_groups, shape[1]))
    sent = (seconds * (readers > 0)[:, None, :]).sum(axis=2)  # what a net costs from each device
    np.add.at(added, nets.source, sent - sent[np.arange(shape[0]), device_of_group[nets.source]][:, None])
    sender, reader = device_of_group[nets.source[net]], device_of_group[pin]
    np.add.at(added, pin, seconds[net, sender] * (readers[net] == 0))
    np.add.at(added, pin, -(seconds[net, sender, reader] * (readers[net, reader] == 1))[:, None])
    added[np.arange(problem.num_groups), device_of_group] = 0.0
    return np.where(problem.group_allowed, added, np.inf)
