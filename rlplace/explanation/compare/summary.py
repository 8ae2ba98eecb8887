"""From rows to one line a planner and view: geometric means, wins and losses, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from rlplace.explanation.compare.records import REFERENCE, VIEWS, ComparisonRow, Summary
from rlplace.placement.attempt import OK
from rlplace.stats import geometric_mean, interval, wins_ties_losses


def summarize(rows: Sequence[ComparisonRow], planners: Sequence[str]) -> tuple[Summary, ...]:
    """One summary per view and planner; views are never mixed.

    Args:
        rows: All rows.
        planners: Order of the lines.
    """
    by_line: dict[tuple[str, str], list[ComparisonRow]] = {}
    for row in rows:
        by_line.setdefault((row.view, row.planner), []).append(row)
    solved = {row.key[:3] for row in rows if row.planner == REFERENCE and row.status == OK}
    pairs = [(view, name) for view in VIEWS for name in planners if (view, name) in by_line]
    return tuple(_line(view, name, by_line[view, name], solved) for view, name in pairs)


def _line(view: str, name: str, mine: Sequence[ComparisonRow], solved: Collection[tuple[str, ...]]) -> Summary:
    ratios = [row.ratio for row in mine if row.status == OK and row.ratio is not None]
    gaps = [row.gap for row in mine if row.status == OK and row.gap is not None]
    low, high = interval([math.log(ratio) for ratio in ratios])
    wins, ties, losses = wins_ties_losses(ratios)
    has = [(row.status == OK, row.key[:3] in solved) for row in mine]
    return Summary(
        view=view,
        planner=name,
        problems=len(mine),
        feasible=sum(row.status == OK for row in mine),
        compared=len(ratios),
        ratio=geometric_mean(ratios),
        low=low,
        high=high,
        wins=wins,
        ties=ties,
        losses=losses,
        only_it=sum(own and not other for own, other in has),
        only_reference=sum(other and not own for own, other in has),
        gap=None if not gaps else math.exp(sum(math.log1p(gap) for gap in gaps) / len(gaps)) - 1.0,
        simulator_calls=sum(row.simulator_calls for row in mine) / len(mine),
        seconds=sum(row.seconds for row in mine) / len(mine),
    )
