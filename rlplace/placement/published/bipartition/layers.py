"""From a problem to a chain of layers, and from cuts back to devices.

The forward groups are layered in a topological order of the group graph. A group that only runs backward ops (in a split
problem the one called ``NAME.backward``) belongs to the layer of its forward group; where no group has that name, to the
last layer whose forward ops feed it, or to that of the backward ops beside it. Skip connections are charged at every cut that
they cross. Neighbouring layers are merged until `MAX_LAYERS` are left, the heaviest merged layer as light as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.placement.common.floor import map_parts
from rlplace.placement.common.groupgraph import finite_links, group_graph
from rlplace.placement.published.bipartition.solve import Chain, PassCuts, Workers
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Problem
from rlplace.problem.contract import crossing

MAX_LAYERS = 96
"""Layers that a chain keeps; longer ones are merged."""

SUFFIX = ".backward"
"""Ends the name of a backward group that `rlplace.cost.contract.split_backward` made."""


@dataclass(frozen=True, eq=False)
class Layers:
    """A problem seen as a chain on certain devices.

    Attributes:
        chain: The layers, with a column of times for every device.
        layer_of_group: int64 [G], layer of each group.
        follows_backward: bool [G], whether a group runs backward ops only and so follows the backward cuts.
        devices: The workers, in pipeline order.
    """

    chain: Chain
    layer_of_group: NDArray[np.int64]
    follows_backward: NDArray[np.bool_]
    devices: tuple[int, ...]

    def assign(self, problem: Problem, cuts: PassCuts) -> NDArray[np.int32]:
        """Returns int32 [G], the device of every group under the cuts; parts of unlike devices are swapped where that helps."""
        count = len(self.devices)
        forward = np.repeat(np.arange(count, dtype=np.int32), np.diff(cuts.forward))
        backward = np.repeat(np.arange(count, dtype=np.int32), np.diff(cuts.backward))
        part = np.where(self.follows_backward, backward[self.layer_of_group], forward[self.layer_of_group])
        return map_parts(problem, part.astype(np.int32), self.devices)


def is_split(problem: Problem) -> bool:
    """Returns whether no group holds forward ops together with others, so that backward passes can be placed apart."""
    forward = problem.op_phase == FORWARD
    return not np.intersect1d(problem.op_group[forward], problem.op_group[~forward]).size


def require_split(problem: Problem, planner: str) -> None:
    """Refuses a problem whose backward passes cannot be placed by themselves."""
    if not is_split(problem):
        raise InputError(
            f"{planner} places forward and backward passes apart: give it a split problem, "
            "rlplace.cost.contract.split_backward(problem)"
        )


def layer_orders(problem: Problem) -> list[NDArray[np.int32]]:
    """Returns the topological orders of the groups that chains are made of: one, or two where they differ."""
    graph = group_graph(problem)
    same = np.array_equal(graph.order, graph.depth_first_order)
    return [graph.order] if same else [graph.order, graph.depth_first_order]


def layer_numbers(problem: Problem, order: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the layer of every group, and whether it only runs ops that are not forward.

    Args:
        problem: The problem.
        order: int32 [G], a topological order of the groups.

    Returns:
        int64 [G] and bool [G].
    """
    forward = problem.op_phase == FORWARD
    has_forward = np.zeros(problem.num_groups, dtype=bool)
    has_forward[problem.op_group[forward]] = True
    if not has_forward.any():
        has_forward[:] = True
    layer = np.full(problem.num_groups, -1, dtype=np.int64)
    layer[order[has_forward[order]]] = np.arange(has_forward.sum())
    group_named = {name: group for group, name in enumerate(problem.group_names) if has_forward[group]}
    for group in np.flatnonzero(~has_forward).tolist():
        name = problem.group_names[group]
        if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in group_named:
            layer[group] = layer[group_named[name.removesuffix(SUFFIX)]]
    if (layer < 0).any():
        _attach(problem, layer)
    return layer, ~has_forward


def _attach(problem: Problem, layer: NDArray[np.int64]) -> None:
    """Gives groups without a layer that of the last that feeds them, else of the first one that they feed, else the last."""
    source, target = (problem.op_group[ops].astype(np.int64) for ops in problem.op_edges)
    before = layer.copy()
    np.maximum.at(before, target, layer[source])
    layer[:] = np.where(layer < 0, before, layer)
    while (layer < 0).any():
        unknown = layer < 0
        nearest = np.full(len(layer), np.iinfo(np.int64).max)
        for a, b in ((source, target), (target, source)):
            known = layer[a] >= 0
            np.minimum.at(nearest, b[known], layer[a][known])
        attached = unknown & (nearest < np.iinfo(np.int64).max)
        if not attached.any():
            layer[unknown] = max(int(layer.max()), 0)
            return
        layer[attached] = nearest[attached]


