"""The records of a comparison: settings, problems, rows, summaries; plain values, so that they go to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import asdict, replace

from rlplace import __version__
from rlplace.placement.ask import OK
from rlplace.placement.common.bounds import largest
from rlplace.records import Count, Record, Whole
from rlplace.stats import TIE, geometric_mean, interval, wins_ties_losses

FORMAT = "rlplace.comparison"
VERSION = 2

View = Literal["tasks", "split"]
TASKS: View = "tasks"
SPLIT: View = "split"
VIEWS: dict[str, str] = {TASKS: "makespan of one step", SPLIT: "makespan of one step, backward in groups of its own"}
"""The problems that are made of one model on one cluster, and what they are compared by: numbers of two views do not compare.

``tasks``: one op a group and phase, as most planners plan. ``split``: the backward of every group is a group of its own
(`rlplace.cost.contract`).
"""

REFERENCE = "best"
"""The planner that the others are measured against; it is always run."""

_MOST = 1e18
Amount = Annotated[float, Meta(ge=0.0, lt=_MOST)]
Duration = Annotated[float, Meta(ge=1e-18, lt=_MOST)]
Ratio = Annotated[float, Meta(ge=1e-12, lt=_MOST)]
Gap = Annotated[float, Meta(gt=-1.0, lt=_MOST)]

Status = Literal["ok", "infeasible", "missing", "failed"]
"""Those of `rlplace.placement.ask`."""


class Settings(Record, frozen=True):
    """Budgets and seeds of every planner of a comparison; rows made under different settings are not comparable.

    Attributes:
        calls: Simulator calls after the floor for every search, which then has no time limit; None: `time_limit_s` applies.
        time_limit_s: Wall time of one run of a planner.
        seeds: Runs of every planner that uses its seed, with seeds 0, 1, ...
        agent: Checkpoint of the planner `agent`.
        version: Version of rlplace.
    """

    calls: Count | None = None
    time_limit_s: Amount = 5.0
    seeds: Count = 1
    agent: str = "default"
    version: str = __version__


class ProblemInfo(Record, frozen=True):
    """A problem of the comparison and its lower bounds on the step time.

    Attributes:
        model: MODEL, or the path of the problem file.
        cluster: CLUSTER; for a problem file the cluster that it was priced for, or "".
        view: One of `VIEWS`.
        fingerprint: Fingerprint of the problem.
        samples: Samples of a step.
        groups, ops, devices: Numbers of each.
        critical_path_s, work_s, largest_group_s: Lower bounds on the step time, see `rlplace.placement.common.bounds`.
        memory_forced_s: Lower bound that memory forces, see `rlplace.placement.common.bounds`.
        least_devices: Fewest devices that could hold the resident bytes and the activations at their peak; None: all cannot.
    """

    model: str
    cluster: str
    view: View
    fingerprint: str
    samples: Count
    groups: Whole
    ops: Whole
    devices: Whole
    critical_path_s: Amount
    work_s: Amount
    largest_group_s: Amount
    memory_forced_s: Amount
    least_devices: Whole | None

    @property
    def bound(self) -> tuple[float, str]:
        """The largest bound on the step time of a plan, and its name."""
        return largest(self.critical_path_s, self.work_s, self.largest_group_s, self.memory_forced_s)

    @property
    def key(self) -> tuple[str, str, View]:
        """Model, cluster and view."""
        return self.model, self.cluster, self.view


class ComparisonRow(Record, frozen=True):
    """One planner on one problem.

    Attributes:
        model, cluster, view: As in the `ProblemInfo`.
        planner: Name.
        status: "ok", "infeasible", "missing" (an extra) or "failed".
        reason: Why the status is not "ok", in one line; on an "ok" row a remark or None.
        random: The planner uses its seed; others run once.
        seeds: Runs made.
        feasible_seeds: Runs that found a plan that fits.
        step_time_s: Mean over the seeds that found a plan, simulated anew.
        spread_s: Largest minus smallest; None with fewer than two plans.
        samples_per_s: Mean.
        replicas, microbatches, schedule: Values of the fastest plan, where it is a whole strategy.
        memory_share: Peak memory, as the largest share of a device's memory, the largest over seeds; None without limits.
        simulator_calls: Mean simulator calls of a run, floor included.
        seconds: Mean wall time of a run.
        bound_s: Largest lower bound on the step time of any plan; None for whole strategies.
        binding: The bound that is largest.
        gap: ``step_time_s / bound_s - 1``.
        ratio: `step_time_s` over that of `REFERENCE` on the same problem; None where either is missing.
    """

    model: str
    cluster: str
    view: View
    planner: str
    status: Status
    reason: str | None
    random: bool
    seeds: Count
    feasible_seeds: Whole
    step_time_s: Duration | None = None
    spread_s: Amount | None = None
    samples_per_s: Amount | None = None
    replicas: Count | None = None
    microbatches: Count | None = None
    schedule: str | None = None
    memory_share: Amount | None = None
    simulator_calls: Amount = 0.0
    seconds: Amount = 0.0
    bound_s: Amount | None = None
    binding: str | None = None
    gap: Gap | None = None
    ratio: Ratio | None = None

    @property
    def feasible(self) -> bool:
        """Every run found a plan that fits."""
        return self.status == OK

    def against(self, best: ComparisonRow | None) -> ComparisonRow:
        """Returns the row with its ratio to that of `REFERENCE`."""
        if self.step_time_s is None or best is None or best.step_time_s is None or {self.status, best.status} != {OK}:
            return self
        return replace(self, ratio=self.step_time_s / best.step_time_s)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Identifies the row within a comparison."""
        return self.model, self.cluster, self.view, self.planner


