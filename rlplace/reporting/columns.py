"""How the page stores its columns: times as whole numbers of a small unit, names without what the one before begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence

_TICKS = 1e8
"""A step has between a tenth of this and this many ticks: more than any screen shows at any zoom that is offered."""


def ticks_of(step_s: float) -> float:
    """A power of ten of a second to count time in."""
    return 10.0 ** math.ceil(math.log10(step_s / _TICKS)) if step_s > 0 else 1.0


def front_coded(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Per name how much it shares with the one before, in UTF-16 units, which is how browsers count, and the rest of it."""
    shared, rest, before = [], [], ""
    for name in names:
        least = min(len(before), len(name))
        same = next((i for i in range(least) if before[i] != name[i]), least)
        shared.append(len(name[:same].encode("utf-16-le", "surrogatepass")) // 2)
        rest.append(name[same:])
        before = name
    return shared, rest
