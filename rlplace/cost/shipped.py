"""The cost table that comes with rlplace."""

from __future__ import annotations

import functools
from pathlib import Path

from rlplace.cost.foreign import own_costs
from rlplace.cost.table import CostTable

SHIPPED = Path(__file__).with_name("shipped.cost.json")


@functools.cache
def shipped_costs() -> CostTable:
    """Coefficients fitted on public kernel timings (source beside each)."""
    return CostTable.load(SHIPPED)


def as_costs(costs: CostTable | str | Path | None) -> CostTable:
    """The table to price with: the shipped one, with a person's own on top.

    Args:
        costs: None, a cost table, the path of a cost file, or the name of a cost model of an installed package.
    """
    if costs is None:
        return shipped_costs()
    own = own_costs(costs)
    return own if own is shipped_costs() else own.over(shipped_costs())