def make_layers(
    problem: Problem,
    order: NDArray[np.int32],
    devices: Sequence[int],
    *,
    max_layers: int = MAX_LAYERS,
) -> Layers:
    """Makes the layers of a problem on some of its devices.

    Args:
        problem: The problem; groups with forward and other ops in one follow the forward cuts as a whole.
        order: int32 [G], a topological order of the groups.
        devices: The workers, in pipeline order.
        max_layers: More layers than this are merged.
    """
    fine, follows = layer_numbers(problem, order)
    seconds = problem.time_s[:, list(devices)]
    # Where an op cannot run, a price that no cut pays when it can help it; the shared repair moves what is left.
    barred = ~np.isfinite(seconds) | ~problem.group_allowed[problem.op_group][:, list(devices)]
    seconds = np.where(barred, 0.0, seconds)
    seconds = np.where(barred, 10.0 * seconds.max(axis=1).sum() + 1e-6, seconds)
    weight_s = np.bincount(fine[problem.op_group], weights=seconds.min(axis=1), minlength=int(fine.max()) + 1)
    merged = _merge(weight_s.astype(np.float64), max_layers)
    layer = merged[fine]
    count = int(layer.max()) + 1
    forward_s, backward_s = np.zeros((2, count, len(devices)))
    of_op, forward = layer[problem.op_group], problem.op_phase == FORWARD
    np.add.at(forward_s, of_op[forward], seconds[forward])
    np.add.at(backward_s, of_op[~forward], seconds[~forward])
    activation, gradient = _crossing(problem, of_op, count)
    weight = np.where(problem.weight_bytes >= 0, problem.weight_bytes, problem.resident_bytes)
    chain = Chain(
        names=tuple(f"layer{i}" for i in range(count)),
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=activation,
        gradient_bytes=gradient,
        stash_bytes=_stash(problem, of_op, count),
        weight_bytes=np.bincount(layer, weights=weight, minlength=count).astype(np.float64),
        resident_bytes=np.bincount(layer, weights=problem.resident_bytes, minlength=count).astype(np.float64),
    )
    return Layers(chain, layer, follows, tuple(int(d) for d in devices))


def _merge(weight_s: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Returns int64 [layers], the merged layer of each: at most `most`, the heaviest as light as a bisection finds it."""
    if len(weight_s) <= most:
        return np.arange(len(weight_s))
    total = np.concatenate([[0.0], np.cumsum(weight_s)])

    def blocks(cap: float) -> list[int]:
        starts, at = [], 0
        while at < len(weight_s):
            starts.append(at)
            at = max(at + 1, int(np.searchsorted(total, total[at] + cap, side="right")) - 1)
        return starts

    low, high = 0.0, float(total[-1])
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if len(blocks(middle)) <= most else (middle, high)
    merged = np.zeros(len(weight_s), dtype=np.int64)
    merged[blocks(high)[1:]] = 1
    return np.cumsum(merged)


def _crossing(problem: Problem, of_op: NDArray[np.int64], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns float64 [L] each: bytes of forward and of backward tensors that cross the cut behind each layer."""
    tensor, reader, phase = problem.edge_tensor, problem.consumers, problem.op_phase
    producer = problem.tensor_producer[tensor]
    backward = (phase == BACKWARD) | (phase == BACKWARD_WEIGHT)
    rows = []
    for same in (phase == FORWARD, backward):
        kept = (producer >= 0) & same[reader] & same[np.maximum(producer, 0)]
        low = np.where(problem.tensor_producer >= 0, of_op[np.maximum(problem.tensor_producer, 0)], 0)
        high = low.copy()
        np.minimum.at(low, tensor[kept], of_op[reader[kept]])
        np.maximum.at(high, tensor[kept], of_op[reader[kept]])
        steps = np.zeros(count + 1)
        np.add.at(steps, low, problem.tensor_bytes)
        np.add.at(steps, high, -problem.tensor_bytes.astype(np.float64))
        rows.append(np.cumsum(steps)[:count])
    return rows[0], rows[1]


def _stash(problem: Problem, of_op: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Returns float64 [L], bytes of the forward pass that backward ops of a layer read; layers share the bytes of a tensor."""
    tensor, reader, phase = problem.edge_tensor, problem.consumers, problem.op_phase
    producer = problem.tensor_producer[tensor]
    read_later = (phase[reader] != FORWARD) & (phase[reader] != UPDATE)
    kept = (producer >= 0) & (phase[np.maximum(producer, 0)] == FORWARD) & read_later
    which, layer = crossing(tensor, of_op[reader], kept, count)
    readers = np.bincount(which, minlength=problem.num_tensors)
    return np.bincount(layer, weights=problem.tensor_bytes[which] / readers[which], minlength=count).astype(np.float64)


def make_pipeline(problem: Problem, devices: Sequence[int], *, limited: bool = True) -> Workers:
    """Returns the devices as workers: each with the slowest of its links to its neighbours, and its memory.

    Args:
        problem: The problem.
        devices: Device numbers in pipeline order.
        limited: Whether memory limits hold.
    """
    _, inverse = finite_links(problem)
    count = len(devices)
    link = np.zeros(count)
    for a, b in zip(range(count - 1), range(1, count), strict=True):
        slowest = max(inverse[devices[a], devices[b]], inverse[devices[b], devices[a]])
        link[a], link[b] = max(link[a], slowest), max(link[b], slowest)
    return Workers(link, problem.memory_limit_bytes[list(devices)] if limited else np.full(count, np.inf))
