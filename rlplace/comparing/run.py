"""The comparison itself: every planner on every problem, each row stored as soon as it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlplace.comparing.bounds import problem_info
from rlplace.comparing.measure import Target, run_row, warm_up
from rlplace.comparing.records import COST, OK, RATE, REFERENCE, Comparison, Row
from rlplace.comparing.store import Store
from rlplace.comparing.summary import References, summarize
from rlplace.cost.split import split_backward
from rlplace.errors import InputError, RlplaceError
from rlplace.placing import Priced
from rlplace.planners import get_planner

APART_PLANNERS = frozenset({"bipartition"})
"""Planners that place the backward of a group apart from its forward: they are run on the split problem only."""

Report = Callable[[str, bool], None]
"""Called with what happens next and whether a row has just been finished."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model on a cluster.

    Attributes:
        model: MODEL, as it stands in the rows.
        cluster: CLUSTER likewise.
        load: Captures and prices it.
    """

    model: str
    cluster: str
    load: Callable[[], Priced]


def _asked(planners: Sequence[str], split: bool) -> dict[bool, list[str]]:
    """Planners by whether the problem is split, the reference first where any other is run."""
    whole = [name for name in planners if name not in APART_PLANNERS]
    apart = list(planners) if split else [name for name in planners if name in APART_PLANNERS]
    return {
        flag: names if not names else [REFERENCE, *(name for name in names if name != REFERENCE)]
        for flag, names in ((False, whole), (True, apart))
    }


def count_rows(planners: Sequence[str], *, split: bool = False) -> int:
    """Rows of one case, without those that are only there for reference in another metric."""
    return sum(len(names) for names in _asked(planners, split).values())


def compare(
    cases: Iterable[Case],
    planners: Sequence[str],
    store: Store,
    *,
    split: bool = False,
    report: Report | None = None,
    strict: bool = False,
) -> list[tuple[Case, RlplaceError]]:
    """Runs what is not in the store yet.

    Args:
        cases: The problems; each is loaded once, in order.
        planners: Names; `REFERENCE` is run in any case, before the others.
        store: Holds settings and rows; `gather` makes the comparison of it, also when this function was interrupted.
        split: All planners on the split problem as well.
        report: Told about progress.
        strict: A planner's bug ends the comparison with its traceback, instead of being a row.

    Returns:
        The cases that could not be loaded, with the reason; the others are compared all the same.

    Raises:
        InputError: An unknown planner, or a problem that differs from the one in the store.
    """
    tell = report or (lambda text, finished: None)
    for name in planners:
        get_planner(name)
    if store.settings.global_batch is not None:
        if split or APART_PLANNERS & set(planners):
            raise InputError("a global batch is not split over a problem whose backward is apart; leave one of them out")
        if store.settings.microbatches > 1 or store.settings.schedule is not None:
            raise InputError("a global batch chooses micro-batches and schedule itself; leave them out, or the global batch")
    if store.settings.schedule is not None and store.settings.microbatches == 1:
        raise InputError("a schedule is for several micro-batches; give their number as well")
    warm: set[str] = set()
    failures: list[tuple[Case, RlplaceError]] = []
    for case in cases:
        try:
            priced = case.load()
        except RlplaceError as error:
            failures.append((case, error))
            continue
        for apart, names in _asked(planners, split).items():
            if not names:
                continue
            given = Priced.problem(split_backward(priced.first)) if apart else priced
            info = problem_info(given.first, case.model, case.cluster, split=apart)
            store.add_problem(info)
            target = Target.of(case.model, case.cluster, given, split=apart)
            for name in names:
                if (case.model, case.cluster, apart, name, False, None, None) in store.rows:
                    tell("", True)
                    continue
                if name not in warm:
                    warm_up(name, store.settings)
                    warm.add(name)
                tell(f"{case.model} on {case.cluster or 'its devices'}{', split' if apart else ''}: {name}", False)
                _finish(run_row(name, target, store.settings, strict=strict), target, store)
                tell("", True)
    return failures


def _finish(row: Row, target: Target, store: Store) -> None:
    """Stores a row with its ratio, after the row that it is measured against."""
    other = row if row.planner == REFERENCE else References(store.rows.values()).of(row)
    if other is None and not row.metric.startswith(COST) and row.status == OK and row.samples is not None:
        batch = row.samples if row.metric.startswith(RATE) else None
        settings = dataclasses.replace(store.settings, global_batch=batch, microbatches=1, schedule=None)
        made = run_row(REFERENCE, target, settings)
        # Even without a plan it is the row for this metric and this many samples, so that it is not tried again.
        other = dataclasses.replace(made, reference=True, metric=row.metric, samples=row.samples)
        if other.key not in store.rows:
            store.add_row(other if other.status != OK else dataclasses.replace(other, ratio=1.0))
    ratio = None
    if row.status == OK and not row.metric.startswith(COST) and other is not None and other.status == OK:
        assert row.step_time_s is not None and other.step_time_s is not None
        ratio = row.step_time_s / other.step_time_s
    store.add_row(dataclasses.replace(row, ratio=ratio))


def gather(store: Store, cases: Sequence[Case], planners: Sequence[str], *, split: bool = False) -> Comparison:
    """The comparison of what is in the store, in the order of `cases` and `planners`; others' rows are left out."""
    asked = _asked(planners, split)
    order = [REFERENCE, *planners] if REFERENCE not in planners else list(planners)
    problems, rows, complete = [], [], True
    for case in cases:
        for apart, names in asked.items():
            if not names:
                continue
            info = store.problems.get((case.model, case.cluster, apart))
            mine = [r for r in store.rows.values() if (r.model, r.cluster, r.split) == (case.model, case.cluster, apart)]
            mine = [r for r in mine if r.planner in names]
            mine.sort(key=lambda r: (r.reference, order.index(r.planner)))
            complete &= {r.planner for r in mine if not r.reference} >= set(names)
            rows += mine
            if info is not None:
                problems.append(info)
    return Comparison(store.settings, tuple(problems), tuple(rows), summarize(rows, order), complete)
