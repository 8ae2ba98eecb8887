"""The loop of fine-tuning on a live cluster: measure, calibrate, learn, propose, measure.

1. A few plans that are good by what is known, and that use every device and link, are measured.
2. The cost model is corrected to everything that was measured (`rlplace.measured.calibrate`).
3. A proposer finds a plan in the corrected simulator that has not been measured; it is measured. Back to 2.
4. When the budget is spent, the few fastest plans are timed again until one of them stands out.

The loop knows nothing of how plans are proposed, so that agents and searches can be compared in it at equal terms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.tuning.belief import Belief, Proposer, believe
from rlplace.errors import InfeasibleError
from rlplace.measured.campaign import Campaign
from rlplace.measured.race import lower_bound, upper_bound
from rlplace.measured.trial import BudgetSpent, Trial
from rlplace.planners.best import floor_answers
from rlplace.planners.common.evaluate import Deadline, Evaluator
from rlplace.planners.random_plans import candidates
from rlplace.problem import Problem
from rlplace.simulator import Simulator

CALLS = 2048
"""Largest number of simulations of a proposal."""

_FINALISTS = 3
_FINALS = 2  # times that each finalist is timed again at most


@dataclass(frozen=True, eq=False)
class Tuned:
    """Result of a campaign.

    Attributes:
        best: The fastest plan.
        seconds: Step time of that plan, freed of drift.
        belief: The last belief.
        proposed: Number of plans proposed after the first ones.
        finished: Whether the budget was spent; False when nothing was left to propose.
    """

    best: Trial
    seconds: float
    belief: Belief
    proposed: int
    finished: bool


def tune(
    campaign: Campaign,
    proposer: Proposer,
    first: Sequence[NDArray[np.int32]],
    *,
    calls: int = CALLS,
) -> Tuned:
    """Spends a campaign's budget.

    Args:
        campaign: The campaign; trials that it has already are not repeated.
        proposer: Proposer of the next plan to measure.
        first: Plans to measure first.
        calls: Largest number of simulations of a proposal.

    Raises:
        InfeasibleError: No measured plan has worked.
    """
    finished, number = False, 0
    belief: Belief | None = None
    try:
        for plan in first:
            campaign.measure(plan)
        while not (finished := campaign.share >= 1.0):
            belief = believe(campaign, belief)
            if belief is None:  # nothing to learn from yet
                plan_next = roomiest(campaign.problem, campaign.known_plans, seed=number)
            else:
                plan_next = proposer.propose(belief, calls=calls, number=number)
            if plan_next is None:
                break
            campaign.measure(plan_next)
            number += 1
    except BudgetSpent:
        finished = True
    _finals(campaign)
    best = campaign.best()
    belief = believe(campaign, belief)
    if best is None or belief is None:
        raise _nothing_worked(campaign)
    return Tuned(best, campaign.seconds(best), belief, number, finished)


def _finals(campaign: Campaign) -> None:
    """The fastest of many noisy times is too good to be true: times the few fastest again while they are close."""
    for _ in range(_FINALS):
        done = {t.device_of_group: t for t in campaign.trials if t.status == "done" and not t.anchor}
        ranked = sorted(done.values(), key=campaign.seconds)[:_FINALISTS]
        close = [trial for trial in ranked[1:] if _overlap(campaign, ranked[0], trial)]
        if not close:
            return
        for trial in [ranked[0], *close]:
            campaign.time_again(trial)


def _overlap(campaign: Campaign, first: Trial, second: Trial) -> bool:
    noise = campaign.noise
    count = [sum(len(t.step_s) for t in campaign.trials if t.device_of_group == own.device_of_group) for own in (first, second)]
    high = upper_bound([campaign.seconds(first)] * count[0], noise)
    return lower_bound([campaign.seconds(second)] * count[1], noise) < high


def _nothing_worked(campaign: Campaign) -> InfeasibleError:
    reasons = [trial.reason for trial in campaign.trials if trial.reason]
    why = f"; the last one: {reasons[-1]}" if reasons else ""
    return InfeasibleError(f"finetune: none of {len(campaign.trials)} measured plans worked{why}")


_RANDOM = 48
_SLOWEST = 4.0  # plans that are predicted to take longer than this multiple of the best are not worth their time


def first_plans(
    problem: Problem, count: int, *, first: NDArray[np.int32] | None = None, seed: int = 0
) -> list[NDArray[np.int32]]:
    """Up to `count` distinct plans that fit.

    Args:
        problem: The problem as it was priced.
        count: Largest number of plans.
        first: int32 [G], a plan to begin with, such as the agent's.
        seed: Seed of the random candidates.
    """
    answers = [a.devices for _, a in floor_answers(problem, Evaluator(problem), Deadline(None)) if a.score.feasible]
    options = np.array([*answers, *candidates(problem, seed, samples=_RANDOM)], dtype=np.int32)
    step, overflow = Simulator(problem).evaluate_many(options)
    fits = np.isfinite(step) & (overflow == 0.0)
    options, step = options[fits], step[fits]
    if first is not None:
        chosen = [np.asarray(first, dtype=np.int32)]
    else:
        chosen = [options[int(step.argmin())]] if len(step) else []
    covered = {pair for plan in chosen for pair in _used(problem, plan)}
    useful = step <= _SLOWEST * step.min(initial=np.inf)
    options, step = options[useful], step[useful]
    links = [_used(problem, plan) for plan in options]
    while len(chosen) < count:
        best = None
        for number, plan in enumerate(options):
            apart = min(float((plan != other).mean()) for other in chosen)
            if apart == 0.0:
                continue
            news = len(links[number] - covered) + 2.0 * apart
            value = (1.0 + news) / (step[number] / step.min())
            if best is None or value > best[0]:
                best = (value, number)
        if best is None:
            break
        chosen.append(options[best[1]])
        covered |= links[best[1]]
    return chosen[:count]


def roomiest(problem: Problem, known: Collection[tuple[int, ...]], *, seed: int) -> NDArray[np.int32] | None:
    """The unknown random plan that leaves the fullest device most room; None when there is none.

    For clusters on which no plan has worked so far: most plans that fail need more memory than was predicted.
    """
    simulator = Simulator(problem)
    best: tuple[float, NDArray[np.int32]] | None = None
    for plan in candidates(problem, seed, samples=_RANDOM):
        if tuple(plan.tolist()) in known or not np.isfinite(simulator.evaluate(plan)[0]):
            continue
        fullest = float((simulator.peak_memory_bytes / np.minimum(problem.memory_limit_bytes, 1e18)).max())
        if best is None or fullest < best[0]:
            best = (fullest, plan)
    return None if best is None else best[1]


def _used(problem: Problem, plan: NDArray[np.int32]) -> set[tuple[int, int]]:
    """Ordered pairs of devices that a plan sends between, and (d, d) for devices that it computes on."""
    pairs = np.stack([plan[problem.edge_source_group], plan[problem.op_group[problem.consumers]]], axis=1)
    return {(int(i), int(j)) for i, j in np.unique(pairs, axis=0)} | {(int(d), int(d)) for d in np.unique(plan)}


_NOTABLE = 0.1  # factors that differ so much from 1 are told


def report_of(campaign: Campaign, tuned: Tuned, untuned: Trial | None, learned: dict[str, Any]) -> dict[str, Any]:
    """The report as plain JSON data.

    Args:
        campaign: The campaign.
        tuned: Its result.
        untuned: Trial of the plan of the agent before; None when it was not measured.
        learned: Facts of the fine-tuned agent.
    """
    spent, fit = campaign.spent, tuned.belief.fit
    before_s = campaign.seconds(untuned) if untuned is not None and untuned.timed else None
    names = [device.name for device in campaign.problem.devices]
    slow = fit.correction.link_slowdown(campaign.problem)
    links = [
        {"from": names[i], "to": names[j], "factor": round(float(slow[i, j]), 3)}
        for i, j in np.argwhere(np.abs(slow - 1.0) > _NOTABLE)
    ]
    statuses = [trial.status for trial in campaign.trials if trial.run == campaign.run and not trial.anchor]
    return {
        "problem": campaign.problem.name,
        "untuned_step_s": before_s,
        "best_step_s": tuned.seconds,
        "gain": None if before_s is None else 1.0 - tuned.seconds / before_s,
        "plans": spent.plans,
        "timed_steps": spent.steps,
        "measuring_minutes": spent.minutes,
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "noise": campaign.noise,
        "budget_spent": tuned.finished,
        "prediction_error_before": fit.error_before,
        "prediction_error_after": fit.error_after,
        "device_factors": dict(zip(names, np.round(fit.correction.device_factor, 3).tolist(), strict=True)),
        "slow_links": links,
        "latency_added_s": float(fit.correction.latency_s.max(initial=0.0)),
        "step_factor": fit.correction.step_factor,
        "device_of_group": list(tuned.best.device_of_group),
        "learned": learned,
    }


def report_text(data: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [f"# Fine-tuning on {data['problem']}", ""]
    best = f"{1e3 * data['best_step_s']:.2f} ms"
    if data["untuned_step_s"] is not None:
        before = f"{1e3 * data['untuned_step_s']:.2f} ms"
        lines.append(f"- step time: {best}, the agent's plan before measuring {before}: {100 * data['gain']:.1f} % less")
    else:
        lines.append(f"- step time: {best}; the agent's plan before measuring did not run")
    counts = ", ".join(f"{count} {status}" for status, count in data["statuses"].items())
    lines += [
        f"- measured: {data['plans']} plans ({counts}), {data['timed_steps']} steps, {data['measuring_minutes']:.1f} minutes",
        f"- scatter of single steps: {100 * data['noise']:.1f} %",
        f"- error of predicted step times: {100 * data['prediction_error_before']:.1f} % as priced, "
        f"{100 * data['prediction_error_after']:.1f} % after calibration",
        "- op times over the cost model's: " + ", ".join(f"{n} x{f:.2f}" for n, f in data["device_factors"].items()),
        f"- added to every transfer: {1e6 * data['latency_added_s']:.0f} us; step time x{data['step_factor']:.3f} besides",
    ]
    if data["slow_links"]:
        slow = ", ".join(f"{link['from']} to {link['to']} x{link['factor']:.2f}" for link in data["slow_links"])
        lines.append(f"- transfer times over the cost model's: {slow}")
    if not data["budget_spent"]:
        lines.append("- the campaign ended early: no further plan was left to propose")
    return "\n".join([*lines, ""])
