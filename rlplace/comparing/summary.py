"""From rows to one line a planner and metric: geometric means, wins and losses, bootstrap intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rlplace.comparing.records import REFERENCE, VIEWS, ComparisonRow, Summary
from rlplace.means import geometric_mean, interval, wins_ties_losses
from rlplace.planners.attempt import OK


def summarize(rows: Sequence[ComparisonRow], planners: Sequence[str]) -> tuple[Summary, ...]:
    """One summary per metric and planner; metrics are never mixed.

    A row without a plan counts for the metric in which its planner has most of its plans, as nobody knows what its plan
    would have been.

    Args:
        rows: All rows, reference rows included.
        planners: Order of the lines.
    """
    usual: dict[tuple[str, str], str] = {}
    for name in planners:
        for view in VIEWS:
            mine = [row for row in rows if row.planner == name and row.view == view and not row.reference]
            counts = Counter(row.metric for row in mine if row.status == OK)
            if counts:
                usual[name, view] = counts.most_common(1)[0][0]
    kept = [row for row in rows if not row.reference]
    by_line: dict[tuple[str, str], list[ComparisonRow]] = {}
    for row in kept:
        metric = row.metric if row.status == OK else usual.get((row.planner, row.view), row.metric)
        by_line.setdefault((metric, row.planner), []).append(row)
    against = References(rows)
    metrics = sorted({metric for metric, _ in by_line}, key=lambda m: _rank(m))
    pairs = [(metric, name) for metric in metrics for name in planners if (metric, name) in by_line]
    return tuple(_line(metric, name, by_line[metric, name], against) for metric, name in pairs)


def _rank(metric: str) -> tuple[bool, str]:
    return "," in metric, metric


class References:
    """The rows of `REFERENCE`, to look up what another row is measured against."""

    def __init__(self, rows: Iterable[ComparisonRow]) -> None:
        self._rows: dict[tuple[str, str, str, str], list[ComparisonRow]] = {}
        for row in rows:
            if row.planner == REFERENCE:
                self._rows.setdefault((row.model, row.cluster, row.view, row.metric), []).append(row)

    def of(self, row: ComparisonRow) -> ComparisonRow | None:
        """The reference on the same problem, in the same metric, with the same samples a step."""
        for other in self._rows.get((row.model, row.cluster, row.view, row.metric), ()):
            if other.samples == row.samples or row.samples is None or other.samples is None:
                return other
        return None


def _line(metric: str, name: str, mine: Sequence[ComparisonRow], against: References) -> Summary:
    # What a row without a plan would have been measured against is unknown where its planner is usually in another metric.
    references = [against.of(row) if row.metric == metric else None for row in mine]
    ratios = [row.ratio for row in mine if row.status == OK and row.ratio is not None]
    gaps = [row.gap for row in mine if row.status == OK and row.gap is not None]
    low, high = interval([math.log(ratio) for ratio in ratios])
    wins, ties, losses = wins_ties_losses(ratios)
    has = [(row.status == OK, other is not None and other.status == OK) for row, other in zip(mine, references, strict=True)]
    return Summary(
        metric=metric,
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
