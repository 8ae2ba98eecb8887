"""Problem files: ``rlplace.problem`` version 1 (docs/formats.md)."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.files import check_header, read_record
from rlplace.problem.check import check_counts
from rlplace.problem.fabric import fabrics_from_list
from rlplace.problem.problem import PHASES, Collective, Device, Links, Phase, Problem
from rlplace.problem.source import check_source
from rlplace.records import Bytes, Record, build, plain

FORMAT = "rlplace.problem"
VERSION = 1

_PARTS = ("weight_bytes", "gradient_bytes", "optimizer_bytes")


def load_problem(path: str | Path) -> Problem:
    """Reads a problem file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or describes an impossible problem.
    """
    return read_record(path, FORMAT, VERSION, _parse)


def problem_from_dict(data: dict[str, Any]) -> Problem:
    """Builds a problem from parsed JSON, with the same checks as `load_problem`."""
    return _parse(check_header(data, FORMAT, VERSION, where="problem"))


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The problem as plain JSON data; defaults are left out, so equal problems give equal text."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "samples_per_microbatch": int(problem.samples_per_microbatch),
        "devices": [_device_to_dict(device) for device in problem.devices],
        "links": {
            "bandwidth_bytes_per_s": problem.links.bandwidth_bytes_per_s.tolist(),
            "latency_s": problem.links.latency_s.tolist(),
        },
        "groups": _groups_to_list(problem),
        "ops": _ops_to_list(problem),
        "tensors": _tensors_to_list(problem),
    }
    if problem.links.channels is not None:
        data["links"]["channels"] = [[list(held) for held in row] for row in problem.links.channels]
    if problem.links.fabrics:
        data["links"]["fabrics"] = plain(problem.links.fabrics)
    if problem.collectives:
        data["collectives"] = [{"ops": list(c.ops), "channels": list(c.channels)} for c in problem.collectives]
    if problem.source is not None:
        data["source"] = dict(problem.source)
    return data


def _device_to_dict(device: Device) -> dict[str, Any]:
    data: dict[str, Any] = {"name": device.name, "memory_bytes": device.memory_bytes}
    if device.reserved_bytes:
        data["reserved_bytes"] = device.reserved_bytes
    if device.kind is not None:
        data["kind"] = device.kind
    return data


def _groups_to_list(problem: Problem) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    parts = np.stack([getattr(problem, name) for name in _PARTS], axis=1).tolist()
    resident, fixed = problem.resident_bytes.tolist(), problem.group_device.tolist()
    for index, name in enumerate(problem.group_names):
        group: dict[str, Any] = {"name": name, "resident_bytes": resident[index]}
        if parts[index][0] >= 0:
            group.update(zip(_PARTS, parts[index], strict=True))
        if fixed[index] >= 0:
            group["device"] = fixed[index]
        groups.append(group)
    return groups


def _ops_to_list(problem: Problem) -> list[dict[str, Any]]:
    ops: list[dict[str, Any]] = []
    same = (problem.time_s == problem.time_s[:, :1]).all(axis=1).tolist()
    times = problem.time_s.tolist()
    groups, phases, temporary = problem.op_group.tolist(), problem.op_phase.tolist(), problem.temporary_bytes.tolist()
    for index, name in enumerate(problem.op_names):
        row = times[index]
        time_s = row[0] if same[index] else [None if t != t else t for t in row]
        op: dict[str, Any] = {"name": name, "group": groups[index], "phase": PHASES[phases[index]], "time_s": time_s}
        if temporary[index]:
            op["temporary_bytes"] = temporary[index]
        if problem.op_kind is not None and problem.op_kind[index]:
            op["kind"] = problem.op_kind[index]
        if index in problem.op_dims:
            op["dims"] = dict(problem.op_dims[index])
        ops.append(op)
    return ops


def _tensors_to_list(problem: Problem) -> list[dict[str, Any]]:
    tensors: list[dict[str, Any]] = []
    ptr, consumers, sizes = problem.consumer_ptr.tolist(), problem.consumers.tolist(), problem.tensor_bytes.tolist()
    producers, owners = problem.tensor_producer.tolist(), problem.tensor_owner.tolist()
    for index, size in enumerate(sizes):
        tensor: dict[str, Any] = {"producer": producers[index]} if producers[index] >= 0 else {"owner": owners[index]}
        tensor["bytes"] = size
        tensor["consumers"] = consumers[ptr[index] : ptr[index + 1]]
        if index in problem.tensor_transfer_s:
            tensor["transfer_s"] = problem.tensor_transfer_s[index].tolist()
        tensors.append(tensor)
    return tensors


Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Int = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
_Matrix = list[list[float]]


class _DeviceEntry(Record, frozen=True):
    """A device of a problem file."""

    name: str
    memory_bytes: _Int | None
    reserved_bytes: _Int = 0
    kind: str | None = None


class _LinksEntry(Record, frozen=True):
    """Links of a problem file; fabrics are read by `rlplace.problem.fabric`."""

    bandwidth_bytes_per_s: _Matrix
    latency_s: _Matrix
    channels: tuple[tuple[tuple[_Int, ...], ...], ...] | None = None
    fabrics: Any = ()


class _GroupEntry(Record, frozen=True, gc=False):
    """A group of a problem file."""

    name: str
    resident_bytes: Bytes = 0
    weight_bytes: Bytes | None = None
    gradient_bytes: Bytes | None = None
    optimizer_bytes: Bytes | None = None
    device: Index | None = None


class _OpEntry(Record, frozen=True, gc=False):
    """An op of a problem file."""

    name: str
    group: Index
    phase: Phase
    time_s: float | list[float | None] | None
    temporary_bytes: Bytes = 0
    kind: str = ""
    dims: dict[str, _Int] | None = None


class _TensorEntry(Record, frozen=True, gc=False):
    """A tensor of a problem file."""

    size_bytes: Bytes = msgspec.field(name="bytes")
    consumers: list[Index]
    producer: Index | None = None
    owner: Index | None = None
    transfer_s: _Matrix | None = None


class _CollectiveEntry(Record, frozen=True):
    """A collective of a problem file."""

    ops: tuple[_Int, ...]
    channels: tuple[_Int, ...]


class _ProblemEntry(Record, frozen=True):
    """What a problem file holds."""

    devices: list[_DeviceEntry]
    links: _LinksEntry
    groups: list[_GroupEntry]
    ops: list[_OpEntry]
    tensors: list[_TensorEntry]
    name: str = "problem"
    samples_per_microbatch: _Int = 1
    source: Any = None
    collectives: tuple[_CollectiveEntry, ...] = ()


def _parse(data: dict[str, Any]) -> Problem:
    for key in ("devices", "ops", "tensors"):  # before anything is made of them
        if not isinstance(data.get(key, []), list):
            raise InputError(f"problem: {key}: expected a list, found {show(data[key])}")
    check_counts(len(data.get("ops", [])), len(data.get("devices", [])), len(data.get("tensors", [])), 0)
    entry = build(_ProblemEntry, data, "problem", whole_floats=True)
    if entry.source is not None:
        check_source(entry.source, "problem")
    count = len(entry.devices)
    if not count:
        raise InputError("problem: devices: a problem needs at least one device")
    ops, groups, tensors, links = entry.ops, entry.groups, entry.tensors, entry.links
    dims = {index: op.dims for index, op in enumerate(ops) if op.dims is not None}
    kinds = tuple(op.kind for op in ops)
    number = {phase: index for index, phase in enumerate(PHASES)}
    return Problem(
        name=entry.name,
        samples_per_microbatch=entry.samples_per_microbatch,
        devices=tuple(Device(**asdict(device)) for device in entry.devices),
        links=Links(
            bandwidth_bytes_per_s=_matrix(links.bandwidth_bytes_per_s, "links.bandwidth_bytes_per_s"),
            latency_s=_matrix(links.latency_s, "links.latency_s"),
            channels=links.channels,
            fabrics=fabrics_from_list(links.fabrics, count),
        ),
        group_names=tuple(group.name for group in groups),
        resident_bytes=_numbers([group.resident_bytes for group in groups]),
        weight_bytes=_numbers([group.weight_bytes for group in groups]),
        gradient_bytes=_numbers([group.gradient_bytes for group in groups]),
        optimizer_bytes=_numbers([group.optimizer_bytes for group in groups]),
        group_device=_numbers([group.device for group in groups]).astype(np.int32),
        op_names=tuple(op.name for op in ops),
        op_group=_numbers([op.group for op in ops]).astype(np.int32),
        op_phase=np.array([number[op.phase] for op in ops], dtype=np.int8),
        time_s=_times([op.time_s for op in ops], count),
        temporary_bytes=_numbers([op.temporary_bytes for op in ops]),
        tensor_producer=_numbers([tensor.producer for tensor in tensors]).astype(np.int32),
        tensor_owner=_numbers([tensor.owner for tensor in tensors]).astype(np.int32),
        tensor_bytes=_numbers([tensor.size_bytes for tensor in tensors]),
        consumer_ptr=np.cumsum([0, *(len(tensor.consumers) for tensor in tensors)], dtype=np.int64),
        consumers=_numbers(list(chain.from_iterable(tensor.consumers for tensor in tensors))).astype(np.int32),
        op_kind=kinds if any(kinds) else None,
        op_dims=dims,
        tensor_transfer_s={
            index: _matrix(tensor.transfer_s, f"tensors[{index}].transfer_s")
            for index, tensor in enumerate(tensors)
            if tensor.transfer_s is not None
        },
        collectives=tuple(Collective(c.ops, c.channels) for c in entry.collectives),
        source=entry.source,
    )


def _numbers(values: list[int | None] | list[int]) -> NDArray[np.int64]:
    """An array with -1 for entries that are null or left out."""
    return np.array([-1 if value is None else value for value in values], dtype=np.int64)


def _times(rows: list[float | list[float | None] | None], num_devices: int) -> NDArray[np.float64]:
    for index, row in enumerate(rows):
        if isinstance(row, list) and len(row) != num_devices:
            raise InputError(f"problem: ops[{index}].time_s: expected {num_devices} values, found {len(row)}")
    full = [row if isinstance(row, list) else [row] * num_devices for row in rows]
    return np.array(full, dtype=np.float64).reshape(len(rows), num_devices)  # None becomes NaN


def _matrix(rows: _Matrix, where: str) -> NDArray[np.float64]:
    if len({len(row) for row in rows}) > 1:
        raise InputError(f"problem: {where}: expected a matrix (a list of equally long lists of numbers)")
    return np.array(rows, dtype=np.float64)