class Summary(Record, frozen=True):
    """One planner over all problems of one view.

    Attributes:
        view: View of its rows.
        planner: Name.
        problems: Problems with a row of this planner.
        feasible: Problems with a plan in every run.
        compared: Feasible problems where the reference has a plan too; the figures below are over them.
        ratio: Geometric mean of the step time over that of the reference, below 1 is faster; None without problems.
        low, high: 95 % bootstrap interval of `ratio` over problems; None below three problems.
        wins, ties, losses: Faster, as fast (within `rlplace.stats.TIE`), slower than the reference.
        only_it, only_reference: Problems where one of the two alone has a plan.
        gap: Geometric mean of ``1 + gap``, minus 1, over feasible problems.
        simulator_calls, seconds: Mean of a run over all its problems.
    """

    view: str
    planner: str
    problems: Whole
    feasible: Whole
    compared: Whole
    ratio: Ratio | None
    low: Amount | None
    high: Amount | None
    wins: Whole
    ties: Whole
    losses: Whole
    only_it: Whole
    only_reference: Whole
    gap: Gap | None
    simulator_calls: Amount
    seconds: Amount


class Comparison(Record, frozen=True):
    """A comparison, complete or interrupted.

    Attributes:
        settings: Budgets and seeds of every planner.
        problems: In the requested order.
        rows: Problem by problem, planners in the requested order.
        summaries: View by view, planners in the requested order.
        complete: Every row that was asked for is there.
    """

    settings: Settings
    problems: tuple[ProblemInfo, ...]
    rows: tuple[ComparisonRow, ...]
    summaries: tuple[Summary, ...]
    complete: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the data of ``--json`` and of a ``*.json`` file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "executor": "list",
            "tie": TIE,
            "complete": self.complete,
            "settings": asdict(self.settings),
            "problems": [asdict(problem) for problem in self.problems],
            "rows": [{**asdict(row), "feasible": row.feasible} for row in self.rows],
            "summaries": [asdict(summary) for summary in self.summaries],
        }


def summarize(rows: Sequence[ComparisonRow], planners: Sequence[str]) -> tuple[Summary, ...]:
    """Returns one summary per view and planner; views are never mixed.

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
