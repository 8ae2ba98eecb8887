"""`CostTable`: the coefficients of op times, per device kind, op class, dtype and direction; and its file.

A curve (`rlplace.cost.curve`) gives a time; measured shapes override it. Every curve states its `basis` and the `source` of its
numbers. Files: ``rlplace.cost`` version 1 (docs/formats.md, section Cost table).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from rlplace.cost.curve import Curve, Direction, KernelSeconds, MeasuredShape, Precision
from rlplace.errors import InputError, show
from rlplace.files import check_header, check_keys, fingerprint, read_record, write_json
from rlplace.model.graph.opgraph import OpKind
from rlplace.records import Record, Text, build, plain

FORMAT = "rlplace.cost"
VERSION = 1

HOST_MODES = ("eager", "compiled")

EAGER_ISSUE_S = 25e-6
"""Host time to issue one kernel in eager mode, the work of Python, autograd and the optimizer's loop included.

Transformers on one H200 take 25 to 35 us where they wait for the host (docs/cost-model.md, Host time); 5 to 10 us is the bare
dispatch of an op."""

EAGER_VIEW_S = 2e-6
"""Host time of an op that launches nothing, in eager mode."""

COMPILED_ISSUE_S = 1.5e-6
"""Host time to issue one kernel of a compiled graph or a graph replay; 1 to 2 us is usual."""

IMBALANCE = 1.1
"""Tokens of the busiest device of an expert group over the mean, where none was counted: an assumption about routers that are
trained to balance (docs/cost-model.md)."""

Key = tuple[str, str, str]
"""Op class (`rlplace.model.graph.opgraph.OP_KINDS`), dtype (`PRECISIONS`), direction (`DIRECTIONS`)."""


@dataclass(frozen=True)
class TargetCosts:
    """Costs of whole ops of one target on one device: all kernels of the op, launches included, as one curve.

    Attributes:
        curve: Time over the FLOPs and bytes that the op graph counts for the op.
        measured: Timed shapes, which override the curve.
    """

    curve: Curve
    measured: tuple[MeasuredShape, ...] = ()


class KindCosts(Record, frozen=True):
    """Costs of one device kind.

    Attributes:
        curves: Curves by key.
        measured: Timed shapes by key, which override curves.
        targets: Whole ops by (target, dtype, direction), as `rlplace calibrate` fits them, with targets as
            `rlplace.cost.compute.target_names` has them; an entry replaces all that the op's class has, in eager mode.
        eager_issue_s: Host time to issue one kernel in eager mode.
        eager_view_s: Host time of an op that launches nothing, in eager mode.
        compiled_issue_s: Host time to issue one kernel of a compiled graph.
        layer_issue_s: Host time to issue one layer's forward and backward, in place of its ops'; 0: those of its ops.
        step_factor: Multiplies every op time: measured over predicted time of whole steps.
    """

    curves: Mapping[Key, Curve] = {}
    measured: Mapping[Key, tuple[MeasuredShape, ...]] = {}
    targets: Mapping[Key, TargetCosts] = {}
    eager_issue_s: KernelSeconds = EAGER_ISSUE_S
    eager_view_s: KernelSeconds = EAGER_VIEW_S
    compiled_issue_s: KernelSeconds = COMPILED_ISSUE_S
    layer_issue_s: KernelSeconds = 0.0
    step_factor: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


@dataclass(frozen=True)
class CostTable:
    """Costs by device kind.

    Attributes:
        kinds: Costs by the name of a device kind.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from; not part of the fingerprint.
        imbalance: Pairs of an expert degree and the tokens of its busiest device over the mean.
    """

    kinds: Mapping[str, KindCosts]
    name: str = "costs"
    source: str = ""
    imbalance: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Checks a table built in Python like one from a file."""
        try:
            _kinds({name: _kind_to_dict(costs) for name, costs in self.kinds.items()})
        except ValueError as error:
            raise (
                error
                if isinstance(error, InputError)
                else InputError("cost table: a key must be an op class or target, a dtype and a direction")
            ) from None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON without `name` and `source`."""
        return fingerprint(self.to_dict())

    def over(self, base: CostTable) -> CostTable:
        """Overlays this table on `base`, entry by entry; entries are single curves and lists of measured shapes.

        Issue times and the step factor of a kind come from this table as soon as it names the kind.
        """
        kinds = dict(base.kinds)
        for name, own in self.kinds.items():
            other = base.kinds.get(name, KindCosts())
            kinds[name] = structs.replace(
                own,
                curves={**other.curves, **own.curves},
                measured={**other.measured, **own.measured},
                targets={**other.targets, **own.targets},
            )
        return CostTable(kinds, name=self.name, source=self.source, imbalance=self.imbalance or base.imbalance)

    def busiest(self, expert: int) -> float:
        """Returns the tokens of the busiest device of an expert group over the mean.

        Between two known degrees the larger counts, as imbalance grows with the degree; beyond all the largest.
        """
        known = sorted(self.imbalance)
        return next((factor for degree, factor in known if degree >= expert), known[-1][1] if known else IMBALANCE)

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain JSON data; defaults are left out, entries are sorted, so equal tables give equal text."""
        kinds = {name: _kind_to_dict(self.kinds[name]) for name in sorted(self.kinds)}
        source = {"source": self.source} if self.source else {}
        more = {"imbalance": [list(pair) for pair in sorted(self.imbalance)]} if self.imbalance else {}
        return {"format": FORMAT, "version": VERSION, "name": self.name, **source, "kinds": kinds, **more}

    def save(self, path: str | Path) -> None:
        """Writes ``*.cost.json``, atomically."""
        write_json(path, self.to_dict())

    @staticmethod
    def from_dict(data: dict[str, Any]) -> CostTable:
        """Builds a cost table from parsed JSON, with the same checks as `load`."""
        return _table(check_header(data, FORMAT, VERSION, where="cost table"), "costs")

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """Reads and checks a cost file; see docs/formats.md.

        Raises:
            InputError: The file is missing, malformed, newer than this code, or holds impossible numbers.
        """
        name = Path(path).name.removesuffix(".json").removesuffix(".cost")
        return read_record(path, FORMAT, VERSION, lambda data: _table(data, name))


