"""``rlplace explain``: what bounds a plan's step, why groups sit where they do, what would change it or make it fit; and
``rlplace report``: a plan as an HTML page.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.cli.capture_cache import cached
from rlplace.cli.models import load, machine_of
from rlplace.cli.options import ModelOptions, Options, argument, flag, natural, option, print_json, say, seconds, show
from rlplace.cli.plans import placement_of, strategy_of
from rlplace.errors import InfeasibleError, InputError
from rlplace.explanation.report import DEFAULT_PLANNERS
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cost.timings import PlanTiming
    from rlplace.explanation.comparison import WhatIf
    from rlplace.explanation.explain import Explanation
    from rlplace.explanation.report.data import ReportData
    from rlplace.placement.ask import Priced
    from rlplace.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.problem import Problem


_PLAN = ".plan.json"


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ModelOptions):
    """Options of the verb."""

    HELP = "say what bounds a plan, why groups sit where they do, and what would change it or make it fit"
    EXAMPLE = "example: rlplace explain gpt2.plan.json"

    what: str = argument("PLAN|MODEL", "*.plan.json; or a MODEL as for 'rlplace place', to hear what would make it fit")
    problem: str | None = option("the plan's problem (built again from the plan's source)", None, "X.problem.json")
    cluster: str | None = option("for a MODEL, as for 'rlplace place'; for a PLAN that does not name it", None, "C")
    group: str | None = option("alternatives of this group or module (those that matter most)", None, "NAME")
    groups: int = option("alternatives of so many groups (5)", natural, "N", default=5)
    no_what_if: bool = flag("leave out what other hardware would bring")
    calls: int = option("simulations of each search (256); 0: none", natural, "N", default=256)
    time_limit: float = option("seconds for each planner (10)", seconds, "S", default=10.0)
    seed: int = option("seed of the searches (0)", natural, "N", default=0)
    space: str | None = option("for a MODEL, as for 'rlplace place'; placement: groups, no strategies", None, "S")

    def run(self) -> int:
        """Runs the verb; that a plan or model does not fit is a result, not a failure."""
        from rlplace.plan.plan import PlacementPlan
        from rlplace.planned import Planned

        option = "--problem" if self.problem else "--group" if self.group else None
        if not self.what.endswith(_PLAN):
            if option:
                raise InputError(f"{option} goes with a plan file (*{_PLAN}), which {self.what} is not")
            return _model(self)
        _refuse_model_options(self)
        plan = PlacementPlan.load(self.what)
        if plan.strategy is None:
            show(_plan(self), self)
        elif option:
            raise InputError(f"{self.what} is a whole strategy, which places no groups of a problem; leave {option} out")
        else:
            _show_strategy(Planned(plan, self.cluster, cached=cached), self)
        return 0


def _refuse_model_options(options: ExplainOptions) -> None:
    if words := [*options.model_words(), *options.given(("space",))]:
        raise InputError(f"{options.what} says itself what it was made from; leave {words[0]} out, or name the model instead")


def _limits(options: ExplainOptions) -> dict[str, Any]:
    return {"calls": options.calls, "time_limit_s": options.time_limit, "seed": options.seed}


def _show_strategy(planned: Planned, options: ExplainOptions) -> None:
    """Shows a whole strategy as ``rlplace place`` did, what bounds it and what would change it.

    Where the plan's model cannot be built again, it says so and shows the plan alone.
    """
    from rlplace.cli.plan_tables import show_strategy
    from rlplace.explanation.comparison import what_if_lines
    from rlplace.explanation.strategies import StrategyStep

    machine = planned.cluster
    if not options.json:
        show_strategy(planned.plan, machine)
    say("pricing the model again for what bounds the step; --no-what-if leaves out what other hardware would bring")
    bounds = None
    changes: Sequence[WhatIf] = ()
    try:
        step = StrategyStep(planned)
        bounds = step.bounds()
    except InputError as error:
        say(f"what bounds the step, and what other hardware would bring, is not known: {error}")
    else:
        if not options.no_what_if:
            changes = step.what_if(calls=options.calls, time_limit_s=options.time_limit)
    if options.json:
        bounds_data = None if bounds is None else bounds.to_dict()
        print_json(
            {**planned.plan.to_dict(), "bounds": bounds_data, "what_if": [dataclasses.asdict(entry) for entry in changes]}
        )
        return
    if bounds is not None:
        print("\n" + "\n".join(bounds.lines()))
    if changes:
        print("\n" + "\n".join(what_if_lines(changes)))


def _plan(options: ExplainOptions) -> Explanation:
    from rlplace.explanation.explain import explain

    planned = placement_of(options.what, options.problem, options.cluster)
    say("simulating the plan and what is near it")
    source = (planned.plan.source or {}).get("graph") or {}
    known = options.problem is None and isinstance(source.get("model"), str)

    @functools.cache
    def problem_at(samples: int) -> Problem:
        say(f"capturing one training step of {samples} samples")
        return planned.problem_at(samples)

    return explain(
        planned.problem,
        planned.plan,
        group=options.group,
        groups=options.groups,
        hardware=not options.no_what_if,
        at=problem_at if known else None,
        **_limits(options),
    )


def _model(options: ExplainOptions) -> int:
    """Explains the answer of ``rlplace place``; where no strategy or placement fits, says what would make the model fit."""
    from rlplace.cli.place import PlaceOptions, answer
    from rlplace.explanation.explain import explain
    from rlplace.placement import get_planner
    from rlplace.planned import Planned

    asked = PlaceOptions(
        model=options.what, cluster=options.cluster, space=options.space, time_limit=options.time_limit, seed=options.seed,
        **options.shared(),
    )  # fmt: skip
    if asked.placement_reason is None:
        try:
            plan, _ = answer(asked)
            if plan.strategy is not None:
                _show_strategy(Planned(plan, machine_of(asked.cluster), cached=cached), options)
                return 0
            options = dataclasses.replace(options, batch=plan.samples)
        except InfeasibleError as error:
            say(f"no whole strategy fits: {error}")
    loaded = load(options.what, options.cluster, options)
    problem, limit_s = loaded.first, options.time_limit
    say("planning with best")
    try:
        plan = get_planner("best")(problem, seed=options.seed, time_limit_s=limit_s)
    except InfeasibleError:
        _relax(loaded, options)
        return 0
    show(explain(problem, plan, groups=options.groups, hardware=not options.no_what_if, **_limits(options)), options)
    return 0


def _relax(loaded: Priced, options: ExplainOptions) -> None:
    from rlplace.explanation.relax import relax

    say("no plan found; trying what would make it fit")
    more: dict[str, Any] = {}
    if loaded.build is not None:
        finer = functools.partial(loaded.build, loaded.graph, groups=4 * options.granularity)
        more = {"at": functools.cache(loaded.at), "finer": finer}
    relaxations = relax(loaded.first, **more, **_limits(options))
    if options.json:
        print_json({"problem": loaded.first.name, "feasible": False, "relaxations": dataclasses.asdict(relaxations)})
    else:
        print("\n".join(relaxations.lines()))


NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options of the verb."""

    HELP = "write an HTML report of a plan"
    EXAMPLE = "example: rlplace report bert.plan.json --out report.html"

    plan: str = argument("PLAN", "plan file")
    problem: str | None = option("the plan's problem; default: built again from the plan's source", None, "X.problem.json")
    cluster: str | None = option("the plan's cluster, where the plan does not say it", None, "C")
    out: str = option("the page", None, "FILE.html", required=True)
    planners: str = option(
        f"planners to compare with, or {NONE} ({','.join(DEFAULT_PLANNERS)})", None, "A,B", default=",".join(DEFAULT_PLANNERS)
    )
    seed: int = option("seed of the planners (0)", natural, "N", default=0)
    time_limit: float = option("seconds per planner (2)", seconds, "S", default=2.0)
    measurements: list[str] | None = option(
        "measured step times: a *.timings.json of rlplace measure --plans", None, "FILE", action="append"
    )

    def run(self) -> int:
        """Runs the verb; an infeasible plan has a report too."""
        from rlplace.explanation.report.report import report
        from rlplace.files import check_output
        from rlplace.plan import PlacementPlan

        check_output(self.out)
        whole = PlacementPlan.load(self.plan)
        if whole.strategy is not None:
            return _show_page(self, _strategy_page(whole, self))
        planned = placement_of(self.plan, self.problem, self.cluster)
        names = [name.strip() for name in self.planners.split(",") if name.strip()]
        data = report(
            planned.problem,
            planned.plan,
            self.out,
            planners=[] if names == [NONE] else names,
            measurements=_measured(self),
            seed=self.seed,
            time_limit_s=self.time_limit,
            progress=lambda name: say(f"planning with {name}"),
        )
        return _show_page(self, data)


