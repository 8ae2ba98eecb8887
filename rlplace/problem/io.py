"""Problem files: ``rlplace.problem`` version 1 (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, check_keys, read_record, write_json
from rlplace.problem.check import check_counts
from rlplace.problem.fabric import fabric_to_dict, fabrics_from_list
from rlplace.problem.problem import PHASES, Collective, Device, Links, Problem
from rlplace.problem.sharding import sharding_from_dict, sharding_to_dict
from rlplace.problem.source import check_source

FORMAT = "rlplace.problem"
VERSION = 1

_PARTS = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
_DEVICE_KEYS = {"name", "memory_bytes", "reserved_bytes", "kind"}
_GROUP_KEYS = {"name", "resident_bytes", "device", *_PARTS}
_OP_KEYS = {"name", "group", "phase", "time_s", "temporary_bytes", "kind", "dims"}
_TENSOR_KEYS = {"producer", "owner", "bytes", "consumers", "transfer_s"}


def save_problem(problem: Problem, path: str | Path) -> None:
    """Writes a problem file, atomically."""
    write_json(path, problem_to_dict(problem))


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
        data["links"]["fabrics"] = [fabric_to_dict(fabric) for fabric in problem.links.fabrics]
    if problem.collectives:
        data["collectives"] = [{"ops": list(c.ops), "channels": list(c.channels)} for c in problem.collectives]
    if problem.sharding is not None:
        data["sharding"] = sharding_to_dict(problem.sharding)
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


def _parse(data: dict[str, Any]) -> Problem:
    optional = {"name", "samples_per_microbatch", "source", "collectives", "sharding"}
    check_keys(data, {"devices", "links", "groups", "ops", "tensors"}, optional, "problem")
    for key in ("devices", "groups", "ops", "tensors"):
        if not isinstance(data[key], list):
            raise InputError(f"problem: {key}: expected a list, found {type(data[key]).__name__}")
    name = data.get("name", "problem")
    source = data.get("source")
    if not isinstance(name, str):
        raise InputError("problem: name: expected a string")
    if source is not None:
        check_source(source, "problem")
    devices = tuple(_parse_device(item, i) for i, item in enumerate(data["devices"]))
    if not devices:
        raise InputError("problem: devices: a problem needs at least one device")
    check_counts(len(data["ops"]), len(devices), len(data["tensors"]), 0)
    ops = _parse_ops(data["ops"], len(devices))
    return Problem(
        name=name,
        samples_per_microbatch=_integer(data.get("samples_per_microbatch", 1), "samples_per_microbatch"),
        devices=devices,
        links=_parse_links(data["links"], len(devices)),
        source=source,
        collectives=_parse_collectives(data.get("collectives", [])),
        **_parse_groups(data["groups"]),
        **ops,
        **_parse_tensors(data["tensors"], len(devices)),
        sharding=sharding_from_dict(data["sharding"], ops["op_dims"], len(devices)) if "sharding" in data else None,
    )


def _parse_device(item: Any, index: int) -> Device:
    where = f"devices[{index}]"
    check_keys(item, {"name", "memory_bytes"}, _DEVICE_KEYS, where)
    memory, kind = item["memory_bytes"], item.get("kind")
    if not isinstance(item["name"], str) or not (kind is None or isinstance(kind, str)):
        raise InputError(f"{where}: name and kind must be strings")
    return Device(
        name=item["name"],
        memory_bytes=None if memory is None else _integer(memory, f"{where}.memory_bytes"),
        reserved_bytes=_integer(item.get("reserved_bytes", 0), f"{where}.reserved_bytes"),
        kind=kind,
    )


def _parse_links(item: Any, count: int) -> Links:
    check_keys(item, {"bandwidth_bytes_per_s", "latency_s"}, {"channels", "fabrics"}, "links")
    channels = item.get("channels")
    if channels is not None:
        if not _is_nested(channels, 3):
            raise InputError("links.channels: expected a matrix of lists of channel numbers")
        channels = tuple(tuple(tuple(_integer(c, "links.channels") for c in held) for held in row) for row in channels)
    return Links(
        bandwidth_bytes_per_s=_matrix(item["bandwidth_bytes_per_s"], "links.bandwidth_bytes_per_s"),
        latency_s=_matrix(item["latency_s"], "links.latency_s"),
        channels=channels,
        fabrics=fabrics_from_list(item.get("fabrics", []), count),
    )


def _parse_groups(items: list[Any]) -> dict[str, Any]:
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not _GROUP_KEYS.issuperset(item) or "name" not in item:
            check_keys(item, {"name", "resident_bytes"}, _GROUP_KEYS, f"groups[{index}]")
    return {
        "group_names": tuple(item["name"] for item in items),
        "resident_bytes": _integers([item.get("resident_bytes", 0) for item in items], "groups.resident_bytes"),
        **{key: _optional([item.get(key) for item in items], f"groups.{key}") for key in _PARTS},
        "group_device": _optional([item.get("device") for item in items], "groups.device").astype(np.int32),
    }


def _parse_ops(items: list[Any], num_devices: int) -> dict[str, Any]:
    number = {phase: index for index, phase in enumerate(PHASES)}
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not _OP_KEYS.issuperset(item):
            check_keys(item, {"name", "group", "phase", "time_s"}, _OP_KEYS, f"ops[{index}]")
    try:
        rows = [item["time_s"] for item in items]
        groups = [item["group"] for item in items]
        phases = [item["phase"] for item in items]
        names = tuple(item["name"] for item in items)
    except KeyError as error:
        raise InputError(f"ops: key {error.args[0]!r} is missing from an op") from None
    unknown = [phase for phase in phases if not isinstance(phase, str) or phase not in number]
    if unknown:
        raise unknown_name("phase", unknown[0], PHASES)
    kinds = tuple(item.get("kind", "") for item in items)
    if not all(isinstance(kind, str) for kind in kinds):
        raise InputError("ops.kind: expected strings")
    return {
        "op_names": names,
        "op_group": _integers(groups, "ops.group").astype(np.int32),
        "op_phase": np.array([number[p] for p in phases], dtype=np.int8),
        "time_s": _parse_times(rows, num_devices),
        "temporary_bytes": _integers([item.get("temporary_bytes", 0) for item in items], "ops.temporary_bytes"),
        "op_kind": kinds if any(kinds) else None,
        "op_dims": {i: _parse_dims(item["dims"], i) for i, item in enumerate(items) if "dims" in item},
    }


def _parse_times(rows: list[Any], num_devices: int) -> NDArray[np.float64]:
    flat: list[float] = []
    for index, row in enumerate(rows):
        values = row if isinstance(row, list) else [row] * num_devices
        if len(values) != num_devices:
            raise InputError(f"ops[{index}].time_s: expected {num_devices} values, found {len(values)}")
        for value in values:
            if value is None:
                flat.append(np.nan)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                flat.append(_number(value, f"ops[{index}].time_s"))
            else:
                raise InputError(f"ops[{index}].time_s: {show(value)} is not a number or null")
    return np.array(flat, dtype=np.float64).reshape(len(rows), num_devices)


def _parse_dims(item: Any, index: int) -> dict[str, int]:
    if not isinstance(item, dict):
        raise InputError(f"ops[{index}].dims: expected an object of sizes")
    return {str(key): _integer(value, f"ops[{index}].dims.{key}") for key, value in item.items()}


def _parse_tensors(items: list[Any], num_devices: int) -> dict[str, Any]:
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not _TENSOR_KEYS.issuperset(item) or "bytes" not in item:
            check_keys(item, {"bytes", "consumers"}, _TENSOR_KEYS, f"tensors[{index}]")
        if not isinstance(item.get("consumers"), list):
            raise InputError(f"tensors[{index}].consumers: expected a list of ops")
    consumers = [item["consumers"] for item in items]
    return {
        "tensor_producer": _optional([item.get("producer") for item in items], "tensors.producer").astype(np.int32),
        "tensor_owner": _optional([item.get("owner") for item in items], "tensors.owner").astype(np.int32),
        "tensor_bytes": _integers([item["bytes"] for item in items], "tensors.bytes"),
        "consumer_ptr": np.concatenate([[0], np.cumsum([len(c) for c in consumers], dtype=np.int64)]).astype(np.int64),
        "consumers": _integers(list(chain.from_iterable(consumers)), "tensors.consumers").astype(np.int32),
        "tensor_transfer_s": {
            i: _matrix(item["transfer_s"], f"tensors[{i}].transfer_s") for i, item in enumerate(items) if "transfer_s" in item
        },
    }


def _parse_collectives(items: Any) -> tuple[Collective, ...]:
    if not isinstance(items, list):
        raise InputError("problem: collectives: expected a list")
    found = []
    for index, item in enumerate(items):
        where = f"collectives[{index}]"
        check_keys(item, {"ops", "channels"}, set(), where)
        if not isinstance(item["ops"], list) or not isinstance(item["channels"], list):
            raise InputError(f"{where}: ops and channels must be lists of whole numbers")
        ops = tuple(_integer(op, f"{where}.ops") for op in item["ops"])
        found.append(Collective(ops, tuple(_integer(c, f"{where}.channels") for c in item["channels"])))
    return tuple(found)


def _integer(value: Any, where: str) -> int:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) < 1 << 63 or int(value) != value:  # the middle test is false for NaN as well
        raise InputError(f"{where}: {show(value)} is not a whole number")
    return int(value)


def _integers(values: Sequence[Any], where: str) -> NDArray[np.int64]:
    """Whole numbers as int64; values beyond int32 range in index fields are caught by the range checks."""
    if not all(type(value) is int for value in values):
        values = [_integer(value, where) for value in values]
    if values and not (-(1 << 31) < min(values) and max(values) < 1 << 62):
        raise InputError(f"{where}: a value is out of range")
    if not where.endswith("bytes") and values and max(values) >= 1 << 31:
        raise InputError(f"{where}: a value is out of range")
    return np.array(values, dtype=np.int64)


def _optional(values: Sequence[Any], where: str) -> NDArray[np.int64]:
    """Like `_integers`, with -1 for what is null or left out, so that -1 itself is refused."""
    found = _integers([0 if value is None else value for value in values], where)
    if (found < 0).any():
        raise InputError(f"{where}: {int(found.min())} is negative; leave it out where there is none")
    found[np.array([value is None for value in values], dtype=bool)] = -1
    return found


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{where}: a number is too large") from None


def _matrix(value: Any, where: str) -> NDArray[np.float64]:
    if not _is_nested(value, 2) or len({len(row) for row in value}) > 1:
        raise InputError(f"{where}: expected a matrix (a list of equally long lists of numbers)")
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for row in value for x in row):
        raise InputError(f"{where}: expected numbers")
    return np.array([[_number(x, where) for x in row] for row in value], dtype=np.float64)


def _is_nested(value: Any, depth: int) -> bool:
    if depth == 0:
        return True
    return isinstance(value, list) and all(_is_nested(item, depth - 1) for item in value)
