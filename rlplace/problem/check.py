"""Checks that a `Problem` is well formed before its numbers are used, and what its `source` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace import limits
from rlplace.cluster.links import MAX_CHANNEL, MAX_SECONDS
from rlplace.errors import InputError, show
from rlplace.limits import MAX_BYTES
from rlplace.problem.order import topological_order
from rlplace.records import Count, build

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem

COLLECTIVE = "collective"
"""The `op_kind` of ops that take part in a collective."""


def check_problem(problem: Problem) -> NDArray[np.int32]:
    """Checks every field and returns a topological order of the ops.

    Raises:
        InputError: Names the first field, item and value that is wrong.
    """
    _check_devices(problem)
    _check_groups(problem)
    _check_ops(problem)
    _check_tensors(problem)
    _check_collectives(problem)
    _check_total(problem)
    return _topological_order(problem)


def freeze(record: Any) -> None:
    """Makes the arrays of a dataclass read-only, so that what was checked stays so."""
    for item in fields(record):
        value = getattr(record, item.name, None)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)


def check_counts(ops: int, devices: int, tensors: int, edges: int, record: str = "problem") -> None:
    """Refuses a problem, or a graph, that is larger than `rlplace.limits` allow, before its matrices are made."""
    for what, count, most in (
        ("devices", devices, limits.PROBLEM_DEVICES),
        ("ops", ops, limits.OPS),
        ("ops times devices", ops * devices, limits.OP_TIMES),
        ("tensors", tensors, limits.TENSORS),
        ("consumers of tensors", edges, limits.EDGES),
    ):
        if count > most:
            raise InputError(f"{record}: {count} {what}, the limit is {most}")


@lru_cache(maxsize=32)
def _good_names(names: tuple[str, ...]) -> bool:
    """Returns whether names are what `check_names` wants; graphs of other batch sizes share theirs."""
    return all(0 < len(name) <= limits.NAME_LENGTH for name in names) and len(set(names)) == len(names)


def check_names(names: tuple[str, ...], record: str, where: str) -> None:
    """Checks that names are strings of the length that names may have, and that none appears twice.

    Raises:
        InputError: Names the item by `where` and `record`.
    """
    if set(map(type, names)) == {str} and _good_names(names):
        return
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise InputError(f"{record}: {where}[{index}]: name must be a non-empty string")
        if len(name) > limits.NAME_LENGTH:
            raise InputError(f"{record}: {where}[{index}]: name has {len(name)} characters, the limit is {limits.NAME_LENGTH}")
        if name in seen:
            raise InputError(f"{record}: {where}[{index}]: name {name[:80]!r} appears twice")
        seen.add(name)


def refuse(bad: Any, record: str, where: str, what: str) -> None:
    """Refuses a record with bad items, bool [any length]; the first of them replaces ``{}`` in `where`."""
    if bad.any():
        raise InputError(f"{record}: {where.format(first(bad))}: {what}")


def check_arrays(record: Any, name: str, count: int, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Checks arrays of a record, [count] each.

    Args:
        record: Has the arrays as attributes.
        name: Name of the record, for messages.
        count: Number of values of each.
        ranges: Least and largest value by attribute; NaN is outside of every range.

    Raises:
        InputError: Names the first array, item and value that is wrong.
    """
    for field, (low, high) in ranges.items():
        values = getattr(record, field)
        if values.shape != (count,):
            raise InputError(f"{name}: {field}: expected {count} values, found shape {values.shape}")
        bad = ~((values >= low) & (values <= high))
        if bad.any():
            raise InputError(f"{name}: {field}[{first(bad)}]: {values[first(bad)]} is outside {low}..{high}")


def check_consumers(record: Any, name: str, ops: int, *, ordered: bool = False) -> None:
    """Checks the consumers of tensors: offsets, op numbers, none twice and, with `ordered`, in ascending order.

    Raises:
        InputError: Names what is wrong.
    """
    ptr, consumers = record.consumer_ptr, record.consumers
    if ptr.shape != (record.num_tensors + 1,) or ptr[0] != 0 or ptr[-1] != len(consumers) or (np.diff(ptr) < 0).any():
        raise InputError(f"{name}: consumer_ptr: offsets are not a partition of the consumer list")
    check_arrays(record, name, len(consumers), {"consumers": (0, ops - 1)})
    key = record.edge_tensor.astype(np.int64) * ops + consumers
    key = key if ordered else np.sort(key)
    wrong = key[1:] <= key[:-1]
    if wrong.any():
        what = "must be distinct and in execution order" if ordered else "a consumer appears twice"
        raise InputError(f"{name}: consumers of tensor {int(key[1:][wrong][0] // ops)}: {what}")


