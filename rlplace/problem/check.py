"""Checks that a `Problem` is well formed before its numbers are used."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace import limits
from rlplace.cluster.fabric import check_fabrics
from rlplace.errors import InputError, show
from rlplace.limits import MAX_BYTES
from rlplace.problem.order import topological_order

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem

MAX_SECONDS = 1e9
MIN_BANDWIDTH = 1e-3
MAX_CHANNEL = 1 << 20
COLLECTIVE = "collective"
"""The `op_kind` of ops that take part in a collective."""


def check_problem(problem: Problem) -> NDArray[np.int32]:
    """Checks every field and returns a topological order of the ops.

    Raises:
        InputError: Names the first field, item and value that is wrong.
    """
    _check_devices(problem)
    _check_links(problem)
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
        ("devices", devices, limits.DEVICES),
        ("ops", ops, limits.OPS),
        ("ops times devices", ops * devices, limits.OP_TIMES),
        ("tensors", tensors, limits.TENSORS),
        ("consumers of tensors", edges, limits.EDGES),
    ):
        if count > most:
            raise InputError(f"{record}: {count} {what}, the limit is {most}")


def check_names(names: tuple[str, ...], record: str, where: str) -> None:
    """Checks that names are strings of the length that names may have, and that none appears twice.

    Raises:
        InputError: Names the item by `where` and `record`.
    """
    if all(type(name) is str and 0 < len(name) <= limits.NAME_LENGTH for name in names) and len(set(names)) == len(names):
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


def first(mask: Any) -> int:
    """Returns the first item of a mask that is set."""
    return int(np.flatnonzero(mask)[0])


def _fail(where: str, what: str) -> InputError:
    return InputError(f"problem: {where}: {what}")


def _check_bytes(values: NDArray[np.int64], where: str, count: int, least: int = 0) -> None:
    if values.shape != (count,):
        raise _fail(where, f"expected {count} values, found shape {values.shape}")
    bad = (values < least) | (values > MAX_BYTES)
    if bad.any():
        index = first(bad)
        raise _fail(f"{where}[{index}]", f"{int(values[index])} is outside 0..{MAX_BYTES}")


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


def _check_links(problem: Problem) -> None:
    count = problem.num_devices
    for name in ("bandwidth_bytes_per_s", "latency_s"):
        matrix = getattr(problem.links, name)
        if matrix.shape != (count, count):
            raise _fail(f"links.{name}", f"expected a {count} x {count} matrix, found shape {matrix.shape}")
        bad = ~np.isfinite(matrix) | (matrix < 0)
        if bad.any():
            i, j = np.argwhere(bad)[0]
            raise _fail(f"links.{name}[{i}][{j}]", f"{matrix[i, j]} is not a finite non-negative number")
    slow = (problem.links.bandwidth_bytes_per_s > 0) & (problem.links.bandwidth_bytes_per_s < MIN_BANDWIDTH)
    if slow.any():
        i, j = np.argwhere(slow)[0]
        raise _fail(f"links.bandwidth_bytes_per_s[{i}][{j}]", f"must be 0 (no link) or at least {MIN_BANDWIDTH:g}")
    if (problem.links.latency_s > MAX_SECONDS).any():
        raise _fail("links.latency_s", f"{problem.links.latency_s.max()} is more than {MAX_SECONDS:g} seconds")
    try:
        check_fabrics(problem.links.fabrics, count)
    except InputError as error:
        raise _fail("links", str(error)) from None
    channels = problem.links.channels
    if channels is None:
        return
    if len(channels) != count or any(len(row) != count for row in channels):
        raise _fail("links.channels", f"expected a {count} x {count} matrix of lists")
    for i, row in enumerate(channels):
        for j, held in enumerate(row):
            where = f"links.channels[{i}][{j}]"
            if any(not 0 <= c < MAX_CHANNEL for c in held):
                raise _fail(where, f"channel numbers must be in 0..{MAX_CHANNEL - 1}")
            if len(set(held)) != len(held):
                raise _fail(where, "a channel appears twice")


def _check_groups(problem: Problem) -> None:
    from rlplace.problem.problem import RESIDENT_PARTS

    count = problem.num_groups
    check_names(problem.group_names, "problem", "groups")
    _check_bytes(problem.resident_bytes, "groups.resident_bytes", count)
    parts = []
    for name in RESIDENT_PARTS:
        _check_bytes(getattr(problem, name), f"groups.{name}", count, least=-1)
        parts.append(getattr(problem, name))
    known = np.stack(parts) >= 0 if count else np.zeros((3, 0), dtype=bool)
    partial = known.any(axis=0) & ~known.all(axis=0)
    refuse(partial, "problem", "groups[{}]", "weight_bytes, gradient_bytes and optimizer_bytes go together")
    wrong = known.all(axis=0) & (sum(parts) != problem.resident_bytes)
    if wrong.any():
        index = first(wrong)
        total = int(sum(int(p[index]) for p in parts))
        raise _fail(f"groups[{index}]", f"parts add up to {total}, resident_bytes is {int(problem.resident_bytes[index])}")
    device = problem.group_device
    if device.shape != (count,) or (device < -1).any() or (device >= problem.num_devices).any():
        raise _fail("groups.device", f"must be one of {problem.num_devices} devices or null for each of {count} groups")


def _check_ops(problem: Problem) -> None:
    count, devices = problem.num_ops, problem.num_devices
    if count == 0:
        raise _fail("ops", "the graph is empty; a problem needs at least one op")
    check_names(problem.op_names, "problem", "ops")
    if problem.op_group.shape != (count,) or problem.op_phase.shape != (count,):
        raise _fail("ops", "group and phase must be given for every op")
    bad = (problem.op_group < 0) | (problem.op_group >= problem.num_groups)
    if bad.any():
        raise _fail(f"ops[{first(bad)}].group", f"{int(problem.op_group[bad][0])} is not one of {problem.num_groups} groups")
    if (problem.op_phase < 0).any() or (problem.op_phase > 3).any():
        raise _fail("ops.phase", "must be forward, backward, backward_weight or update")
    times = problem.time_s
    if times.shape != (count, devices):
        raise _fail("ops.time_s", f"expected {count} x {devices} values, found shape {times.shape}")
    bad_time = ~np.isnan(times) & ~((times >= 0) & (times <= MAX_SECONDS))
    if bad_time.any():
        i, j = np.argwhere(bad_time)[0]
        raise _fail(f"ops[{i}].time_s[{j}]", f"{times[i, j]} is not in 0..{MAX_SECONDS:g} seconds")
    refuse(np.isnan(times).all(axis=1), "problem", "ops[{}].time_s", "null on every device; the op cannot run anywhere")
    _check_bytes(problem.temporary_bytes, "ops.temporary_bytes", count)
    if problem.op_kind is not None and len(problem.op_kind) != count:
        raise _fail("ops.kind", f"expected {count} values")


def _check_tensors(problem: Problem) -> None:
    count, ops = problem.num_tensors, problem.num_ops
    _check_bytes(problem.tensor_bytes, "tensors.bytes", count)
    producer, owner = problem.tensor_producer, problem.tensor_owner
    if producer.shape != (count,) or owner.shape != (count,) or problem.consumer_ptr.shape != (count + 1,):
        raise _fail("tensors", "producer, owner and consumers must be given for every tensor")
    refuse((producer >= 0) == (owner >= 0), "problem", "tensors[{}]", "needs exactly one of producer and owner")
    bad = (producer < -1) | (producer >= ops) | (owner < -1) | (owner >= problem.num_groups)
    refuse(bad, "problem", "tensors[{}]", "producer or owner is out of range")
    ptr = problem.consumer_ptr
    if ptr[0] != 0 or ptr[-1] != len(problem.consumers) or (np.diff(ptr) < 0).any():
        raise _fail("tensors.consumers", "offsets are not a partition of the consumer list")
    bad = (problem.consumers < 0) | (problem.consumers >= ops)
    if bad.any():
        edge = first(bad)
        raise _fail(f"tensors[{int(problem.edge_tensor[edge])}].consumers", f"op {int(problem.consumers[edge])} does not exist")
    key = np.sort(problem.edge_tensor.astype(np.int64) * ops + problem.consumers)
    twice = key[1:] == key[:-1]
    if twice.any():
        raise _fail(f"tensors[{int(key[1:][twice][0] // ops)}].consumers", "a consumer appears twice")
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
