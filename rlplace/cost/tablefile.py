"""Cost files: ``rlplace.cost`` version 1 (docs/formats.md, section Cost table)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlplace.cost.table import (
    BASES,
    COMPILED_ISSUE_S,
    DIMS,
    DIRECTIONS,
    EAGER_ISSUE_S,
    EAGER_VIEW_S,
    PRECISIONS,
    CostTable,
    Curve,
    Key,
    KindCosts,
    MeasuredShape,
    Residual,
    TargetCosts,
)
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, check_keys, finite_number, read_record, write_json
from rlplace.graph.opgraph import OP_KINDS

FORMAT = "rlplace.cost"
VERSION = 1

MAX_SECONDS = 1e6
MAX_HALF = 1e18
MAX_WEIGHTS = 10_000
MAX_BOUND = 20.0

_KEY = ("op", "dtype", "direction")
_TARGET_KEY = ("target", "dtype", "direction")
_CURVE_NUMBERS = ("compute_efficiency", "compute_half_flops", "bandwidth_efficiency", "bandwidth_half_bytes")
_CURVE_OPTIONAL = ("floor_s", "saturation", "overhead_s", "source", "residual")
_ISSUE = {"eager_issue_s": EAGER_ISSUE_S, "eager_view_s": EAGER_VIEW_S, "compiled_issue_s": COMPILED_ISSUE_S}
_RESIDUAL_KEYS = ("features", "mean", "scale", "low", "high", "weights", "bias", "bound")


def save_table(table: CostTable, path: str | Path) -> None:
    """Writes a cost file, atomically."""
    write_json(path, table_to_dict(table))


def load_table(path: str | Path) -> CostTable:
    """Reads a cost file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or holds impossible numbers.
    """
    name = Path(path).name.removesuffix(".json").removesuffix(".cost")
    return read_record(path, FORMAT, VERSION, lambda data: _parse(data, name))


def table_from_dict(data: dict[str, Any]) -> CostTable:
    """Builds a cost table from parsed JSON, with the same checks as `load_table`."""
    return _parse(check_header(data, FORMAT, VERSION, where="cost table"), "costs")


def table_to_dict(table: CostTable) -> dict[str, Any]:
    """The table as plain JSON data; defaults are left out, entries are sorted, so equal tables give equal text."""
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": table.name}
    if table.source:
        data["source"] = table.source
    data["kinds"] = {name: _kind_to_dict(table.kinds[name]) for name in sorted(table.kinds)}
    return data


def check_table(table: CostTable) -> None:
    """Checks every number of a table.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    for name, costs in table.kinds.items():
        where = f"kinds[{show(name)}]"
        if not isinstance(name, str) or not name:
            raise InputError(f"cost table: {where}: a device kind needs a name")
        for field in _ISSUE:
            _check(getattr(costs, field), 0.0, 1.0, f"{where}.{field}")
        _check(costs.step_factor, 0.01, 100.0, f"{where}.step_factor")
        for key, curve in costs.curves.items():
            _check_curve(curve, f"{where}, curve {_check_key(key, where)}")
        for key, shapes in costs.measured.items():
            at = f"{where}, measured {_check_key(key, where)}"
            for shape in shapes:
                _check_shape(shape, at)
        for key, target in costs.targets.items():
            at = f"{where}, target {'/'.join(key)[:120]}"
            if len(key) != 3 or not key[0] or not key[1] or key[2] not in DIRECTIONS:
                raise InputError(f"cost table: {at}: expected a target, a dtype and one of {', '.join(DIRECTIONS)}")
            _check_curve(target.curve, at)
            for shape in target.measured:
                _check_shape(shape, at)


