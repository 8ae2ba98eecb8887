"""``rlplace train``: train a placer and show how it compares.

And ``rlplace finetune``: run strategies on a real cluster, learn what the cluster is like, and end with the best that ran.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.cli.models import asked_batch, capture_sizes, compile_first, costs_of, machine_of, note_machine
from rlplace.cli.options import (
    ModelOptions,
    Options,
    argument,
    natural,
    option,
    positive,
    print_json,
    print_table,
    rate,
    say,
    seconds,
)
from rlplace.cli.place import question_of
from rlplace.errors import InputError, MissingError
from rlplace.plan.strategy import uniform_words
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.agents.config import TrainConfig
    from rlplace.cluster import Cluster
    from rlplace.measure.log import Run
    from rlplace.measure.session import Session
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Options of the verb."""

    HELP = "train a placer"
    EXAMPLE = "example: rlplace train --out runs/mine"

    problems: list[str] | None = option(
        "all, zoo or synthetic (endless sets; default all, without transformers zoo), or *.problem.json files and folders; for "
        "Strategy-v0 and Cluster-v0 small, train (the default), val, test or branchy",
        None,
        "P",
        nargs="+",
    )
    cluster: str | None = option("price the set's models for this cluster instead of random ones", None, "C")
    cases: int | None = option("cases to pre-train on", positive, "N")
    fit_steps: int | None = option("steps of pre-training, 0 for none", natural, "N")
    steps: int | None = option("PPO decisions, 0 for none", natural, "N")
    policy: str | None = option("policy to train (perceptron); 'rlplace info' lists others", None, "NAME")
    environment: str | None = option("Placement-v0, Refinement-v0, Strategy-v0 or Cluster-v0 (that of the policy)", None, "ID")
    out: str | None = option("run folder (runs/agent)", None, "DIR")
    resume: str | None = option("continue the run in this folder", None, "DIR")
    processes: int | None = option("processes that price moves (one a core)", positive, "N")
    seed: int | None = option("seed (0)", natural, "N")
    device: str = option("torch device of the network (auto)", None, "D", default="auto")
    calls: int = option("simulator calls per search in the table (256)", positive, "N", default=256)
    test: list[str] | None = option("files and folders that the table is made on (validation cases)", None, "P", nargs="+")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.agents.problems import cases_of, closing_cases
        from rlplace.agents.train import train
        from rlplace.cli.compare import print_summaries
        from rlplace.envs.base import PLACEMENT, REFINEMENT
        from rlplace.explanation.compare.run import compare_agent
        from rlplace.files import check_folder

        _check_device(self.device)
        if self.resume and self.out and Path(self.out) != Path(self.resume):
            raise InputError("--resume continues in its own folder; leave --out out")
        out = Path(self.resume or self.out or "runs/agent")
        check_folder(out)
        config, problems = _config(self, out)
        compile_first()
        source = cases_of(problems, seed=config.seed, cluster=self.cluster, environment=config.environment)
        places = config.environment in (PLACEMENT, REFINEMENT)
        if self.test and not places:
            raise InputError(f"--test: policies of {config.environment} place nothing; leave it out")
        tests = cases_of(self.test) if self.test else None
        if tests is not None and tests.count is None:
            raise InputError(f"--test {tests.name}: has no end; name files or folders of *.problem.json")
        resume, bar = bool(self.resume), sys.stderr.isatty()
        done = train(source, config, out, resume=resume, progress_bar=bar, report=say)
        say(f"{done} decisions done, saved in {out}")
        if not places:
            if self.json:
                print_json({"out": str(out), "steps": done})
            return 0
        say("comparing on " + ("the given problems" if self.test else "cases of families that it was not trained on"))
        tested = list(tests) if tests is not None else closing_cases(progress=say)
        every, branchy = compare_agent(out, tested, calls=self.calls)
        if self.json:
            print_json({"out": str(out), "steps": done, **every.to_dict(), "branchy": branchy.to_dict()["summaries"]})
        else:
            print_summaries(every, f"{len(tested)} cases")
            print_summaries(branchy, "branchy cases alone")
            print(f"\nplace a model with it: rlplace place hf:gpt2 --cluster a100-80g:4 --agent {out}")
        return 0


def _check_device(name: str) -> None:
    import torch

    if name == "auto":
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        kind = name.partition(":")[0]
        if kind in ("cuda", "mps", "xpu"):
            raise MissingError(f"--device {name}: not usable on this machine: {reason}") from None
        raise InputError(f"--device {name}: is not a torch device; for example auto, cpu or cuda") from None


