"""The report of a live campaign: what was gained, what the cluster is really like, what it took."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplace.agents.tuning.tune import Tuned
from rlplace.measured.campaign import Campaign
from rlplace.measured.trial import Trial

_NOTABLE = 0.1  # factors that differ so much from 1 are told


def report_of(campaign: Campaign, tuned: Tuned, untuned: Trial | None, learned: dict[str, Any]) -> dict[str, Any]:
    """As plain JSON data.

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
