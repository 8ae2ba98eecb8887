"""Cost files: ``rlplace.cost`` version 1 (docs/formats.md, section Cost table)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from rlplace.cost.curve import FEATURES
from rlplace.cost.table import (
    COMPILED_ISSUE_S,
    EAGER_ISSUE_S,
    EAGER_VIEW_S,
    Basis,
    CostTable,
    Curve,
    Direction,
    KernelSeconds,
    Key,
    KindCosts,
    MeasuredShape,
    Precision,
    TargetCosts,
)
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, read_record
from rlplace.model.graph.opgraph import OpKind
from rlplace.records import Record, Text, build, plain

FORMAT = "rlplace.cost"
VERSION = 1

_KEY = ("op", "dtype", "direction")
_TARGET_KEY = ("target", "dtype", "direction")
_NUMBERS = ("eager_issue_s", "eager_view_s", "compiled_issue_s", "layer_issue_s", "step_factor")


class _CurveEntry(Curve, frozen=True, kw_only=True):
    """A curve with its key, as it stands in a file.

    Attributes:
        op: Op class.
        dtype: Precision; memory-bound classes have float32.
        direction: Part of the step; `backward_weight` is priced by `backward` where it is missing.
    """

    op: OpKind
    dtype: Precision
    direction: Direction
    basis: Basis


class _ShapesEntry(Record, frozen=True):
    """Measured shapes with their key.

    Attributes:
        op: Op class.
        dtype: Precision.
        direction: Part of the step.
        shapes: The timings.
    """

    op: OpKind
    dtype: Precision
    direction: Direction
    shapes: tuple[MeasuredShape, ...]


class _TargetEntry(Curve, frozen=True, kw_only=True):
    """Costs of whole ops with their key; they replace all that the op's class has, in eager mode.

    Attributes:
        target: Forward op as torch knows it, also for its backward, with ``+dropout``, ``+groups`` or ``+depthwise`` where that
            applies; the optimizer's name for updates.
        dtype: Of its tensors.
        direction: Part of the step.
        shapes: Timed shapes, which override the curve.
    """

    target: Text
    dtype: Text
    direction: Direction
    basis: Basis
    shapes: tuple[MeasuredShape, ...] = ()


class _Kind(Record, frozen=True):
    """Costs of one device kind.

    Attributes:
        curves: By op class, precision and direction, each once.
        measured: Timed shapes, which override curves.
        targets: Whole ops as `rlplace calibrate` fits them.
        eager_issue_s: Host time to issue one kernel in eager mode.
        eager_view_s: Host time of an op that launches nothing.
        compiled_issue_s: Host time to issue one kernel of a compiled graph.
        layer_issue_s: Host time of a layer's forward and backward, in place of its kernels'; 0: theirs.
        step_factor: Multiplies every op time.
    """

    curves: tuple[_CurveEntry, ...] = ()
    measured: tuple[_ShapesEntry, ...] = ()
    targets: tuple[_TargetEntry, ...] = ()
    eager_issue_s: KernelSeconds = EAGER_ISSUE_S
    eager_view_s: KernelSeconds = EAGER_VIEW_S
    compiled_issue_s: KernelSeconds = COMPILED_ISSUE_S
    layer_issue_s: KernelSeconds = 0.0
    step_factor: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


class _Table(Record, frozen=True):
    """What a cost file holds.

    Attributes:
        kinds: Costs by device kind; ``NAME/device`` of a cluster file takes those of ``NAME``.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from.
    """

    kinds: dict[Text, _Kind]
    name: str | None = None
    source: str = ""


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
    """Returns the table as plain JSON data; defaults are left out, entries are sorted, so equal tables give equal text."""
    kinds = {name: _kind_to_dict(table.kinds[name]) for name in sorted(table.kinds)}
    source = {"source": table.source} if table.source else {}
    return {"format": FORMAT, "version": VERSION, "name": table.name, **source, "kinds": kinds}


def check_table(table: CostTable) -> None:
    """Checks a table built in Python like one from a file.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    try:
        data = {"kinds": {name: _kind_to_dict(costs) for name, costs in table.kinds.items()}}
    except ValueError:
        raise InputError("cost table: a key must be an op class or target, a dtype and a direction") from None
    _check_features(build(_Table, data, "cost table"))


def _check_features(table: _Table) -> None:
    for name, kind in table.kinds.items():
        for entry in (*kind.curves, *kind.targets):
            for feature in () if entry.residual is None else entry.residual.features:
                if feature not in FEATURES:
                    raise InputError(f"cost table: kinds[{show(name)}]: residual: {unknown_name('feature', feature, FEATURES)}")


def _kind_to_dict(costs: KindCosts) -> dict[str, Any]:
    data = plain(_Kind(**{name: getattr(costs, name) for name in _NUMBERS}))
    data["curves"] = [{**_named(_KEY, key), **_curve_to_dict(costs.curves[key])} for key in sorted(costs.curves)]
    if costs.measured:
        data["measured"] = [{**_named(_KEY, key), "shapes": plain(costs.measured[key])} for key in sorted(costs.measured)]
    if costs.targets:
        data["targets"] = [
            {**_named(_TARGET_KEY, key), **_curve_to_dict(entry.curve), "shapes": plain(entry.measured)}
            for key, entry in sorted(costs.targets.items())
        ]
    return data


def _named(names: tuple[str, ...], key: Key) -> dict[str, str]:
    return dict(zip(names, key, strict=True))


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    return {**plain(curve), "basis": curve.basis}


def _parse(data: dict[str, Any], default_name: str) -> CostTable:
    table = build(_Table, data, "cost table")
    kinds = {name: _costs(kind, f"cost table: kinds[{show(name)}]") for name, kind in table.kinds.items()}
    return CostTable(kinds, name=default_name if table.name is None else table.name, source=table.source)


def _costs(kind: _Kind, where: str) -> KindCosts:
    return KindCosts(
        {key: _curve(entry) for key, entry in _by_key(kind.curves, _KEY, f"{where}.curves").items()},
        {key: entry.shapes for key, entry in _by_key(kind.measured, _KEY, f"{where}.measured").items()},
        {
            key: TargetCosts(_curve(entry), entry.shapes)
            for key, entry in _by_key(kind.targets, _TARGET_KEY, f"{where}.targets").items()
        },
        **{name: getattr(kind, name) for name in _NUMBERS},
    )


def _by_key(entries: Iterable[Any], names: tuple[str, str, str], where: str) -> dict[Key, Any]:
    entry_by_key: dict[Key, Any] = {}
    for index, entry in enumerate(entries):
        key = getattr(entry, names[0]), entry.dtype, entry.direction
        if key in entry_by_key:
            raise InputError(f"{where}[{index}]: {'/'.join(key)[:80]} is given twice")
        entry_by_key[key] = entry
    return entry_by_key


def _curve(entry: Curve) -> Curve:
    values = asdict(entry)
    return Curve(**{name: values[name] for name in Curve.__struct_fields__})