def _check(value: float, low: float, high: float, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(f"cost table: {where}: {show(value)} is outside {low:g}..{high:g}")


def _check_key(key: Key, where: str) -> str:
    for what, value, known in zip(_KEY, key, (OP_KINDS, PRECISIONS, DIRECTIONS), strict=True):
        if value not in known:
            raise InputError(f"cost table: {where}: {unknown_name(what, value, known)}")
    return "/".join(key)


def _check_curve(curve: Curve, where: str) -> None:
    for name in ("compute_efficiency", "bandwidth_efficiency", "saturation"):
        _check(getattr(curve, name), 1e-6, 1.0, f"{where}: {name}")
    for name in ("compute_half_flops", "bandwidth_half_bytes"):
        _check(getattr(curve, name), 0.0, MAX_HALF, f"{where}: {name}")
    if curve.floor_s is not None:
        _check(curve.floor_s, 0.0, 1.0, f"{where}: floor_s")
    _check(curve.overhead_s, 0.0, 1.0, f"{where}: overhead_s")
    if curve.basis not in BASES:
        raise InputError(f"cost table: {where}: {unknown_name('basis', curve.basis, BASES)}")
    if curve.residual is not None:
        _check_residual(curve.residual, f"{where}: residual")


def _check_residual(residual: Residual, where: str) -> None:
    from rlplace.cost.residual import FEATURES

    for name in residual.features:
        if name not in FEATURES:
            raise InputError(f"cost table: {where}: {unknown_name('feature', name, FEATURES)}")
    width = len(residual.features)
    if not width or any(len(getattr(residual, name)) != width for name in ("mean", "scale", "low", "high")):
        raise InputError(f"cost table: {where}: mean, scale, low and high need one number per feature")
    if not residual.weights or len(residual.weights) != len(residual.bias):
        raise InputError(f"cost table: {where}: needs one bias per layer of weights")
    for layer, (matrix, bias) in enumerate(zip(residual.weights, residual.bias, strict=True)):
        if not matrix or any(len(row) != width for row in matrix) or len(bias) != len(matrix):
            raise InputError(f"cost table: {where}: layer {layer} does not fit the {width} values before it")
        width = len(matrix)
    if width != 1:
        raise InputError(f"cost table: {where}: the last layer must have one output, it has {width}")
    numbers = [v for matrix in residual.weights for row in matrix for v in row] + [v for row in residual.bias for v in row]
    if len(numbers) > MAX_WEIGHTS:
        raise InputError(f"cost table: {where}: {len(numbers)} weights, the limit is {MAX_WEIGHTS}")
    for value in (*numbers, *residual.mean, *residual.low, *residual.high):
        _check(value, -1e6, 1e6, where)
    for value in residual.scale:
        _check(value, 1e-9, 1e6, f"{where}: scale")
    if any(low > high for low, high in zip(residual.low, residual.high, strict=True)):
        raise InputError(f"cost table: {where}: a low is above its high")
    _check(residual.bound, 1.0, MAX_BOUND, f"{where}: bound")


def _check_shape(shape: MeasuredShape, where: str) -> None:
    if not shape.dims:
        raise InputError(f"cost table: {where}: a measured shape needs dims, for example {{'m': 8, 'n': 8, 'k': 8}}")
    for name, size in shape.dims.items():
        if name not in DIMS:
            raise InputError(f"cost table: {where}: {unknown_name('dim', name, DIMS)}")
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise InputError(f"cost table: {where}: dims.{name}: {show(size)} is not a size")
    _check(shape.seconds, 0.0, MAX_SECONDS, f"{where}: seconds")


def _kind_to_dict(costs: KindCosts) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, default in _ISSUE.items():
        if getattr(costs, name) != default:
            data[name] = getattr(costs, name)
    if costs.step_factor != 1.0:
        data["step_factor"] = costs.step_factor
    data["curves"] = [
        {**dict(zip(_KEY, key, strict=True)), **_curve_to_dict(costs.curves[key])} for key in sorted(costs.curves)
    ]
    if costs.measured:
        data["measured"] = [
            {
                **dict(zip(_KEY, key, strict=True)),
                "shapes": [{"dims": dict(shape.dims), "seconds": shape.seconds} for shape in costs.measured[key]],
            }
            for key in sorted(costs.measured)
        ]
    if costs.targets:
        data["targets"] = [
            {
                **dict(zip(_TARGET_KEY, key, strict=True)),
                **_curve_to_dict(costs.targets[key].curve),
                "shapes": [{"dims": dict(shape.dims), "seconds": shape.seconds} for shape in costs.targets[key].measured],
            }
            for key in sorted(costs.targets)
        ]
    return data


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(curve, name) for name in _CURVE_NUMBERS}
    if curve.floor_s is not None:
        data["floor_s"] = curve.floor_s
    if curve.saturation != 1.0:
        data["saturation"] = curve.saturation
    if curve.overhead_s:
        data["overhead_s"] = curve.overhead_s
    data["basis"] = curve.basis
    if curve.source:
        data["source"] = curve.source
    if curve.residual is not None:
        residual = curve.residual
        data["residual"] = {
            "features": list(residual.features),
            "mean": list(residual.mean),
            "scale": list(residual.scale),
            "low": list(residual.low),
            "high": list(residual.high),
            "weights": [[list(row) for row in matrix] for matrix in residual.weights],
            "bias": [list(row) for row in residual.bias],
            "bound": residual.bound,
        }
    return data


def _parse(data: dict[str, Any], default_name: str) -> CostTable:
    check_keys(data, {"kinds"}, {"name", "source"}, "cost table")
    if not isinstance(data["kinds"], dict):
        raise InputError("cost table: kinds: expected an object by device kind")
    kinds = {name: _parse_kind(item, f"kinds[{show(name)}]") for name, item in data["kinds"].items()}
    return CostTable(kinds, name=_text(data.get("name", default_name), "name"), source=_text(data.get("source", ""), "source"))