def _config(options: TrainOptions, out: Path) -> tuple[TrainConfig, list[str]]:
    from rlplace.agents.checkpoint import read_config
    from rlplace.agents.config import TrainConfig

    names = ("cases", "fit_steps", "steps", "policy", "environment", "seed", "device", "processes")
    changes = {name: getattr(options, name) for name in names}
    if not options.resume:
        return TrainConfig.load(**changes), options.problems or []
    training = read_config(out)["training"]
    earlier = training.get("hyperparameters")
    if not isinstance(earlier, dict):
        raise InputError(f"{out / 'config.json'}: holds no hyperparameters to resume with")
    merged = {**earlier, **{key: value for key, value in changes.items() if value is not None}}
    return TrainConfig.load(**merged), options.problems or str(training.get("problem_set", "")).split()


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(ModelOptions):
    """Options of the verb."""

    HELP = "run strategies on a real cluster and learn from them"
    EXAMPLE = "example: rlplace finetune hf:gpt2 --cluster host --runs 5 --log gpt2.runs.jsonl --out best.plan.json"

    model: str | None = argument("MODEL", "as for rlplace place; left out with --export-runs", "?")
    cluster: str | None = option("the devices of the runs; host (default)", None, "C")
    runs: int = option("strategies to run (5)", positive, "N", default=5)
    launch: str | None = option(
        "how a plan is run, with {plan} and {timings}; default: torchrun on this machine", None, "COMMAND"
    )
    timeout: float = option("seconds after which a run counts as crashed (600)", rate, "S", default=600.0)
    device: str | None = option("for runs on this machine (cuda where there is a GPU)", choices=("cpu", "cuda"))
    log: str | None = option(
        "file of runs, *.runs.jsonl: what it holds counts, and the session goes on from there", None, "FILE"
    )
    site: str = option("tells clusters apart that are planned for alike", None, "TEXT", default="")
    rule: str = option("chooses runs: improvement (default), calibrate, list", None, "NAME", default="improvement")
    space: str | None = option("what may be chosen, as for rlplace place", None, "S")
    time_limit: float = option("seconds for the planner's first answer (5)", seconds, "S", default=5.0)
    seed: int = option("seed (0)", natural, "N", default=0)
    others: list[str] | None = option(
        "runs elsewhere on such devices, *.runs.jsonl, count, too", None, "FILE", name="--from", nargs="+"
    )
    out: str | None = option("where the best plan that ran goes", None, "P.plan.json")
    export_runs: str | None = option(
        "write the runs of --log for others: no names of machines or modules, no code", None, "FILE"
    )

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.files import check_output

        for output in (self.out, self.log, self.export_runs):
            if output:
                check_output(output)
        if self.export_runs and not self.log:
            raise InputError("finetune: --export-runs writes the runs of a file; name it with --log")
        if self.model is None and not self.export_runs:
            raise InputError("finetune: name a MODEL whose strategies are run")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.measure.log import RunLog, write_shared

        log = RunLog(self.log)
        if self.model is not None:
            _session(self.model, self, log)
        if self.export_runs:
            write_shared(self.export_runs, log.runs)
            say(f"wrote {self.export_runs}")
        return 0


def _session(model: str, options: FinetuneOptions, log: Any) -> None:
    """Runs a session; a process that is terminated ends the run in progress, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _runs(model, options, log)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _runs(model: str, options: FinetuneOptions, log: Any) -> None:
    """Runs strategies and prints what came of them."""
    from rlplace.measure.session import Session, launcher, local_command

    machine = machine_of(options.cluster)
    command = options.launch or local_command(machine, options.device)
    launch = launcher(command, machine, timeout_s=options.timeout)
    note_machine(options.cluster, machine)
    others = _others(options, machine)
    planned = _planned(model, options, machine)
    say("choosing what may be worth a run")
    session = Session(planned, launch, log=log, rule=options.rule, seed=options.seed, site=options.site, elsewhere=others)
    if session.belief.observations:
        say(f"{len(session.belief.observations)} runs of {options.log} are known")
    ran: list[tuple[PlacementPlan, Run]] = []
    for each in session.runs(options.runs):
        ran.append(each)
        say(f"run {len(ran)}: {_said(each[1])}, {uniform_words(_strategy(each[0]))}")
    _finish(options, session, ran)


def _others(options: FinetuneOptions, machine: Cluster) -> tuple[Run, ...]:
    """Reads the runs elsewhere that hold for this cluster."""
    if not options.others:
        return ()
    from rlplace.measure.log import read_runs
    from rlplace.measure.session import transferable

    runs = [run for path in options.others for run in read_runs(path)]
    found = transferable(runs, machine)
    say(f"{len(found)} of {len(runs)} runs elsewhere tell of this cluster: they took a time on devices of the same kinds")
    return found


def _planned(model: str, options: FinetuneOptions, machine: Cluster) -> Planned:
    """Returns the planner's answer with the priced model."""
    from rlplace.api import CLASSICAL, FIXED, default_batch, plan_model
    from rlplace.planned import Planned

    asked: dict[str, Any] = {
        "space": options.space,
        "fixed": {name: getattr(options, name, None) for name in FIXED},
        "planner": CLASSICAL,
        "costs": costs_of(options, machine),
        "host": options.host_mode,
    }
    batch, samples = asked_batch(model, options)
    batch = batch or default_batch(machine)
    compile_first("strategy")
    captured = capture_sizes(model, options, samples)
    plan, _ = plan_model(captured, machine, batch=batch, seed=options.seed, time_limit_s=options.time_limit, **asked)
    return Planned(plan, machine, search_problem=question_of(captured, machine, batch, **asked))


def _strategy(plan: PlacementPlan) -> Any:
    assert plan.strategy is not None
    return plan.strategy


def _said(run: Run) -> str:
    """Describes the result of a run."""
    if run.median_s is None:
        return f"{run.status.replace('_', ' ')} ({run.reason})"
    return f"{ms(run.median_s)} ms, {ms(run.expected_s)} were expected"


def _finish(options: FinetuneOptions, session: Session, ran: list[tuple[PlacementPlan, Run]]) -> None:
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
