"""`CostTable`: the coefficients of op times, per device kind, op class, dtype and direction; and its file.

A curve (`rlplace.cost.curve`) gives a time; measured shapes override it. Every curve states its `basis` and the `source` of its
numbers. Files: ``rlplace.cost`` version 1 (docs/formats.md, section Cost table).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from rlplace.cost.curve import FEATURES, Basis, Curve, Direction, KernelSeconds, MeasuredShape, Precision
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, fingerprint, read_record, write_json
from rlplace.model.graph.opgraph import OpKind
from rlplace.records import Record, Text, build, plain

FORMAT = "rlplace.cost"
VERSION = 1

_KEY = ("op", "dtype", "direction")
_TARGET_KEY = ("target", "dtype", "direction")
_NUMBERS = ("eager_issue_s", "eager_view_s", "compiled_issue_s", "layer_issue_s", "step_factor")

HOST_MODES = ("eager", "compiled")

EAGER_ISSUE_S = 25e-6
"""Host time to issue one kernel in eager mode, the work of Python, autograd and the optimizer's loop included.

Transformers on one H200 take 25 to 35 us where they wait for the host (docs/cost-model.md, Host time); 5 to 10 us is the bare
dispatch of an op."""

EAGER_VIEW_S = 2e-6
"""Host time of an op that launches nothing, in eager mode."""

COMPILED_ISSUE_S = 1.5e-6
"""Host time to issue one kernel of a compiled graph or a graph replay; 1 to 2 us is usual."""

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


@dataclass(frozen=True)
class KindCosts:
    """Costs of one device kind.

    Attributes:
        curves: Curves by key.
        measured: Timed shapes by key.
        targets: Whole ops by (target, dtype, direction), with targets as `rlplace.cost.compute.target_names` has them; an entry
            replaces curves and measured shapes of the op's class.
        eager_issue_s: Host time to issue one kernel in eager mode.
        eager_view_s: Host time of an op that launches nothing, in eager mode.
        compiled_issue_s: Host time to issue one kernel of a compiled graph.
        layer_issue_s: Host time to issue one layer's forward and backward, in place of its ops'; 0: those of its ops.
        step_factor: Multiplies every op time: measured over predicted time of whole steps.
    """

    curves: Mapping[Key, Curve] = field(default_factory=lambda: MappingProxyType({}))
    measured: Mapping[Key, tuple[MeasuredShape, ...]] = field(default_factory=lambda: MappingProxyType({}))
    targets: Mapping[Key, TargetCosts] = field(default_factory=lambda: MappingProxyType({}))
    eager_issue_s: float = EAGER_ISSUE_S
    eager_view_s: float = EAGER_VIEW_S
    compiled_issue_s: float = COMPILED_ISSUE_S
    layer_issue_s: float = 0.0
    step_factor: float = 1.0


@dataclass(frozen=True)
class CostTable:
    """Costs by device kind.

    Attributes:
        kinds: Costs by the name of a device kind.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from; not part of the fingerprint.
    """

    kinds: Mapping[str, KindCosts]
    name: str = "costs"
    source: str = ""

    def __post_init__(self) -> None:
        """Checks a table built in Python like one from a file."""
        try:
            data = {"kinds": {name: _kind_to_dict(costs) for name, costs in self.kinds.items()}}
        except ValueError:
            raise InputError("cost table: a key must be an op class or target, a dtype and a direction") from None
        for name, kind in build(_TableRecord, data, "cost table").kinds.items():
            for entry in (*kind.curves, *kind.targets):
                for feature in () if entry.residual is None else entry.residual.features:
                    if feature not in FEATURES:
                        unknown = unknown_name("feature", feature, FEATURES)
                        raise InputError(f"cost table: kinds[{show(name)}]: residual: {unknown}")

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
            kinds[name] = replace(
                own,
                curves={**other.curves, **own.curves},
                measured={**other.measured, **own.measured},
                targets={**other.targets, **own.targets},
            )
        return CostTable(kinds, name=self.name, source=self.source)

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain JSON data; defaults are left out, entries are sorted, so equal tables give equal text."""
        kinds = {name: _kind_to_dict(self.kinds[name]) for name in sorted(self.kinds)}
        source = {"source": self.source} if self.source else {}
        return {"format": FORMAT, "version": VERSION, "name": self.name, **source, "kinds": kinds}

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


class _KindRecord(Record, frozen=True):
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


class _TableRecord(Record, frozen=True):
    """Contents of a cost file.

    Attributes:
        kinds: Costs by device kind; ``NAME/device`` of a cluster file takes those of ``NAME``.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from.
    """

    kinds: dict[Text, _KindRecord]
    name: str | None = None
    source: str = ""


def _kind_to_dict(costs: KindCosts) -> dict[str, Any]:
    def entry(names: tuple[str, ...], key: Key, **values: Any) -> dict[str, Any]:
        return dict(zip(names, key, strict=True)) | values

    def curve(one: Curve) -> dict[str, Any]:
        return plain(one) | {"basis": one.basis}

    data = plain(_KindRecord(**{name: getattr(costs, name) for name in _NUMBERS}))
    data["curves"] = [entry(_KEY, key, **curve(costs.curves[key])) for key in sorted(costs.curves)]
    if costs.measured:
        data["measured"] = [entry(_KEY, key, shapes=plain(costs.measured[key])) for key in sorted(costs.measured)]
    if costs.targets:
        data["targets"] = [
            entry(_TARGET_KEY, key, **curve(whole.curve), shapes=plain(whole.measured))
            for key, whole in sorted(costs.targets.items())
        ]
    return data


def _table(data: dict[str, Any], default_name: str) -> CostTable:
    table = build(_TableRecord, data, "cost table")
    kinds = {}
    for name, kind in table.kinds.items():
        where = f"cost table: kinds[{show(name)}]"
        curves = _by_key(kind.curves, _KEY, f"{where}.curves")
        measured = _by_key(kind.measured, _KEY, f"{where}.measured")
        targets = _by_key(kind.targets, _TARGET_KEY, f"{where}.targets")
        kinds[name] = KindCosts(
            {key: _curve(entry) for key, entry in curves.items()},
            {key: entry.shapes for key, entry in measured.items()},
            {key: TargetCosts(_curve(entry), entry.shapes) for key, entry in targets.items()},
            **{number: getattr(kind, number) for number in _NUMBERS},
        )
    return CostTable(kinds, default_name if table.name is None else table.name, table.source)


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