def first(mask: Any) -> int:
    """Returns the first item of a mask that is set."""
    return int(np.flatnonzero(mask)[0])


def _fail(where: str, what: str) -> InputError:
    return InputError(f"problem: {where}: {what}")


def _check_devices(problem: Problem) -> None:
    if not problem.devices:
        raise _fail("devices", "a problem needs at least one device")
    check_counts(len(problem.op_names), len(problem.devices), len(problem.tensor_bytes), len(problem.consumers))
    if not 1 <= problem.samples_per_microbatch <= MAX_BYTES:
        raise _fail("samples_per_microbatch", f"{problem.samples_per_microbatch} is not a positive count")
    check_names(tuple(d.name for d in problem.devices), "problem", "devices")
    for index, device in enumerate(problem.devices):
        where = f"devices[{index}] ({show(device.name)})"
        if not 0 <= device.reserved_bytes <= MAX_BYTES:
            raise _fail(where, f"reserved_bytes {device.reserved_bytes} is outside 0..{MAX_BYTES}")
        if device.memory_bytes is not None:
            if not 0 < device.memory_bytes <= MAX_BYTES:
                raise _fail(where, f"memory_bytes must be positive (null for no limit), found {device.memory_bytes}")
            if device.reserved_bytes > device.memory_bytes:
                raise _fail(where, f"reserved_bytes {device.reserved_bytes} exceeds memory_bytes {device.memory_bytes}")
    if len(problem.links.latency_s) != problem.num_devices:
        raise _fail("links", f"are of {len(problem.links.latency_s)} devices, the problem has {problem.num_devices}")


def _check_groups(problem: Problem) -> None:
    from rlplace.problem.problem import RESIDENT_PARTS

    count = problem.num_groups
    check_names(problem.group_names, "problem", "groups")
    ranges = {"resident_bytes": (0, MAX_BYTES), "group_device": (-1, problem.num_devices - 1)}
    check_arrays(problem, "problem", count, ranges | dict.fromkeys(RESIDENT_PARTS, (-1, MAX_BYTES)))
    parts = [getattr(problem, name) for name in RESIDENT_PARTS]
    known = np.stack(parts) >= 0 if count else np.zeros((3, 0), dtype=bool)
    partial = known.any(axis=0) & ~known.all(axis=0)
    refuse(partial, "problem", "groups[{}]", "weight_bytes, gradient_bytes and optimizer_bytes go together")
    wrong = known.all(axis=0) & (sum(parts) != problem.resident_bytes)
    if wrong.any():
        index = first(wrong)
        total = int(sum(int(p[index]) for p in parts))
        raise _fail(f"groups[{index}]", f"parts add up to {total}, resident_bytes is {int(problem.resident_bytes[index])}")


def _check_ops(problem: Problem) -> None:
    from rlplace.problem.problem import PHASES

    count, devices = problem.num_ops, problem.num_devices
    if count == 0:
        raise _fail("ops", "the graph is empty; a problem needs at least one op")
    check_names(problem.op_names, "problem", "ops")
    ranges = {"op_group": (0, problem.num_groups - 1), "op_phase": (0, len(PHASES) - 1), "temporary_bytes": (0, MAX_BYTES)}
    check_arrays(problem, "problem", count, ranges)
    times = problem.time_s
    if times.shape != (count, devices):
        raise _fail("ops.time_s", f"expected {count} x {devices} values, found shape {times.shape}")
    bad_time = ~np.isnan(times) & ~((times >= 0) & (times <= MAX_SECONDS))
    if bad_time.any():
        i, j = np.argwhere(bad_time)[0]
        raise _fail(f"ops[{i}].time_s[{j}]", f"{times[i, j]} is not in 0..{MAX_SECONDS:g} seconds")
    refuse(np.isnan(times).all(axis=1), "problem", "ops[{}].time_s", "null on every device; the op cannot run anywhere")
    if problem.op_kind is not None and len(problem.op_kind) != count:
        raise _fail("ops.kind", f"expected {count} values")


