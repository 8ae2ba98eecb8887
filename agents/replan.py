"""Plans again after the steps of a running job have changed their pace.

Where the time went is either measured, as the busy seconds of every device, or it is not known: then every explanation by a
single cause is tried in turn (one device, one link, everything), each with the factor that makes the simulated step as long as
the measured one. The agent plans for each. Proposed is the plan with the largest gain in the mean over the explanations, by
their weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.drift_causes import Cause, causes_of, run_plan, weights_of
from rlplace.errors import InfeasibleError, InputError, RlplaceError, show
from rlplace.files import check_output
from rlplace.measured.correction import corrected
from rlplace.measured.migration import RESTART_S, Migration, migration
from rlplace.measured.replan_report import Hypothesis, ReplanReport
from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan, check_plan, make_plan
from rlplace.problem import Problem

LEAST_GAIN = 0.02
"""A plan that is expected to save less than this share of the step is not proposed."""

_ALIKE = 0.005  # gains that differ by less are equal, and the cheaper move wins


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A plan that may be proposed: int32 [G] devices, priority, step times under every cause, and the cost of the move."""

    plan: PlacementPlan
    step_s: NDArray[np.float64]
    move: Migration


def replan(
    problem: Problem,
    plan: PlacementPlan,
    *,
    ratio: float,
    measured_s: float,
    busy_s: Sequence[float] | None = None,
    busy_before_s: Sequence[float] | None = None,
    time_limit_s: float = 20.0,
    seed: int = 0,
    restart_s: float = RESTART_S,
    agent: str = "default",
) -> tuple[ReplanReport, PlacementPlan | None]:
    """Plans again.

    Args:
        problem: What the running plan was made for.
        plan: The running plan; it is not changed.
        ratio: Present step time over that of the reference.
        measured_s: Present step time.
        busy_s: Per device of the cluster, seconds of the step in which it computes now; None where that is not known.
        busy_before_s: The same before the drift; default what the simulator says, and `ratio` is then taken from it, too.
        time_limit_s: Wall time of planning, all explanations together.
        seed: Of the agent.
        restart_s: Assumed to stop and start the job.
        agent: Checkpoint.

    Returns:
        The report, without the name of the plan's file, and the proposed plan: for the problem as it was priced, so that it
        runs where the running one does. None when no plan is worth proposing.

    Raises:
        InputError: The plan is not for the problem, or a number is out of its range.
    """
    check_plan(plan, problem)
    for name, value in (("ratio", ratio), ("measured_s", measured_s), ("time_limit_s", time_limit_s)):
        if not 0 < value < 1e9:
            raise InputError(f"replan: {name} must be a positive number, found {show(value)}")
    told: dict[str, Any] = {"plan": plan.fingerprint, "ratio": ratio, "measured_s": measured_s, "located": False}
    if plan.replicas or plan.shards or plan.recompute:
        note = "plans with replicas, shards or recomputation are not planned again; measure, and run 'rlplace place'"
        return ReplanReport(**told, note=note), None
    causes, located, notes = causes_of(problem, plan, ratio, measured_s, busy_s, busy_before_s)
    told["located"] = located
    if not causes:
        notes.append("neither a device nor a link alone, nor all of them together, explains the measured steps")
        return ReplanReport(**told, note="; ".join(notes)), None
    worlds = [corrected(problem, cause.correction) for cause in causes]
    running = np.array([run_plan(world, plan).step_time_s or math.inf for world in worlds])
    weight = weights_of(causes)
    scale = measured_s / running  # of a cost model that is off by a constant
    found = _candidates(problem, plan, causes, worlds, time_limit_s=time_limit_s, seed=seed, restart_s=restart_s, agent=agent)
    best_s = np.minimum.reduce([running, *(c.step_s for c in found)])

    def hypotheses(step_s: NDArray[np.float64]) -> tuple[Hypothesis, ...]:
        rows = zip(causes, weight, running * scale, step_s * scale, best_s * scale, strict=True)
        return tuple(Hypothesis(cause.name, *(float(value) for value in values)) for cause, *values in rows)

    chosen = _choose(found, running, weight)
    if chosen is None:
        notes.append(f"the running plan is within {100 * LEAST_GAIN:.0f} % of the best that was found")
        return ReplanReport(**told, hypotheses=hypotheses(running), note="; ".join(notes)), None
    gain_s = float(((running - chosen.step_s) * scale) @ weight)
    move = chosen.move
    report = ReplanReport(
        **told,
        hypotheses=hypotheses(chosen.step_s),
        moved_groups=move.moved_groups,
        migration_bytes=move.size_bytes,
        transfer_s=move.transfer_s if math.isfinite(move.transfer_s) else None,
        restart_s=move.restart_s,
        break_even_steps=move.break_even_steps(gain_s),
        note="; ".join(notes),
    )
    return report, chosen.plan