def _strategy_page(plan: PlacementPlan, options: ReportOptions) -> ReportData:
    """Returns the report of a whole strategy."""
    from rlplace.explanation.report.report import render
    from rlplace.explanation.timeline import strategy_page
    from rlplace.files import write_text

    if options.problem:
        raise InputError(f"{options.plan} is a whole strategy, which places no ops of a problem; leave --problem out")
    data = strategy_page(strategy_of(plan, options.plan, options.cluster), measured=_measured(options))
    write_text(options.out, render(data))
    return data


def _show_page(options: ReportOptions, data: ReportData) -> int:
    """Says what was written."""
    line = data.timeline
    if options.json:
        print_json(
            {
                "written": [options.out],
                "step_time_s": line.step_time_s,
                "feasible": line.feasible,
                "violations": list(line.violations),
            }
        )
        return 0
    print(f"wrote {options.out}")
    verdict = "feasible" if line.feasible else "infeasible: " + "; ".join(line.violations)
    print(f"step time {ms(line.step_time_s)} ms, {line.samples} samples, {verdict}")
    return 0


def _measured(options: ReportOptions) -> list[PlanTiming]:
    """Returns the plans of timings files, in the order given."""
    from rlplace.cost.timings import PlanTimings

    return [timing for path in options.measurements or () for timing in PlanTimings.load(path).plans]
