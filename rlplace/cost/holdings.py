"""Allocations that a device keeps between steps: weights, gradients and optimizer state.

A problem knows them as sums per group. With the captured graph at hand every parameter is an allocation of its own, as in
torch, and a gradient is known to appear with the backward op that makes it. Without the graph each part of a group is one
allocation, and its gradients appear with its first backward op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.errors import InputError
from rlplace.model.graph.opgraph import BUFFER, GRADIENT, INPUT, PARAMETER, OpGraph
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, Problem

WEIGHTS, GRADIENTS, OPTIMIZER = range(3)


@dataclass(frozen=True)
class Holding:
    """One allocation that outlives the step.

    Attributes:
        group: Group that holds it.
        part: `WEIGHTS`, `GRADIENTS` or `OPTIMIZER`.
        bytes: Size in bytes, above 0.
        makers: Ops of which the first one to run allocates it; only for gradients.
    """

    group: int
    part: int
    bytes: int
    makers: tuple[int, ...] = ()


def holdings(problem: Problem, graph: OpGraph | None = None) -> list[Holding]:
    """The allocations behind a problem's resident bytes; per group and part they add up to what the problem says.

    Args:
        problem: The problem, at op level where there is a `graph`.
        graph: The graph that it was priced from.

    Raises:
        InputError: The problem does not divide its resident bytes into parts, or is not the op level of `graph`.
    """
    parts = (problem.weight_bytes, problem.gradient_bytes, problem.optimizer_bytes)
    unknown = np.flatnonzero((np.minimum.reduce(parts) < 0) & (problem.resident_bytes > 0))
    if len(unknown):
        raise InputError(
            f"memory: group {problem.group_names[unknown[0]]!r} does not say what its resident bytes are; give weight_bytes, "
            "gradient_bytes and optimizer_bytes"
        )
    makers: list[list[int]] = [[] for _ in problem.group_names]
    for op in np.flatnonzero((problem.op_phase == BACKWARD) | (problem.op_phase == BACKWARD_WEIGHT)).tolist():
        makers[problem.op_group[op]].append(op)
    known = [] if graph is None else _from_graph(problem, graph)
    allocations: list[Holding] = []
    by_group: dict[tuple[int, int], list[Holding]] = {}
    for item in known:
        by_group.setdefault((item.group, item.part), []).append(item)
    for part, sizes in enumerate(parts):
        for group, size in enumerate(sizes.tolist()):
            if size > 0:
                own = tuple(makers[group]) if part == GRADIENTS else ()
                allocations += _fitted(by_group.get((group, part), []), Holding(group, part, size, own))
    return allocations


def _fitted(items: list[Holding], whole: Holding) -> list[Holding]:
    """Items that add up to `whole`: scaled down, or with one more for what they leave out."""
    total = sum(item.bytes for item in items)
    if total <= whole.bytes:
        rest = whole.bytes - total
        return items + ([Holding(whole.group, whole.part, rest, whole.makers)] if rest else [])
    ends = [0]
    for item in items:
        ends.append(ends[-1] + item.bytes)
    cuts = [end * whole.bytes // total for end in ends]
    return [
        Holding(item.group, item.part, stop - start, item.makers)
        for item, start, stop in zip(items, cuts, cuts[1:], strict=False)
        if stop > start
    ]


def _from_graph(problem: Problem, graph: OpGraph) -> list[Holding]:
    number = {name: op for op, name in enumerate(problem.op_names)}
    ops: list[int] = []
    for name in graph.op_names:
        if name not in number:
            raise InputError(f"memory: the problem has no op {name!r}; give the graph with its op-level problem only")
        ops.append(number[name])
    group_of = [int(problem.op_group[op]) for op in ops]
    home: dict[int, int] = {}
    makers: dict[int, list[int]] = {}
    inputs: list[Holding] = []
    for op, parameter in enumerate(graph.op_parameter.tolist()):
        if parameter >= 0:
            home[parameter] = group_of[op]
    for tensor, role in enumerate(graph.tensor_role.tolist()):
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]].tolist()
        maker = int(graph.tensor_producer[tensor])
        if role in (PARAMETER, BUFFER) and readers:
            home.setdefault(int(graph.tensor_parameter[tensor]), group_of[readers[0]])
        elif role == INPUT and readers and graph.tensor_bytes[tensor]:
            inputs.append(Holding(group_of[readers[0]], WEIGHTS, int(graph.tensor_bytes[tensor])))
        elif role == GRADIENT and maker >= 0:
            makers.setdefault(int(graph.tensor_parameter[tensor]), []).append(ops[maker])
    allocations = []
    for index, parameter in enumerate(graph.parameters):
        if index in home:
            sizes = (parameter.size_bytes, parameter.gradient_bytes, parameter.optimizer_bytes)
            for part, size in enumerate(sizes):
                if size:
                    own = tuple(makers.get(index, ())) if part == GRADIENTS else ()
                    allocations.append(Holding(home[index], part, size, own))
    return allocations + inputs
