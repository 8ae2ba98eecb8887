"""Lifetimes of the memory of a simulated step: the executor's memory rule as a list of allocations and frees.

The simulators keep a running sum per device. The allocator, and the table of a peak's parts, need the single allocations
in the order in which they happen. `lifetimes` runs the reference simulator and notes them, so that the running sum over its
list has the simulator's peak by construction.

`holdings` lists what a device keeps between steps: weights, gradients and optimizer state. A problem knows them as sums per
group. With the captured graph at hand every parameter is an allocation of its own, as in
torch, and a gradient is known to appear with the backward op that makes it. Without the graph each part of a group is one
allocation, and its gradients appear with its first backward op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.opgraph import BUFFER, GRADIENT, INPUT, PARAMETER, OpGraph
from rlplace.plan import PlacementPlan
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, Problem
from rlplace.simulator.reference import STUCK, ReferenceRun
from rlplace.simulator.timeline import placement_violations

ACTIVATION, BACKWARD_VALUE, TEMPORARY, RECEIVED = range(4)
"""Kinds of allocations: the output of a forward op, of a backward or update op, an op's temporary, a copy from elsewhere."""


@dataclass(frozen=True, eq=False)
class StepAllocations:
    """Allocations of one step beside the resident bytes, none of them empty. Axes: E events in order, A allocations, N ops.

    Attributes:
        item: int64 [E], the allocation that an event starts or ends; each starts and ends once.
        starts: bool [E], true where it starts.
        time_s: float64 [E], time of the event.
        device: int32 [A].
        bytes: int64 [A].
        kind: int8 [A], one of `ACTIVATION`, `BACKWARD_VALUE`, `TEMPORARY`, `RECEIVED`.
        op: int64 [A], the op that makes it; -1 for a received copy.
        op_start: int64 [N], per op the number of events before it starts.
        peak_memory_bytes: int64 [D], of the simulation, with resident and reserved bytes.
    """

    item: NDArray[np.int64]
    starts: NDArray[np.bool_]
    time_s: NDArray[np.float64]
    device: NDArray[np.int32]
    bytes: NDArray[np.int64]
    kind: NDArray[np.int8]
    op: NDArray[np.int64]
    op_start: NDArray[np.int64]
    peak_memory_bytes: NDArray[np.int64]

    def at_peak(self, device: int) -> NDArray[np.int64]:
        """Returns the allocations that are alive when a device first holds the most, as numbers."""
        live = self.live_bytes(device)
        until = int(live.argmax()) + 1 if len(live) and live.max() > 0 else 0
        alive = np.bincount(self.item[:until], np.where(self.starts[:until], 1, -1), len(self.bytes)) > 0
        return np.flatnonzero(alive & (self.device == device))

    def live_bytes(self, device: int) -> NDArray[np.int64]:
        """Returns int64 [E], bytes on a device after every event."""
        here = self.device[self.item] == device
        change = np.where(self.starts, 1, -1) * self.bytes[self.item]
        return np.cumsum(np.where(here, change, 0))


def lifetimes(problem: Problem, plan: PlacementPlan | Sequence[int] | NDArray[Any]) -> StepAllocations:
    """Lists the allocations of one step.

    Args:
        problem: The priced problem.
        plan: A plan for `problem`, or a device number per group, int [G].

    Raises:
        InputError: The step does not complete.
    """
    devices = np.asarray(plan.device_of_group if isinstance(plan, PlacementPlan) else plan, dtype=np.int32)
    priority, order = (plan.priority, plan.order) if isinstance(plan, PlacementPlan) else (None, None)
    reasons = placement_violations(problem, devices)
    if reasons:
        raise InputError("memory: the step does not complete: " + "; ".join(reasons))
    run = _AllocationRun(problem, devices, priority, order)
    run.run()
    if run.done < problem.num_ops:
        raise InputError(f"memory: the step does not complete: {STUCK}")
    events = np.array(run.noted, dtype=[("item", np.int64), ("starts", bool), ("time_s", np.float64)])
    made = np.array(run.allocations, dtype=[("device", np.int32), ("bytes", np.int64), ("kind", np.int8), ("op", np.int64)])
    columns = {name: np.ascontiguousarray(rows[name]) for rows in (events, made) for name in rows.dtype.fields or ()}
    return StepAllocations(**columns, op_start=np.array(run.op_start), peak_memory_bytes=np.array(run.peak, dtype=np.int64))


class _AllocationRun(ReferenceRun):
    """The reference simulator, with a record of every allocation and free."""

    def __init__(self, problem: Problem, *rest: Any) -> None:
        super().__init__(problem, *rest)
        self.made_as = np.where(problem.op_phase == FORWARD, ACTIVATION, BACKWARD_VALUE).tolist()
        self.copies: dict[tuple[int, int], int] = {}  # (tensor, device) -> allocation
        self.scratch: dict[int, int] = {}  # op -> allocation
        self.noted: list[tuple[int, bool, float]] = []  # allocation, whether it starts, and when
        self.allocations: list[tuple[int, int, int, int]] = []  # device, bytes, kind and op of each allocation
        self.op_start = [0] * problem.num_ops

    def occupy(self, op: int, time: float) -> None:
        self.op_start[op] = len(self.noted)
        device = self.device[op]
        for tensor in self.outputs[op]:
            if self.size[tensor]:
                self.copies[tensor, device] = self._begin(device, self.size[tensor], self.made_as[op], op)
        if self.temporary[op]:
            self.scratch[op] = self._begin(device, self.temporary[op], TEMPORARY, op)
        super().occupy(op, time)

    def finish_op(self, op: int) -> None:
        if op in self.scratch:
            self._note(self.scratch.pop(op), False)
        super().finish_op(op)

    def start_transfer(self, tensor: int, source: int, destination: int) -> None:
        if self.size[tensor]:
            self.copies[tensor, destination] = self._begin(destination, self.size[tensor], RECEIVED, -1)
        super().start_transfer(tensor, source, destination)

    def release(self, tensor: int, device: int) -> None:
        if (tensor, device) in self.copies:
            self._note(self.copies.pop((tensor, device)), False)
        super().release(tensor, device)

    def _begin(self, device: int, size: int, kind: int, op: int) -> int:
        self.allocations.append((device, size, kind, op))
        self._note(len(self.allocations) - 1, True)
        return len(self.allocations) - 1

    def _note(self, number: int, starts: bool) -> None:
        self.noted.append((number, starts, self.now))


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
    """Returns the allocations behind a problem's resident bytes; per group and part they add up to those of the problem.

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
    """Returns items that add up to `whole`: scaled down, or with one more for the rest."""
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
