"""Measurement files: ``rlplace.measurement`` version 1 (docs/formats.md, section Measurement)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rlplace.cost.measurement import (
    CACHE_STATES,
    DIRECTIONS,
    ControlTiming,
    Environment,
    MeasuredOp,
    Measurement,
    StepTiming,
)
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, check_keys, finite_number, read_record, write_json
from rlplace.graph.opgraph import OP_KINDS

FORMAT = "rlplace.measurement"
VERSION = 1

MAX_SECONDS = 1e6
_MAX_COUNT = 1 << 62
_OP_OPTIONAL = ("dims", "issue_s")
_STEP_OPTIONAL = ("busy_s", "instrumented_s", "peak_memory_bytes")
_ENVIRONMENT_OPTIONAL = ("clock_mhz", "clock_end_mhz", "power_limit_w", "temperature_c", "details")
_MODEL_KEYS = {"model": str, "batch": int, "seq": int, "dtype": str, "optimizer": str}


def save_measurement(measurement: Measurement, path: str | Path) -> None:
    """Writes a measurement file, atomically."""
    write_json(path, measurement_to_dict(measurement))


def load_measurement(path: str | Path) -> Measurement:
    """Reads a measurement file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or holds impossible numbers.
    """
    return read_record(path, FORMAT, VERSION, _parse)


def measurement_from_dict(data: dict[str, Any]) -> Measurement:
    """Builds a measurement from parsed JSON, with the same checks as `load_measurement`."""
    return _parse(check_header(data, FORMAT, VERSION, where="measurement"))


def measurement_to_dict(measurement: Measurement) -> dict[str, Any]:
    """The measurement as plain JSON data; values that are not known are left out."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": measurement.name,
        "model": dict(measurement.model),
        "environment": _known(measurement.environment),
        "cache": measurement.cache,
        "control": _known(measurement.control),
        "host_s": measurement.host_s,
        "ops": [_known(op) for op in measurement.ops],
    }
    if measurement.step is not None:
        data["step"] = _known(measurement.step)
    return data


