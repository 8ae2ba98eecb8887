"""Op times of a device kind: curves, residuals and measured shapes of a cost table, and the host's issue time.

    time = launches * floor + max(roofline, factor * max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes))))

per kernel (`rlplace.cost.calls`), summed over the kernels of an op; a measured shape replaces the sum. Sources of the
coefficients are in `rlplace/cost/shipped.cost.json`, `rlplace.cost.scaled` and `rlplace/cluster/presets.toml`, errors in
docs/cost-model/accuracy.md.

On a processor two ops of one class may differ by a factor of three per byte (gelu and an in-place relu), and an op is whatever
the library makes of it, not a known set of kernels. So a calibration keeps a curve for each target, over the FLOPs and bytes of
the op graph; it replaces all that the op's class has.

Host time: a device op cannot start before the host has issued it. The host walks the ops in execution order and needs an issue
time for each; the device starts an op when it has been issued and the one before has ended. An op is charged from the end of
the one before to its own end, so that the charges of all ops add up to the time of the step on one device: a launch-bound run
of small ops costs the host's issue time, and small ops behind a large one cost only their device time, because the host ran
ahead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.presets import DeviceKind
from rlplace.cost.calls import Calls, calls_of, op_codes, op_directions, op_launches, op_sizes
from rlplace.cost.curve import BASES, DIMS, DIRECTIONS, Curve, Sizes, extrapolates
from rlplace.cost.foreign import as_costs, modelled_seconds
from rlplace.cost.scaled import (
    base_name,
    datasheet_curve,
    emulated,
    find_curve,
    precision_of,
    seconds_on,
    slower_attention,
    tf32_classes,
    unlike_widths,
)
from rlplace.cost.table import HOST_MODES, CostTable, Key, KindCosts
from rlplace.errors import unknown_name
from rlplace.model.graph.opgraph import OP_KINDS, UPDATE, OpGraph

_VARIANTS = ("dropout", "groups", "depthwise")
"""Dims that change what the library runs: attention with dropout, grouped convolutions."""


def target_names(graph: OpGraph) -> list[str]:
    """Returns N targets: of the forward op, with ``+`` and each of `_VARIANTS`, also for its backward; the optimizer's name."""
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
    """Returns N dims: of the op itself, else of its forward op."""
    empty: Mapping[str, int] = {}
    return [
        graph.op_dims.get(op) or (graph.op_dims.get(forward, empty) if forward >= 0 else empty)
        for op, forward in enumerate(graph.op_forward.tolist())
    ]


def shape_dims(dims: Mapping[str, int], flops: float, size_bytes: float) -> dict[str, int]:
    """Returns the key of a measured shape of a target: FLOPs, bytes and the dims that cost tables know."""
    kept = {name: int(size) for name, size in dims.items() if name in DIMS}
    return {**kept, "flops": round(flops), "bytes": round(size_bytes)}


VERSION = 4
"""Version of the cost model; part of a problem's source, so that a change of formulas shows."""

NO_BASIS = -1


@dataclass(frozen=True, eq=False)
class OpTimes:
    """Seconds of every op on one device kind, and their basis.

    Attributes:
        device_s: float64 [N], device time alone.
        seconds: float64 [N], with the host's issue time folded in.
        basis: int8 [N], index into `BASES` for the longest kernel of the op, -1 for ops that cost the device nothing.
        curve: int64 [N], index into `curves` of that kernel, -1 for measured shapes and ops without kernels.
        curves: The curves that were used, with their sources.
    """

    device_s: NDArray[np.float64]
    seconds: NDArray[np.float64]
    basis: NDArray[np.int8]
    curve: NDArray[np.int64]
    curves: tuple[Curve, ...]

    def shares(self) -> dict[str, float]:
        """Returns share of the device time by basis; bases that occur only."""
        total = float(self.device_s.sum())
        parts = {name: float(self.device_s[self.basis == number].sum()) for number, name in enumerate(BASES)}
        return {name: part / total for name, part in parts.items() if part > 0}


