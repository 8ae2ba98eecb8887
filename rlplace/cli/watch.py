"""``rlplace finetune --watch``: reads the steps file of a training run, tells of drifts and plans again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import natural, print_json, rate, say, seconds
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.measured.drift import Drift, DriftDetector
    from rlplace.measured.replan_report import ReplanReport
    from rlplace.measured.steps_file import StepsReader
    from rlplace.plan.plan import PlacementPlan

EXAMPLE = "example: rlplace finetune --watch run.steps.jsonl --plan gpt2.plan.json --follow"

_POLL_S = 1.0


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the watch; what the parser has already is left as it is."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    group = parser.add_argument_group("watching a training run")

    def add(flag: str, **how: Any) -> None:
        if flag not in known:
            group.add_argument(flag, **how)

    add("--watch", metavar="RUN.steps.jsonl", help="steps file that rlplace.StepWatch writes: tell when steps drift")
    add("--plan", metavar="P.plan.json", help="the running plan")
    add("--problem", metavar="X.problem.json", help="what it was made for (built again from the plan's source)")
    add("--out", metavar="Q.plan.json", help="where a better plan goes (beside the steps file)")
    add("--reference", choices=("first", "predicted"), default="first", help="what steps are compared with (first)")
    add("--least", type=rate, default=0.05, metavar="X", help="smallest relative change of interest (0.05)")
    add("--restart-s", type=seconds, default=60.0, metavar="S", help="seconds to stop and start the job (60)")
    add("--time-limit", type=seconds, default=20.0, metavar="S", help="wall time of planning (20)")
    add("--seed", type=natural, default=0, metavar="N", help="seed of planning (0)")
    if not {"--follow", "--once"} & known:
        how = group.add_mutually_exclusive_group()
        how.add_argument("--once", action="store_true", help="read what is there and end (default)")
        how.add_argument("--follow", action="store_true", help="go on reading until interrupted")
    add("--json", action="store_true", help="print one JSON object; with --follow one a line for every drift and report")


@dataclass
class _Run:
    """What is known of the run that the file is about.

    Attributes:
        plan: The running plan.
        path: Of the steps file.
        detector: Of the present run; None before its header.
        drifts: Of the present run.
        steps: Read of the present run.
        busy: By step, where the file has it.
    """

    plan: PlacementPlan
    path: Path
    options: argparse.Namespace
    detector: DriftDetector | None = None
    drifts: list[Drift] = field(default_factory=list)
    steps: int = 0
    first: int = 0
    busy: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)

    def take(self, item: Any) -> Drift | None:
        """The next header or step."""
        from rlplace.measured.drift import DriftDetector
        from rlplace.measured.steps_file import StepHeader

        if isinstance(item, StepHeader):
            if item.plan != self.plan.fingerprint:
                raise InputError(
                    f"{self.path}: written with plan {item.plan[:12]}, {self.options.plan} is {self.plan.fingerprint[:12]}; "
                    "give the plan that the run uses"
                )
            if item.continued and self.detector is not None:
                return None
            reference = item.predicted_s if self.options.reference == "predicted" else item.reference_s
            if self.options.reference == "predicted" and item.predicted_s is None:
                raise InputError(f"{self.path}: the run's plan predicts no step time; take --reference first")
            self.detector = DriftDetector(reference, least=self.options.least)
            self.drifts, self.steps, self.busy = [], 0, []
            return None
        assert self.detector is not None  # the reader refuses a file without header
        if self.steps == 0:
            self.first = item.step
        self.steps += 1
        if item.busy_s is not None:
            self.busy.append((item.step - self.first, item.busy_s))
            del self.busy[64:-512]  # the first ones are the reference
        drift = self.detector.update(item.seconds)
        if drift is not None:
            self.drifts.append(drift)
        return drift

    def replan(self, drift: Drift) -> ReplanReport | None:
        """Plans again, unless the steps are as they were; writes plan and report."""
        from rlplace.agents.replan import replan_files
        from rlplace.measured.drift import WARMUP

        if abs(math.log(drift.of_reference)) < math.log1p(self.options.least):
            return None
        name = self.path.name.removesuffix(".jsonl").removesuffix(".steps")
        out = Path(self.options.out or self.path.with_name(f"{name}.step{drift.step}.plan.json"))
        report = out.with_name(f"{out.name.removesuffix('.json').removesuffix('.plan')}.replan.json")
        before = [busy for step, busy in self.busy if WARMUP <= step < self.drifts[0].began]
        since = [busy for step, busy in self.busy if step >= drift.began]
        held = self.options.reference == "predicted"
        request = argparse.Namespace(
            plan=self.options.plan,
            problem=self.options.problem,
            ratio=drift.of_reference,
            measured_s=drift.after_s,
            busy_s=_medians(since) if before or held else None,
            busy_before_s=None if held else _medians(before),
            out=str(out),
            report=str(report),
            time_limit_s=self.options.time_limit,
            restart_s=self.options.restart_s,
            seed=self.options.seed,
            agent=getattr(self.options, "agent", "default"),
        )
        return replan_files(request)


def run_watch(options: argparse.Namespace) -> int:
    """Runs the watch; a drift is a result, not a failure."""
    from rlplace.measured.steps_file import StepsReader
    from rlplace.plan.plan import PlacementPlan

    if options.plan is None:
        raise InputError("finetune: --watch needs --plan P.plan.json, the plan that the run uses")
    run = _Run(PlacementPlan.load(options.plan), Path(options.watch), options)
    reader = StepsReader(options.watch)
    if options.follow:
        with contextlib.suppress(KeyboardInterrupt):  # how it ends
            _follow(run, reader, options)
        return 0
    for item in reader.read():
        run.take(item)
    if run.detector is None:
        raise InputError(f"{options.watch}: there is nothing in it yet; the run writes every few seconds")
    report = run.replan(run.drifts[-1]) if run.drifts else None
    level_s, reference_s = run.detector.level_s, run.detector.reference_s
    if options.json:
        told = [{**dataclasses.asdict(d), "direction": d.direction, "ratio": d.of_reference} for d in run.drifts]
        whole = {"steps": run.steps, "reference_s": reference_s, "level_s": level_s, "drifts": told}
        print_json({**whole, "report": None if report is None else report.to_dict()})
        return 0
    for drift in run.drifts:
        print(drift.text())
    if level_s is None or reference_s is None:
        print(f"{run.steps} steps: too few to say what is normal")
    elif report is None:
        print(f"{run.steps} steps, now {level_s * 1e3:.4g} ms, reference {reference_s * 1e3:.4g} ms: nothing to plan")
    else:
        print("\n".join(report.lines()))
    return 0


def _follow(run: _Run, reader: StepsReader, options: argparse.Namespace) -> None:
    """Until interrupted; only the latest drift of what was read at once is planned for."""
    say(f"following {options.watch}; Ctrl-C ends it, the run is left as it is")
    while True:
        latest = None
        for item in reader.read():
            drift = run.take(item)
            if drift is not None:
                latest = drift
                if options.json:
                    print_json({"drift": {**dataclasses.asdict(drift), "direction": drift.direction}})
                else:
                    print(drift.text(), flush=True)
        report = run.replan(latest) if latest is not None else None
        if report is not None and options.json:
            print_json({"report": report.to_dict()})
        elif report is not None:
            print("\n".join(report.lines()), flush=True)
        sys.stdout.flush()
        time.sleep(_POLL_S)


def _medians(rows: list[tuple[float, ...]]) -> list[float] | None:
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return [statistics.median(column) for column in zip(*rows, strict=True)]