def check_measurement(measurement: Measurement) -> None:
    """Checks every number and name of a measurement.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    if measurement.cache not in CACHE_STATES:
        raise InputError(f"measurement: {unknown_name('cache state', measurement.cache, CACHE_STATES)}")
    _check(measurement.host_s, "host_s")
    for name in ("first_s", "last_s"):
        _check(getattr(measurement.control, name), f"control.{name}", positive=True)
    environment = measurement.environment
    _check_whole(environment.threads, "environment.threads", least=1)
    for name in ("clock_mhz", "clock_end_mhz", "power_limit_w", "temperature_c"):
        value = getattr(environment, name)
        if value is not None:
            _check(value, f"environment.{name}")
    for index, op in enumerate(measurement.ops):
        _check_op(op, f"ops[{index}]")
    step = measurement.step
    if step is not None:
        for name in ("seconds", "min_s", "p10_s", "p90_s"):
            _check(getattr(step, name), f"step.{name}", positive=True)
        _check_whole(step.repeats, "step.repeats", least=1)
        _check_whole(step.undisturbed, "step.undisturbed")
        for name in ("busy_s", "instrumented_s"):
            value = getattr(step, name)
            if value is not None:
                _check(value, f"step.{name}", positive=True)
        if step.peak_memory_bytes is not None:
            _check_whole(step.peak_memory_bytes, "step.peak_memory_bytes")


def _check_op(op: MeasuredOp, where: str) -> None:
    if op.kind not in OP_KINDS:
        raise InputError(f"measurement: {where}: {unknown_name('op kind', op.kind, OP_KINDS)}")
    if op.direction not in DIRECTIONS:
        raise InputError(f"measurement: {where}: {unknown_name('direction', op.direction, DIRECTIONS)}")
    if not op.target or not op.dtype:
        raise InputError(f"measurement: {where}: target and dtype must not be empty")
    for name in ("seconds", "p10_s", "p90_s"):
        _check(getattr(op, name), f"{where}.{name}")
    if op.issue_s is not None:
        _check(op.issue_s, f"{where}.issue_s")
    if not 0 <= op.flops < 1e30:
        raise InputError(f"measurement: {where}.flops: {show(op.flops)} is not a number of FLOPs")
    _check_whole(op.size_bytes, f"{where}.size_bytes")
    _check_whole(op.count, f"{where}.count", least=1)
    _check_whole(op.repeats, f"{where}.repeats", least=1)
    for name, size in op.dims.items():
        if not name:
            raise InputError(f"measurement: {where}.dims: a size needs a name")
        _check_whole(size, f"{where}.dims.{name[:40]}")


def _check(value: float, where: str, positive: bool = False) -> None:
    if not (0 < value if positive else 0 <= value) or not value <= MAX_SECONDS:
        raise InputError(f"measurement: {where}: {show(value)} is outside {'above 0' if positive else '0'}..{MAX_SECONDS:g}")


def _check_whole(value: int, where: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value < _MAX_COUNT:
        raise InputError(f"measurement: {where}: {show(value)} is not a whole number from {least} up")


def _known(record: Any) -> dict[str, Any]:
    """Fields of a record in order, without None and without empty mappings."""
    data = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if hasattr(value, "items"):
            value = dict(value)
        if value is not None and value != {}:
            data[field.name] = value
    return data


def _parse(data: dict[str, Any]) -> Measurement:
    required = {"model", "environment", "cache", "control", "ops"}
    check_keys(data, required, {"name", "step", "host_s"}, "measurement")
    if not isinstance(data["ops"], list):
        raise InputError(f"measurement: ops: expected a list, found {show(data['ops'])}")
    return Measurement(
        name=_text(data.get("name", "measurement"), "name"),
        model=_parse_model(data["model"]),
        environment=_parse_environment(data["environment"]),
        cache=_text(data["cache"], "cache"),
        ops=tuple(_parse_op(item, f"ops[{index}]") for index, item in enumerate(data["ops"])),
        step=None if data.get("step") is None else _parse_step(data["step"]),
        control=_parse_control(data["control"]),
        host_s=_number(data.get("host_s", 0.0), "host_s"),
    )


def _parse_model(item: Any) -> dict[str, Any]:
    check_keys(item, _MODEL_KEYS, (), "measurement: model")
    for key, kind in _MODEL_KEYS.items():
        if type(item[key]) is not kind:
            raise InputError(f"measurement: model.{key}: expected {kind.__name__}, found {show(item[key])}")
    return dict(item)


def _parse_environment(item: Any) -> Environment:
    names = [field.name for field in dataclasses.fields(Environment)]
    required = [name for name in names if name not in _ENVIRONMENT_OPTIONAL]
    check_keys(item, required, _ENVIRONMENT_OPTIONAL, "measurement: environment")
    details = item.get("details", {})
    if not isinstance(details, dict) or not all(type(value) in (str, int, float) for value in details.values()):
        raise InputError("measurement: environment.details: expected an object of text and numbers")
    readings: dict[str, Any] = {
        name: None if item.get(name) is None else _number(item[name], f"environment.{name}")
        for name in ("clock_mhz", "clock_end_mhz", "power_limit_w", "temperature_c")
    }
    texts: dict[str, Any] = {
        name: _text(item[name], f"environment.{name}") for name in ("device", "device_kind", "device_type", "torch")
    }
    return Environment(**texts, threads=item["threads"], **readings, details=dict(details))


def _parse_op(item: Any, where: str) -> MeasuredOp:
    names = [field.name for field in dataclasses.fields(MeasuredOp)]
    check_keys(item, [name for name in names if name not in _OP_OPTIONAL], _OP_OPTIONAL, f"measurement: {where}")
    dims = item.get("dims", {})
    if not isinstance(dims, dict):
        raise InputError(f"measurement: {where}.dims: expected an object of sizes")
    texts: dict[str, Any] = {name: _text(item[name], f"{where}.{name}") for name in ("target", "kind", "dtype", "direction")}
    numbers: dict[str, Any] = {name: _number(item[name], f"{where}.{name}") for name in ("flops", "seconds", "p10_s", "p90_s")}
    counts: dict[str, Any] = {name: item[name] for name in ("size_bytes", "count", "repeats")}
    issue = None if item.get("issue_s") is None else _number(item["issue_s"], f"{where}.issue_s")
    return MeasuredOp(**texts, **numbers, **counts, dims=dict(dims), issue_s=issue)


def _parse_step(item: Any) -> StepTiming:
    names = [field.name for field in dataclasses.fields(StepTiming)]
    check_keys(item, [name for name in names if name not in _STEP_OPTIONAL], _STEP_OPTIONAL, "measurement: step")
    numbers: dict[str, Any] = {name: _number(item[name], f"step.{name}") for name in ("seconds", "min_s", "p10_s", "p90_s")}
    for name in ("busy_s", "instrumented_s"):
        numbers[name] = None if item.get(name) is None else _number(item[name], f"step.{name}")
    return StepTiming(
        **numbers, repeats=item["repeats"], undisturbed=item["undisturbed"], peak_memory_bytes=item.get("peak_memory_bytes")
    )


def _parse_control(item: Any) -> ControlTiming:
    check_keys(item, ("shape", "first_s", "last_s"), (), "measurement: control")
    return ControlTiming(
        _text(item["shape"], "control.shape"),
        _number(item["first_s"], "control.first_s"),
        _number(item["last_s"], "control.last_s"),
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"measurement: {where}: expected text, found {show(value)}")
    return value


def _number(value: Any, where: str) -> float:
    return finite_number(value, f"measurement: {where}")
