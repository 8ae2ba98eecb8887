"""``rlplace finetune``: runs strategies on a real cluster, learns what the cluster is like, and ends with the best that ran."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import (
    add_model_options,
    asked_batch,
    capture_sizes,
    compile_first,
    costs_of,
    natural,
    note_machine,
    positive,
    print_json,
    print_table,
    rate,
    say,
    seconds,
)
from rlplace.cli.strategy import machine_of, question_of
from rlplace.errors import InputError
from rlplace.plan.strategy import uniform_words
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cluster import Cluster
    from rlplace.measure.log import Run
    from rlplace.measure.session import Session
    from rlplace.plan.plan import PlacementPlan
    from rlplace.strategy.search.tries import SearchProblem

HELP = "run strategies on a real cluster and learn from them"
EXAMPLE = "example: rlplace finetune hf:gpt2 --cluster host --runs 5 --log gpt2.runs.jsonl --out best.plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="as for rlplace place; left out with --export-runs")
    add("--cluster", metavar="C", help="the devices of the runs; host (default)")
    add("--runs", type=positive, default=5, metavar="N", help="strategies to run (5)")
    add("--launch", metavar="COMMAND", help="how a plan is run, with {plan} and {timings}; default: torchrun on this machine")
    add("--timeout", type=rate, default=600.0, metavar="S", help="seconds after which a run counts as crashed (600)")
    add("--device", choices=("cpu", "cuda"), help="for runs on this machine (cuda where there is a GPU)")
    add("--log", metavar="FILE", help="file of runs, *.runs.jsonl: what it holds counts, and the session goes on from there")
    add("--site", default="", metavar="TEXT", help="tells clusters apart that are planned for alike")
    add("--rule", default="improvement", metavar="NAME", help="chooses runs: improvement (default), calibrate, list")
    add("--space", metavar="S", help="what may be chosen, as for rlplace place")
    add("--time-limit", type=seconds, default=5.0, metavar="S", help="seconds for the planner's first answer (5)")
    add("--seed", type=natural, default=0, metavar="N", help="seed (0)")
    add("--from", dest="others", nargs="+", metavar="FILE", help="runs elsewhere on such devices, *.runs.jsonl, count, too")
    add("--out", metavar="P.plan.json", help="where the best plan that ran goes")
    add("--export-runs", metavar="FILE", help="write the runs of --log for others: no names of machines or modules, no code")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output
    from rlplace.measure.log import RunLog, write_shared

    for output in (options.out, options.log, options.export_runs):
        if output:
            check_output(output)
    if options.export_runs and not options.log:
        raise InputError("finetune: --export-runs writes the runs of a file; name it with --log")
    if options.model is None and not options.export_runs:
        raise InputError("finetune: name a MODEL whose strategies are run")
    log = RunLog(options.log)
    if options.model is not None:
        _session(options, log)
    if options.export_runs:
        write_shared(options.export_runs, log.runs)
        say(f"wrote {options.export_runs}")
    return 0


def _session(options: argparse.Namespace, log: Any) -> None:
    from rlplace.measure.launch import launcher, local_command
    from rlplace.measure.session import Session

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run in progress is ended, too
    machine = machine_of(options)
    command = options.launch or local_command(machine, options.device)
    launch = launcher(command, machine, timeout_s=options.timeout)
    note_machine(options.cluster, machine)
    others = _others(options, machine)
    question, plan = _planned(options, machine)
    say("choosing what may be worth a run")
    session = Session(
        question, plan, launch, log=log, rule=options.rule, seed=options.seed, site=options.site, elsewhere=others
    )
    if session.belief.ran:
        say(f"{len(session.belief.ran)} runs of {options.log} are known")
    ran: list[tuple[PlacementPlan, Run]] = []
    for each in session.runs(options.runs):
        ran.append(each)
        say(f"run {len(ran)}: {_said(each[1])}, {uniform_words(_strategy(each[0]))}")
    _finish(options, session, ran)


def _others(options: argparse.Namespace, machine: Cluster) -> tuple[Run, ...]:
    """Runs elsewhere that tell of this cluster."""
    if not options.others:
        return ()
    from rlplace.measure.log import read_runs
    from rlplace.measure.session import telling

    runs = [run for path in options.others for run in read_runs(path)]
    found = telling(runs, machine)
    say(f"{len(found)} of {len(runs)} runs elsewhere tell of this cluster: they took a time on devices of the same kinds")
    return found


def _planned(options: argparse.Namespace, machine: Cluster) -> tuple[SearchProblem, PlacementPlan]:
    """Returns the question, and the planner's answer."""
    from rlplace.api import CLASSICAL, FIXED, answer, default_batch

    fixed = {name: getattr(options, name, None) for name in FIXED}
    costs = costs_of(options, machine)
    batch, samples = asked_batch(options.model, options)
    batch = batch or default_batch(machine)
    compile_first("strategy")
    captured = capture_sizes(options.model, options, samples)
    began_s, pricing = time.monotonic(), {"costs": costs, "host": options.host_mode}
    plan = answer(
        captured, machine, space=options.space, fixed=fixed, planner=CLASSICAL, batch=batch,
        began_s=began_s, time_limit_s=options.time_limit, seed=options.seed, **pricing,
    ).strategy  # fmt: skip
    asked = {"space": options.space, "fixed": fixed, "planner": CLASSICAL}
    return question_of(captured, machine, batch, **pricing, **asked), plan


def _strategy(plan: PlacementPlan) -> Any:
    assert plan.strategy is not None
    return plan.strategy


def _said(run: Run) -> str:
    """What became of a run."""
    if run.median_s is None:
        return f"{run.status.replace('_', ' ')} ({run.reason})"
    return f"{ms(run.median_s)} ms, {ms(run.expected_s)} were expected"


def _finish(options: argparse.Namespace, session: Session, ran: list[tuple[PlacementPlan, Run]]) -> None:
    plan, best = session.best()
    if options.out:
        plan.save(options.out)
        say(f"wrote {options.out}")
    left = session.left_to_gain()
    if options.json:
        rest = None if left is None else {"strategy": _strategy(left[0]).to_dict(), "expected_s": left[1]}
        keys = ("strategy", "status", "median_s", "expected_s", "reason")
        rows = [{key: getattr(run, key) for key in keys} for _, run in ran]
        print_json({"best": plan.to_dict(), "step_s": best.step_s, "runs": rows, "left": rest})
        return
    shown = [_row(*each) for each in ran]
    print_table(["priced ms", "expected ms", "measured ms", "fits", "<strategy"], shown)
    print(f"the best that ran takes {ms(best.step_s)} ms: {_words(plan)}")
    if left is not None:
        print(f"the most promising that did not run is expected to take {ms(left[1])} ms: {_words(left[0])}")


def _row(plan: PlacementPlan, run: Run) -> list[str]:
    measured = run.status.replace("_", " ") if run.median_s is None else ms(run.median_s)
    return [ms(run.predicted_s), ms(run.expected_s), measured, f"{100 * run.fits:.0f} %", _words(plan)]


def _words(plan: PlacementPlan) -> str:
    return uniform_words(_strategy(plan))