def explain_times(
    graph: OpGraph, kind: DeviceKind, costs: CostTable | str | Path | None = None, *, host: str = "eager"
) -> OpTimes:
    """Returns seconds of every op on a device kind, and where they come from.

    Args:
        graph: N ops.
        kind: The device.
        costs: Cost table or file that overrides the shipped one; None: the shipped one.
        host: "eager" or "compiled": how the host issues ops.

    Raises:
        InputError: An unknown host mode, or a cost file that cannot be used.
    """
    check_host(host)
    return times_with(as_costs(costs), graph, kind, calls_of(graph, host), host)


def check_host(host: str) -> None:
    """Refuses an unknown host mode."""
    if host not in HOST_MODES:
        raise unknown_name("host mode", host, HOST_MODES)


def times_with(table: CostTable, graph: OpGraph, kind: DeviceKind, calls: Calls, host: str) -> OpTimes:
    """Computes `explain_times` from a complete table and the graph's calls in that host mode."""
    device, basis, which, curves = device_times(table, graph, kind, calls, host)
    issue = issue_times(graph, table.kinds.get(base_name(kind.name), KindCosts()), host, kind)
    return OpTimes(device, fold_issue(device, issue), basis, which, curves)


def device_times(
    table: CostTable, graph: OpGraph, kind: DeviceKind, calls: Calls, host: str
) -> tuple[NDArray[np.float64], NDArray[np.int8], NDArray[np.int64], tuple[Curve, ...]]:
    """Computes fields of `times_with` without the host: `device_s`, `basis`, `curve` and `curves` of `OpTimes`."""
    own = table.kinds.get(base_name(kind.name), KindCosts())
    seconds, basis, which, curves = _call_seconds(calls, kind, table, tf32_classes(graph))
    device: NDArray[np.float64] = np.bincount(calls.op, weights=seconds, minlength=graph.num_ops).astype(np.float64)
    op_basis = np.full(graph.num_ops, NO_BASIS, dtype=np.int8)
    op_curve = np.full(graph.num_ops, -1, dtype=np.int64)
    order = np.argsort(seconds, kind="stable")  # the dearest kernel of an op is written last
    op_basis[calls.op[order]] = basis[order]
    op_curve[calls.op[order]] = which[order]
    if own.measured:
        for op, measured_s in _measured(graph, kind, own).items():
            device[op], op_basis[op], op_curve[op] = measured_s, BASES.index("measured"), -1
    if own.targets and host == "eager":  # compiled code runs other kernels than those that were timed
        for rows, curve, times_s, timed in _by_target(graph, kind, own):
            device[rows], op_curve[rows] = times_s, np.where(timed, -1, len(curves))
            op_basis[rows] = np.where(timed, BASES.index("measured"), BASES.index(curve.basis))
            curves = (*curves, curve)
    device *= own.step_factor
    modelled = modelled_seconds(table, graph, kind)
    if modelled is not None:
        known = ~np.isnan(modelled)
        device[known], op_basis[known], op_curve[known] = modelled[known], BASES.index("calibrated"), -1
    return device, op_basis, op_curve, curves


def issue_times(graph: OpGraph, costs: KindCosts, host: str, kind: DeviceKind) -> NDArray[np.float64]:
    """Returns float64 [N], host time to issue every op; 0 on a host processor, whose floor includes the dispatch of an op."""
    if kind.host_processor:
        return np.zeros(graph.num_ops)
    launches = op_launches(graph, host)
    issue = launches * (costs.compiled_issue_s if host == "compiled" else costs.eager_issue_s)
    if host == "eager":
        view = np.where(op_directions(graph) == 0, costs.eager_view_s, 0.0)  # autograd's own views cost next to nothing
        issue = np.where(launches > 0, issue, view)
    if costs.layer_issue_s:
        layers = _layers(graph)
        total = np.bincount(layers, weights=issue)
        total[0] = costs.layer_issue_s  # outside of layers ops keep theirs
        issue = issue * (costs.layer_issue_s / np.where(total > 0, total, 1.0))[layers]
    return issue


