"""``rlplace explain``: what bounds a plan's step, why groups sit where they do, what would change it or make it fit."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import add_model_options, load, natural, positive, print_json, say, seconds
from rlplace.cli.plans import plan_and_problem
from rlplace.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from rlplace.cli.common import Loaded

HELP = "say what bounds a plan, why groups sit where they do, and what would change it"
EXAMPLE = "example: rlplace explain gpt2.plan.json"

_PLAN = ".plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("what", metavar="PLAN|MODEL", help="*.plan.json; or a MODEL, to hear what would make it fit")
    parser.add_argument("--problem", metavar="X.problem.json", help="the plan's problem (built again from the plan's source)")
    parser.add_argument("--cluster", metavar="C", help="for a MODEL: as in 'rlplace place'")
    parser.add_argument("--group", metavar="NAME", help="alternatives of this group or module (those that matter most)")
    parser.add_argument("--groups", type=natural, default=5, metavar="N", help="alternatives of so many groups (5)")
    parser.add_argument("--no-what-if", action="store_true", help="leave out what other hardware would bring")
    parser.add_argument("--calls", type=natural, default=256, metavar="N", help="simulations of each search (256); 0: none")
    parser.add_argument("--time-limit", type=seconds, default=10.0, metavar="S", help="seconds for each search (10)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the searches (0)")
    parser.add_argument("--microbatches", type=positive, default=1, metavar="M", help="for a MODEL: micro-batches (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    if options.what.endswith(_PLAN):
        return _plan(options)
    if options.problem or options.group:
        raise InputError(f"--problem and --group go with a plan file (*{_PLAN}), {options.what} is none")
    return _model(options)


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    return {"calls": options.calls, "time_limit_s": options.time_limit, "seed": options.seed}


def _plan(options: argparse.Namespace) -> int:
    from rlplace.explaining.explain import explain

    plan, problem = plan_and_problem(options.what, options.problem, options.cluster)
    found = explain(
        problem, plan, group=options.group, groups=options.groups, hardware=not options.no_what_if, **_limits(options)
    )
    if options.json:
        print_json(found.to_dict())
    else:
        print(found.text())
    return 0


def _model(options: argparse.Namespace) -> int:
    """A MODEL that fits has nothing to relax; the plan is what can be explained then."""
    import dataclasses

    from rlplace.explaining.relax import relax
    from rlplace.planners import get_planner

    loaded = load(options.what, options.cluster, options)
    say("planning with best")
    try:
        plan = get_planner("best")(
            loaded.problem, seed=options.seed, time_limit_s=options.time_limit, microbatches=options.microbatches
        )
    except InfeasibleError:
        say("no plan fits; looking for what would")
        found = relax(loaded.problem, at=_sizes(loaded), microbatches=options.microbatches, **_limits(options))
        if options.json:
            print_json({"problem": loaded.problem.name, "feasible": False, **dataclasses.asdict(found)})
        else:
            print("\n".join(found.lines()))
        return 0
    from rlplace.explaining.explain import explain

    explained = explain(loaded.problem, plan, groups=options.groups, hardware=not options.no_what_if, **_limits(options))
    if options.json:
        print_json(explained.to_dict())
    else:
        print(explained.text())
    return 0


def _sizes(loaded: Loaded) -> Any:
    """Prices the model for other micro-batches, where it is known."""
    return None if loaded.graph is None else loaded.priced.at
