"""Cost tables and cost models of other packages, and op times from a user's function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rlplace.cluster.presets import DeviceKind
from rlplace.cost.scaled import base_name
from rlplace.cost.table import CostTable, KindCosts
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import fingerprint
from rlplace.model.graph.opgraph import OpGraph
from rlplace.plugins import COSTS, Extension, find, names, wrong

SHIPPED = Path(__file__).with_name("shipped.cost.json")


@functools.cache
def shipped_costs() -> CostTable:
    """Returns coefficients fitted on public kernel timings (source beside each)."""
    return CostTable.load(SHIPPED)


def as_costs(costs: CostTable | str | Path | None) -> CostTable:
    """Returns the table to price with: the shipped one, overridden by a user's own.

    Args:
        costs: None, a cost table, the path of a cost file, or the name of a cost model of an installed package.
    """
    if costs is None:
        return shipped_costs()
    own = own_costs(costs)
    return own if own is shipped_costs() else own.over(shipped_costs())


def with_host(
    costs: CostTable | str | Path | None, kinds: Iterable[str], op_s: float | None = None, layer_s: float | None = None
) -> CostTable:
    """Costs under a host that takes its own time to issue kernels.

    Args:
        costs: See `as_costs`.
        kinds: Names of the device kinds of its machines.
        op_s: Seconds to issue a kernel, eager or compiled; None: as in the costs.
        layer_s: Seconds to issue a layer's forward and backward; None: those of its kernels.
    """
    table = as_costs(costs)
    changes: dict[str, Any] = {} if op_s is None else {"eager_issue_s": op_s, "compiled_issue_s": op_s}
    changes |= {} if layer_s is None else {"layer_issue_s": layer_s}
    own = {name: structs.replace(table.kinds.get(name, KindCosts()), **changes) for name in map(base_name, kinds)}
    return replace(table, kinds={**table.kinds, **own})


OpTimeModel = Callable[[OpGraph, DeviceKind], Any]
"""Seconds [N] of device time of the ops of a graph on a device kind, NaN where the model does not know; None: nothing of it."""


@dataclass(frozen=True)
class ModelledCosts(CostTable):
    """A cost table whose op times come from a function, for the ops that it knows.

    The function gives device time; the host's time to issue an op is added as for every table. It may be called for any graph,
    also for parts of a captured one.

    Attributes:
        model: The function, an `OpTimeModel`.
        version: Version of the function; part of the fingerprint.
    """

    model: OpTimeModel | None = None
    version: str = ""

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """SHA-256 of the table's own and of the name and version of the function."""
        return fingerprint(
            {"table": CostTable(self.kinds, imbalance=self.imbalance).fingerprint, "model": self.name, "version": self.version}
        )

    def over(self, base: CostTable) -> CostTable:
        """Overlays this table on `base` like `CostTable.over`, with its function."""
        table = super().over(base)
        return ModelledCosts(table.kinds, table.name, table.source, table.imbalance, self.model, self.version)


def modelled_seconds(table: CostTable, graph: OpGraph, kind: DeviceKind) -> NDArray[np.float64] | None:
    """Returns device seconds [N] by the table's function, NaN where it does not know; None: it has none, or not for this kind.

    Raises:
        InputError: The function returned something else.
    """
    if not isinstance(table, ModelledCosts) or table.model is None:
        return None
    answer = table.model(graph, kind)
    if answer is None:
        return None
    seconds = np.asarray(answer)
    if seconds.shape != (graph.num_ops,) or seconds.dtype.kind not in "fiu":
        raise InputError(f"cost model {table.name!r}: expected {graph.num_ops} seconds, one per op, found {show(answer)}")
    seconds = seconds.astype(np.float64)
    known = ~np.isnan(seconds)
    if not ((seconds[known] >= 0) & (seconds[known] < 1e6)).all():
        bad = int(np.flatnonzero(known & ~((seconds >= 0) & (seconds < 1e6)))[0])
        raise InputError(f"cost model {table.name!r}: {seconds[bad]} s for op {graph.op_names[bad]!r} on {kind.name}")
    return seconds


def own_costs(costs: CostTable | str | Path) -> CostTable:
    """Returns a user's own table: the table itself, from a file, or of an installed package by name.

    A text is a name unless it looks like a path (a separator, or ``.json`` at the end) or there is a file of that name.

    Raises:
        InputError: No such file or name, or it holds impossible numbers.
    """
    if isinstance(costs, CostTable):
        return costs
    text = os.fspath(costs)
    if isinstance(costs, Path) or os.sep in text or "/" in text or text.endswith(".json") or Path(text).is_file():
        return CostTable.load(costs)
    extension = find(COSTS, text, ())
    if extension is None:
        known = names(COSTS, ())
        if not known:
            raise InputError(f"costs {show(text)}: there is no such file, and no installed package offers cost models")
        raise unknown_name("cost model", text, known)
    return _table_of(extension)


def _table_of(extension: Extension) -> CostTable:
    """Returns the table of an entry: a table, its path, a function that makes either, or an `OpTimeModel`."""
    value = extension.load()
    if callable(value) and not isinstance(value, CostTable):
        arguments = _required(value)
        if arguments == 2:
            return ModelledCosts({}, extension.name, extension.distribution, (), value, extension.distribution)
        if arguments != 0:
            raise wrong(extension, "a function of a cost model takes (graph, kind), one that makes a table takes nothing")
        try:
            value = value()
        except Exception as error:  # another package's code may raise anything
            raise wrong(extension, f"it failed with {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if isinstance(value, (str, Path)):
        return CostTable.load(value)
    if not isinstance(value, CostTable):
        raise wrong(extension, f"expected a CostTable, a path, or a function of (graph, kind), found {show(value)}")
    return value


def _required(function: Any) -> int:
    """Counts positional parameters without a default."""
    import inspect

    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return -1
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)