def _layers(graph: OpGraph) -> NDArray[np.int64]:
    """Returns int64 [N], from 1: the outermost element of a module list that an op runs in; 0 outside and for updates."""
    numbers: dict[str, int] = {"": 0}
    found = (re.match(r"(?:[^.]*[^.\d][^.]*\.)*\d+(?=\.|$)", path) for path in graph.op_module)
    layers = np.array([numbers.setdefault(match[0] if match else "", len(numbers)) for match in found], dtype=np.int64)
    return np.where(graph.op_phase == UPDATE, 0, layers)


def _call_seconds(
    calls: Calls, kind: DeviceKind, table: CostTable, tf32: Collection[str]
) -> tuple[NDArray[np.float64], NDArray[np.int8], NDArray[np.int64], tuple[Curve, ...]]:
    """Returns seconds [C], basis [C] and curve number [C] of every row, and the curves."""
    seconds = np.zeros(len(calls.op))
    basis = np.zeros(len(calls.op), dtype=np.int8)
    which = np.zeros(len(calls.op), dtype=np.int64)
    curves: list[Curve] = []
    conv, attention = (calls.kind == OP_KINDS.index(name) for name in ("conv", "attention"))
    # Unlike those that were timed.
    other = (conv & (calls.sizes["image"] <= 1)) | (attention & unlike_widths(kind, calls.sizes))
    group = ((2 * calls.kind + other) * len(DIRECTIONS) + calls.direction) * len(calls.dtypes) + calls.dtype
    order = np.argsort(group, kind="stable")
    values, starts = np.unique(group[order], return_index=True)
    for value, rows in zip(values.tolist(), np.split(order, starts[1:]), strict=True):
        rest, dtype = divmod(value, len(calls.dtypes))
        number, direction = divmod(rest, len(DIRECTIONS))
        op = OP_KINDS[number // 2]
        precision = precision_of(kind, op, calls.dtypes[dtype], tf32)
        curve = find_curve(kind, table, op, precision, DIRECTIONS[direction])
        if number % 2 and op == "attention":
            curve = slower_attention(curve, kind, calls.dtypes[dtype])
        elif number % 2 and curve.residual is not None:
            curve = datasheet_curve(kind, op, precision, DIRECTIONS[direction])
        if curve.basis == "fitted" and calls.dtypes[dtype] not in (precision, "float32"):  # bytes carry over, timings do not
            curve = msgspec.structs.replace(
                curve, basis="scaled", source=f"{calls.dtypes[dtype]} from {precision}: {curve.source}"
            )
        curve = emulated(curve, kind, op, calls.dtypes[dtype])
        seconds[rows] = _row_seconds(calls, rows, curve, precision, kind)
        basis[rows], which[rows] = BASES.index(curve.basis), len(curves)
        if curve.basis == "fitted" and curve.residual is not None:
            beyond = rows[extrapolates(curve.residual, _sizes(calls, rows))]
            basis[beyond] = BASES.index("extrapolated")
        curves.append(curve)
    return seconds, basis, which, tuple(curves)


def _sizes(calls: Calls, rows: NDArray[np.int64]) -> Sizes:
    """Returns sizes of rows, FLOPs and bytes of one kernel included."""
    own = {"flops": calls.flops[rows] / calls.count[rows], "bytes": calls.size_bytes[rows] / calls.count[rows]}
    return {name: values[rows] for name, values in calls.sizes.items()} | own


def _row_seconds(calls: Calls, rows: NDArray[np.int64], curve: Curve, precision: str, kind: DeviceKind) -> NDArray[np.float64]:
    """Returns seconds of rows that share a curve."""
    count, sizes = calls.count[rows], _sizes(calls, rows)
    one = seconds_on(kind, precision, curve, sizes["flops"], sizes["bytes"], sizes)
    floor_s = kind.launch_s if curve.floor_s is None else curve.floor_s
    result: NDArray[np.float64] = calls.launches[rows] * floor_s + count * one
    return result


def _measured(graph: OpGraph, kind: DeviceKind, costs: KindCosts) -> dict[int, float]:
    """Returns measured seconds by op, for the ops whose dims equal those of a measured shape."""
    sizes = {**op_sizes(graph), "flops": graph.op_flops, "bytes": graph.op_bytes.astype(np.float64)}
    number, direction = op_codes(graph.op_kind), op_directions(graph)
    tf32 = tf32_classes(graph)
    precision = np.array([precision_of(kind, op, d, tf32) for op, d in zip(graph.op_kind, graph.op_dtype, strict=True)])
    seconds_of_op: dict[int, float] = {}
    for (op, dtype, way), shapes in costs.measured.items():
        ops = np.flatnonzero((number == OP_KINDS.index(op)) & (direction == DIRECTIONS.index(way)) & (precision == dtype))
        by_names: dict[tuple[str, ...], dict[tuple[float, ...], float]] = {}
        for shape in shapes:
            names = tuple(sorted(shape.dims))
            by_names.setdefault(names, {})[tuple(float(shape.dims[name]) for name in names)] = shape.seconds
        for names, table in by_names.items():
            columns = np.stack([sizes[name][ops] for name in names], axis=1)
            for index, row in zip(ops.tolist(), map(tuple, columns.tolist()), strict=True):
                if row in table:
                    seconds_of_op[index] = table[row]
    return seconds_of_op


def _by_target(
    graph: OpGraph, kind: DeviceKind, costs: KindCosts
) -> Iterator[tuple[NDArray[np.int64], Curve, NDArray[np.float64], NDArray[np.bool_]]]:
    """Yields, by known target, dtype and direction, the ops [K], their curve, seconds [K] and whether the shape was timed."""
    directions = [DIRECTIONS[number] for number in op_directions(graph).tolist()]
    sizes, dims = op_sizes(graph), op_dims_of(graph)
    by_key: dict[Key, list[int]] = {}
    for op, key in enumerate(zip(target_names(graph), graph.op_dtype, directions, strict=True)):
        if key in costs.targets:
            by_key.setdefault(key, []).append(op)
    for key, ops in by_key.items():
        entry, rows = costs.targets[key], np.array(ops)
        precision = precision_of(kind, graph.op_kind[ops[0]], key[1])
        own = {name: np.maximum(values[rows], 1.0) for name, values in sizes.items()}
        floor_s = kind.launch_s if entry.curve.floor_s is None else entry.curve.floor_s
        seconds = floor_s + seconds_on(kind, precision, entry.curve, graph.op_flops[rows], graph.op_bytes[rows], own)
        table = {frozenset(shape.dims.items()): shape.seconds for shape in entry.measured}
        shapes = [frozenset(shape_dims(dims[op], graph.op_flops[op], graph.op_bytes[op]).items()) for op in ops if table]
        timed = np.array([shape in table for shape in shapes] or [False] * len(ops))
        seconds[timed] = [table[shape] for shape in shapes if shape in table]
        yield rows, entry.curve, seconds, timed


def fold_issue(device_s: NDArray[np.float64], issue_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Folds host issue times into op times.

    Args:
        device_s: [N] device time of every op in execution order, 0 for ops that launch nothing.
        issue_s: [N] host time to issue it.

    Returns:
        [N] seconds, at least `device_s`; they add up to the end of the last op, or of the host if that is later.
    """
    issued = np.cumsum(issue_s)
    work = np.cumsum(device_s)
    # The device ends op i at work[i] + max over j <= i of (issued[j] - work before j), the largest wait so far.
    waits = device_s > 0
    wait = np.maximum.accumulate(np.where(waits, issued - (work - device_s), 0.0))
    stall = np.diff(wait, prepend=0.0)
    # A view at the very end, or a step of views alone, still takes the host's time.
    if len(stall) and issued[-1] > work[-1] + wait[-1]:
        stall[-1] += issued[-1] - work[-1] - wait[-1]
    return device_s + np.maximum(stall, 0.0)