def _parse_kind(item: Any, where: str) -> KindCosts:
    check_keys(item, (), {"curves", "measured", "targets", "step_factor", *_ISSUE}, f"cost table: {where}")
    curves: dict[Key, Curve] = {}
    for index, entry in enumerate(_list(item.get("curves", []), f"{where}.curves")):
        at = f"{where}.curves[{index}]"
        check_keys(entry, {*_KEY, *_CURVE_NUMBERS, "basis"}, _CURVE_OPTIONAL, f"cost table: {at}")
        curves[_key(entry, curves, at)] = _parse_curve(entry, at)
    measured: dict[Key, tuple[MeasuredShape, ...]] = {}
    for index, entry in enumerate(_list(item.get("measured", []), f"{where}.measured")):
        at = f"{where}.measured[{index}]"
        check_keys(entry, {*_KEY, "shapes"}, (), f"cost table: {at}")
        key = _key(entry, measured, at)
        measured[key] = tuple(_parse_shape(shape, f"{at}.shapes") for shape in _list(entry["shapes"], f"{at}.shapes"))
    targets: dict[Key, TargetCosts] = {}
    for index, entry in enumerate(_list(item.get("targets", []), f"{where}.targets")):
        at = f"{where}.targets[{index}]"
        check_keys(entry, {*_TARGET_KEY, *_CURVE_NUMBERS, "basis"}, {*_CURVE_OPTIONAL, "shapes"}, f"cost table: {at}")
        key = _key(entry, targets, at, _TARGET_KEY)
        shapes = tuple(_parse_shape(shape, f"{at}.shapes") for shape in _list(entry.get("shapes", []), f"{at}.shapes"))
        targets[key] = TargetCosts(_parse_curve(entry, at), shapes)
    numbers = {name: _number(item.get(name, default), f"{where}.{name}") for name, default in _ISSUE.items()}
    return KindCosts(
        curves, measured, targets, step_factor=_number(item.get("step_factor", 1.0), f"{where}.step_factor"), **numbers
    )


def _key(entry: dict[str, Any], seen: dict[Key, Any], where: str, names: tuple[str, str, str] = _KEY) -> Key:
    key = (_text(entry[names[0]], where), _text(entry[names[1]], where), _text(entry[names[2]], where))
    if key in seen:
        raise InputError(f"cost table: {where}: {'/'.join(key)[:80]} is given twice")
    return key


def _parse_curve(entry: dict[str, Any], where: str) -> Curve:
    numbers = {name: _number(entry[name], f"{where}.{name}") for name in _CURVE_NUMBERS}
    floor = entry.get("floor_s")
    residual = entry.get("residual")
    return Curve(
        **numbers,
        floor_s=None if floor is None else _number(floor, f"{where}.floor_s"),
        saturation=_number(entry.get("saturation", 1.0), f"{where}.saturation"),
        overhead_s=_number(entry.get("overhead_s", 0.0), f"{where}.overhead_s"),
        basis=_text(entry["basis"], f"{where}.basis"),
        source=_text(entry.get("source", ""), f"{where}.source"),
        residual=None if residual is None else _parse_residual(residual, f"{where}.residual"),
    )


def _parse_residual(item: Any, where: str) -> Residual:
    check_keys(item, _RESIDUAL_KEYS, (), f"cost table: {where}")
    weights = _list(item["weights"], f"{where}.weights")
    return Residual(
        features=tuple(_text(name, f"{where}.features") for name in _list(item["features"], f"{where}.features")),
        mean=_numbers(item["mean"], f"{where}.mean"),
        scale=_numbers(item["scale"], f"{where}.scale"),
        low=_numbers(item["low"], f"{where}.low"),
        high=_numbers(item["high"], f"{where}.high"),
        weights=tuple(tuple(_numbers(r, f"{where}.weights") for r in _list(m, f"{where}.weights")) for m in weights),
        bias=tuple(_numbers(row, f"{where}.bias") for row in _list(item["bias"], f"{where}.bias")),
        bound=_number(item["bound"], f"{where}.bound"),
    )


def _parse_shape(item: Any, where: str) -> MeasuredShape:
    check_keys(item, ("dims", "seconds"), (), f"cost table: {where}")
    if not isinstance(item["dims"], dict):
        raise InputError(f"cost table: {where}.dims: expected an object of sizes")
    return MeasuredShape(dict(item["dims"]), _number(item["seconds"], f"{where}.seconds"))


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"cost table: {where}: expected a list, found {show(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"cost table: {where}: expected text, found {show(value)}")
    return value


def _number(value: Any, where: str) -> float:
    return finite_number(value, f"cost table: {where}")


def _numbers(value: Any, where: str) -> tuple[float, ...]:
    return tuple(_number(item, where) for item in _list(value, where))