def _candidates(
    problem: Problem,
    running: PlacementPlan,
    causes: Sequence[Cause],
    worlds: Sequence[Problem],
    *,
    time_limit_s: float,
    seed: int,
    restart_s: float,
    agent: str,
) -> list[_Candidate]:
    """Plans for every cause, from scratch and from the running plan; and each with devices renamed so that less moves."""
    from rlplace.agents.planner import load_agent

    placer = load_agent(agent)
    schedule = running.schedule if running.schedule in FREE_SCHEDULES else "1f1b"
    execution: dict[str, Any] = {"microbatches": running.microbatches, "schedule": schedule}
    uneven = [number for number, cause in enumerate(causes) if not cause.even]
    end_s = time.monotonic() + time_limit_s
    seen: set[tuple[int, ...]] = set()
    found = []
    for rank, number in enumerate(uneven):
        for again, start in enumerate((running.device_of_group, None)):
            share_s = max((end_s - time.monotonic()) / (2 * (len(uneven) - rank) - again), 0.05)
            try:
                plan = placer.place(worlds[number], seed=seed, time_limit_s=share_s, start=start, **execution)
            except InfeasibleError:
                continue
            for devices in (plan.device_of_group, _renamed(problem, running, plan.device_of_group)):
                key = tuple(int(d) for d in devices)
                if key in seen or key == tuple(running.device_of_group.tolist()):
                    continue
                seen.add(key)
                made = _made(problem, running, devices, plan.priority, execution)
                if made is not None:
                    step_s = np.array([run_plan(world, made).step_time_s or math.inf for world in worlds])
                    found.append(_Candidate(made, step_s, migration(problem, running, made, restart_s=restart_s)))
    return found


def _made(
    problem: Problem, running: PlacementPlan, devices: NDArray[np.int32], priority: Any, execution: dict[str, Any]
) -> PlacementPlan | None:
    """The plan for the problem as it was priced; None where it does not fit or a group may not sit there."""
    if not problem.group_allowed[np.arange(problem.num_groups), devices].all():
        return None
    plan = make_plan(problem, devices, planner="agent", seed=running.seed, priority=priority, **execution)
    line = run_plan(problem, plan)
    if not line.feasible:
        return None
    return dataclasses.replace(plan.with_predicted(line.predicted(problem)), source=running.source, groups=running.groups)


def _renamed(problem: Problem, running: PlacementPlan, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """The same parts on devices chosen so that most bytes stay: devices that are alike have no names of their own."""
    from scipy.optimize import linear_sum_assignment

    stays = np.zeros((problem.num_devices, problem.num_devices))
    np.add.at(stays, (devices, running.device_of_group), np.maximum(problem.resident_bytes, 1).astype(np.float64))
    row, column = linear_sum_assignment(-stays)
    name = np.empty(problem.num_devices, dtype=np.int32)
    name[row] = column
    return name[devices]


def _choose(found: Sequence[_Candidate], running: NDArray[np.float64], weight: NDArray[np.float64]) -> _Candidate | None:
    """The largest mean gain; among those that are alike, the cheapest move."""
    gains = [float((1.0 - candidate.step_s / running) @ weight) for candidate in found]
    best = max(gains, default=0.0)
    if best < LEAST_GAIN:
        return None
    alike = [c for c, gain in zip(found, gains, strict=True) if gain >= best - _ALIKE]
    return min(alike, key=lambda candidate: candidate.move.seconds)


def problem_of(plan: PlacementPlan, path: str | None) -> Problem:
    """The plan's problem: read from a file, or captured and priced again from the plan's source.

    Raises:
        InputError: The plan is for another problem, or does not say how to build it.
    """
    if path is not None:
        problem = Problem.load(path)
        check_plan(plan, problem)
        return problem
    from rlplace.runtime.distributed.recipe import problem_of_plan

    return problem_of_plan(plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """What `StepWatch` starts in the background: ``python -m rlplace.agents.replan``; errors are one line on stderr."""
    parser = argparse.ArgumentParser(prog="rlplace.agents.replan", description="Plans again after a drift; see StepWatch.")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--problem")
    parser.add_argument("--ratio", type=float, required=True)
    parser.add_argument("--measured-s", type=float, required=True)
    parser.add_argument("--busy-s", type=_numbers)
    parser.add_argument("--busy-before-s", type=_numbers)
    parser.add_argument("--out", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--time-limit-s", type=float, default=20.0)
    parser.add_argument("--restart-s", type=float, default=RESTART_S)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent", default="default")
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(arguments)
    if options.parent is not None:
        os.nice(10)
        _end_with(options.parent)
    try:
        import torch

        torch.set_num_threads(1)
        replan_files(options)
    except (RlplaceError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def replan_files(options: Any) -> ReplanReport:
    """Reads plan and problem, plans again, writes the proposed plan and then the report."""
    for path in (options.out, options.report):
        check_output(path)
    plan = PlacementPlan.load(options.plan)
    report, proposed = replan(
        problem_of(plan, options.problem),
        plan,
        ratio=options.ratio,
        measured_s=options.measured_s,
        busy_s=options.busy_s,
        busy_before_s=options.busy_before_s,
        time_limit_s=options.time_limit_s,
        seed=options.seed,
        restart_s=options.restart_s,
        agent=options.agent,
    )
    if proposed is not None:
        proposed.save(options.out)
        report = dataclasses.replace(report, proposal=str(options.out))
    report.save(options.report)
    return report


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _end_with(parent: int, leave: Callable[[int], Any] = os._exit) -> None:
    """A job that was killed cannot end this process itself."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        leave(1)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
