"""The cost table that comes with rlplace."""

from __future__ import annotations

import functools
from pathlib import Path

from rlplace.cost.table import CostTable

SHIPPED = Path(__file__).with_name("shipped.cost.json")


@functools.cache
def shipped_costs() -> CostTable:
    """Coefficients fitted on public kernel timings (source beside each)."""
    return CostTable.load(SHIPPED)


def as_costs(costs: CostTable | str | Path | None) -> CostTable:
    """The table to price with: the shipped one, with a person's own on top.

    Args:
        costs: None, a cost table, or the path of a cost file.
    """
    if costs is None:
        return shipped_costs()
    own = costs if isinstance(costs, CostTable) else CostTable.load(costs)
    return own if own is shipped_costs() else own.over(shipped_costs())