class _OpKey(Record, frozen=True):
    """Key of curves and shapes in a file.

    Attributes:
        op: Op class.
        dtype: Precision; memory-bound classes have float32.
        direction: Part of the step; `backward_weight` is priced by `backward` where it is missing.
    """

    op: OpKind
    dtype: Precision
    direction: Direction


class _TargetKey(Record, frozen=True):
    """Key of whole ops in a file.

    Attributes:
        target: Forward op as torch knows it, also for its backward, with ``+dropout``, ``+groups`` or ``+depthwise`` where that
            applies; the optimizer's name for updates.
        dtype: Of its tensors.
        direction: Part of the step.
    """

    target: Text
    dtype: Text
    direction: Direction


_KEYS: Mapping[str, type[Record]] = {"curves": _OpKey, "measured": _OpKey, "targets": _TargetKey}
"""Lists of a kind in a file: each entry has a key, each key once; the fields of a curve, but for `measured`; and `shapes`."""


class _TableRecord(Record, frozen=True):
    """Contents of a cost file.

    Attributes:
        kinds: Costs by device kind, as `_KEYS` says; ``NAME/device`` of a cluster file takes those of ``NAME``.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from.
        imbalance: Pairs of an expert degree and the tokens of its busiest device over the mean.
    """

    kinds: dict[Text, dict[str, Any]]
    name: str | None = None
    source: str = ""
    imbalance: tuple[tuple[Annotated[int, Meta(ge=2)], Annotated[float, Meta(ge=1, le=1e6)]], ...] = ()


def _kind_to_dict(costs: KindCosts) -> dict[str, Any]:
    def entries(name: str) -> list[dict[str, Any]]:
        names = _KEYS[name].__struct_fields__
        return [{**dict(zip(names, key, strict=True)), **_entry(value)} for key, value in sorted(getattr(costs, name).items())]

    numbers = plain(structs.replace(costs, curves={}, measured={}, targets={}))
    return numbers | {name: entries(name) for name in _KEYS if name == "curves" or getattr(costs, name)}


def _entry(value: Curve | TargetCosts | tuple[MeasuredShape, ...]) -> dict[str, Any]:
    if isinstance(value, Curve):
        return {**plain(value), "basis": value.basis}
    if isinstance(value, TargetCosts):
        return _entry(value.curve) | {"shapes": plain(value.measured)}
    return {"shapes": plain(value)}


def _table(data: dict[str, Any], default_name: str) -> CostTable:
    table = build(_TableRecord, data, "cost table")
    name = default_name if table.name is None else table.name
    return CostTable(_kinds(table.kinds), name, table.source, table.imbalance)


def _kinds(kinds: Mapping[str, dict[str, Any]]) -> dict[str, KindCosts]:
    build(dict[Text, Any], dict(kinds), "cost table: kinds")
    result = {}
    for name, data in kinds.items():
        where = f"cost table: kinds[{show(name)}]"
        lists = {key: _by_key(data[key], key, f"{where}.{key}") for key in _KEYS if key in data}
        result[name] = build(KindCosts, data | lists, where)
    return result


def _by_key(entries: Any, name: str, where: str) -> dict[Key, Any]:
    result: dict[Key, Any] = {}
    names = _KEYS[name].__struct_fields__
    for index, entry in enumerate(build(list[dict[str, Any]], entries, where)):
        at = f"{where}[{index}]"
        key = structs.astuple(build(_KEYS[name], {key: entry[key] for key in names if key in entry}, at))
        if key in result:
            raise InputError(f"{at}: {'/'.join(key)[:80]} is given twice")
        rest = {key: value for key, value in entry.items() if key not in names}
        shapes = () if name == "curves" else build(tuple[MeasuredShape, ...], rest.pop("shapes", ()), f"{at}.shapes")
        if name == "measured":
            check_keys(rest, (), (), at)
            result[key] = shapes
            continue
        check_keys(rest, ("basis",), Curve.__struct_fields__, at)
        curve = build(Curve, rest, at)
        result[key] = curve if name == "curves" else TargetCosts(curve, shapes)
    return result