def _check_tensors(problem: Problem) -> None:
    count, ops = problem.num_tensors, problem.num_ops
    ranges = {"tensor_bytes": (0, MAX_BYTES), "tensor_producer": (-1, ops - 1), "tensor_owner": (-1, problem.num_groups - 1)}
    check_arrays(problem, "problem", count, ranges)
    exactly_one = (problem.tensor_producer >= 0) != (problem.tensor_owner >= 0)
    refuse(~exactly_one, "problem", "tensors[{}]", "needs exactly one of producer and owner")
    check_consumers(problem, "problem", ops)
    for tensor, matrix in problem.tensor_transfer_s.items():
        where = f"tensors[{tensor}].transfer_s"
        if matrix.shape != (problem.num_devices, problem.num_devices):
            raise _fail(where, f"expected a {problem.num_devices} x {problem.num_devices} matrix")
        if not 0 <= tensor < count:
            raise _fail(where, f"there are {count} tensors")
        if not ((matrix >= 0) & (matrix <= MAX_SECONDS)).all():
            raise _fail(where, f"must be in 0..{MAX_SECONDS:g} seconds")


def _check_collectives(problem: Problem) -> None:
    members: set[int] = set()
    for index, collective in enumerate(problem.collectives):
        where = f"collectives[{index}]"
        ops, channels = collective.ops, collective.channels
        if not ops or any(not 0 <= op < problem.num_ops for op in ops):
            raise _fail(where, f"needs ops in 0..{problem.num_ops - 1}, found {list(ops)[:8]}")
        if len(set(ops)) < len(ops) or not members.isdisjoint(ops):
            raise _fail(where, "an op takes part twice, or in two collectives")
        members.update(ops)
        if len({int(problem.op_phase[op]) for op in ops}) > 1:
            raise _fail(where, "its ops must be of one phase")
        if any(not 0 <= c < MAX_CHANNEL for c in channels) or len(set(channels)) < len(channels):
            raise _fail(where, f"channels must be distinct numbers in 0..{MAX_CHANNEL - 1}")
    named = set() if problem.op_kind is None else {op for op, kind in enumerate(problem.op_kind) if kind == COLLECTIVE}
    if named != members:
        op = min(named ^ members)
        raise _fail(f"ops[{op}]", f"kind {COLLECTIVE!r} and membership in a collective go together")


def _check_total(problem: Problem) -> None:
    """Checks that the sum of all bytes, an upper bound of any device's memory, fits into 64 bits with room to spare."""
    parts = (problem.resident_bytes, problem.temporary_bytes, problem.tensor_bytes)
    total = sum(float(part.sum(dtype=np.float64)) for part in parts)
    if total > 2 * MAX_BYTES:
        raise _fail("bytes", f"all groups, ops and tensors together hold {total:.3g} bytes, the limit is {2 * MAX_BYTES:.3g}")


def _topological_order(problem: Problem) -> NDArray[np.int32]:
    (source, target), count = problem.op_edges, problem.num_ops
    if problem.collectives:  # a node for each collective, between what any of its ops waits for and all its ops
        node_of_op = np.full(count, -1, dtype=np.int64)
        for index, collective in enumerate(problem.collectives):
            node_of_op[list(collective.ops)] = count + index
        members = np.flatnonzero(node_of_op >= 0)
        waits = node_of_op[target]
        source = np.concatenate([source, node_of_op[members]])
        target = np.concatenate([np.where(waits >= 0, waits, target), members])
    order, stuck = topological_order(source, target, count + len(problem.collectives))
    if stuck is not None:
        stuck = stuck if stuck < count else problem.collectives[stuck - count].ops[0]
        raise _fail(f"ops[{stuck}] ({problem.op_names[stuck][:80]})", "the graph is cyclic; this op waits on a cycle")
    return np.array([op for op in order if op < count], dtype=np.int32)


class Costs(msgspec.Struct, frozen=True):
    """The cost table of a problem: where it was read, and its fingerprint."""

    path: str | None = None
    fingerprint: str | None = None


class Source(msgspec.Struct, frozen=True):
    """The entries of a source that are read, out of possibly more: how the problem was made."""

    graph: dict[str, Any] | None = None
    costs: Costs | None = None
    capture: dict[str, Any] | None = None
    op_times: dict[str, dict[str, float]] | None = None
    cluster: str | None = None
    cluster_fingerprint: str | None = None
    graph_fingerprint: str | None = None
    groups: Count | None = None
    split_backward: bool | None = None
    level: str | None = None
    host: str | None = None

    @property
    def table(self) -> Costs:
        """The cost table's entry."""
        return self.costs or Costs()


def check_source(source: Any, where: str) -> None:
    """Checks the `source` of a parsed file.

    Raises:
        InputError: It is no object, or one of these entries has another type than rlplace writes.
    """
    build(Source, source, f"{where}: source")
