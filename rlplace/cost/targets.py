"""Times of whole ops by target, from a user's own measurements; finer than op classes.

On a processor two ops of one class may differ by a factor of three per byte (gelu and an in-place relu), and an op is what the
library makes of it, not a known set of kernels. So a calibration keeps a curve for each target, over the FLOPs and bytes of the
op graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.presets import DeviceKind
from rlplace.cost.calls import op_directions, op_sizes
from rlplace.cost.scaled import precision_of, seconds_on
from rlplace.cost.table import DIMS, DIRECTIONS, Curve, Key, KindCosts
from rlplace.model.graph.opgraph import UPDATE, OpGraph

_VARIANTS = ("dropout", "groups", "depthwise")
"""Dims that change what the library runs: attention with dropout, grouped convolutions."""


@dataclass(frozen=True, eq=False)
class TargetTimes:
    """Times of the ops that a table knows by target.

    Attributes:
        op: int64 [K], numbers of the ops.
        seconds: float64 [K], time of each op.
        measured: bool [K], whether this very shape was timed.
        curve: int64 [K], index into `curves`.
        curves: The curves that were used.
    """

    op: NDArray[np.int64]
    seconds: NDArray[np.float64]
    measured: NDArray[np.bool_]
    curve: NDArray[np.int64]
    curves: tuple[Curve, ...]


def target_names(graph: OpGraph) -> list[str]:
    """N targets: of the forward op, also for its backward, with ``+`` and each of `_VARIANTS`; the optimizer for updates."""
    optimizer = str(graph.capture.get("optimizer", "adam"))
    names = []
    for phase, forward in zip(graph.op_phase.tolist(), graph.op_forward.tolist(), strict=True):
        if phase == UPDATE or forward < 0:
            names.append(optimizer)
            continue
        dims = graph.op_dims.get(forward, {})
        variants = [name for name in _VARIANTS if dims.get(name)]
        names.append("+".join([graph.op_target[forward], *variants]))
    return names


def op_dims_of(graph: OpGraph) -> list[Mapping[str, int]]:
    """N dims: of the op itself, else of its forward op."""
    empty: Mapping[str, int] = {}
    return [
        graph.op_dims.get(op) or (graph.op_dims.get(forward, empty) if forward >= 0 else empty)
        for op, forward in enumerate(graph.op_forward.tolist())
    ]


def shape_dims(dims: Mapping[str, int], flops: float, size_bytes: float) -> dict[str, int]:
    """Returns the key of a measured shape of a target: FLOPs, bytes and the dims that cost tables know."""
    kept = {name: int(size) for name, size in dims.items() if name in DIMS}
    return {**kept, "flops": round(flops), "bytes": round(size_bytes)}


def target_times(graph: OpGraph, kind: DeviceKind, costs: KindCosts) -> TargetTimes:
    """Times of the ops whose target, dtype and direction the table knows.

    Args:
        graph: N ops.
        kind: The device.
        costs: Costs of the device; `step_factor` is not applied.
    """
    directions = [DIRECTIONS[number] for number in op_directions(graph).tolist()]
    keys: list[Key] = list(zip(target_names(graph), graph.op_dtype, directions, strict=True))
    known = [op for op, key in enumerate(keys) if key in costs.targets]
    sizes, dims = op_sizes(graph), op_dims_of(graph)
    by_key: dict[Key, list[int]] = {}
    for op in known:
        by_key.setdefault(keys[op], []).append(op)
    seconds = np.zeros(graph.num_ops)
    measured = np.zeros(graph.num_ops, dtype=bool)
    which = np.zeros(graph.num_ops, dtype=np.int64)
    curves: list[Curve] = []
    for key, ops in by_key.items():
        entry = costs.targets[key]
        rows = np.array(ops)
        which[rows] = len(curves)
        curves.append(entry.curve)
        precision = precision_of(kind, graph.op_kind[ops[0]], key[1])
        own = {name: np.maximum(values[rows], 1.0) for name, values in sizes.items()}
        floor_s = kind.launch_s if entry.curve.floor_s is None else entry.curve.floor_s
        work = seconds_on(kind, precision, entry.curve, graph.op_flops[rows], graph.op_bytes[rows], own)
        seconds[rows] = floor_s + work
        table = {frozenset(shape.dims.items()): shape.seconds for shape in entry.measured}
        for op in ops if table else ():
            timed_s = table.get(frozenset(shape_dims(dims[op], graph.op_flops[op], graph.op_bytes[op]).items()))
            if timed_s is not None:
                seconds[op], measured[op] = timed_s, True
    index = np.array(known, dtype=np.int64)
    return TargetTimes(index, seconds[index], measured[index], which[index], tuple(curves))
