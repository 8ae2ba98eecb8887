"""A plan for people: its title, a sentence, and the head of its report with the key figures."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlplace.cluster.links import fullness
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.text import bytes_text, percent, seconds_text

Figure = tuple[str, str, str]
"""A key figure: name, value, remark."""

BADGES = {"roomy": "good", "tight": "tight", "full": "bad"}
"""Class of the verdict by `rlplace.problem.problem.fullness`: green, amber from 90 % of a device's memory, red from 97 %."""

_STYLE = (
    "<style>.rlplace-plan h1{font-size:1.3em;margin:0}.rlplace-plan p{margin:.2em 0}.rlplace-plan dl{display:flex;"
    "flex-wrap:wrap;gap:.4em 2em;margin:.5em 0}.rlplace-plan dt{font-size:.8em;opacity:.7}.rlplace-plan dd{margin:0;"
    "font-weight:600}.rlplace-plan small{display:block;font-weight:400;opacity:.7}"
    ".rlplace-plan .badge{font-size:.65em;padding:.1em .6em;"
    "border-radius:1em;color:#fff;background:#1a6b3c}.rlplace-plan .badge.tight{background:#8a5a00}"
    ".rlplace-plan .badge.bad{background:#b3261e}</style>"
)


def escape(value: Any) -> str:
    """Returns any value as text of a page; characters that UTF-8 cannot hold become question marks."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"))


def model_and_cluster(plan: PlacementPlan, model: str = "") -> str:
    """Returns model and cluster of a plan, as far as its source names them; `model` where it names none."""
    source: Mapping[str, Any] = plan.source or {}
    graph = source.get("graph")
    named = graph.get("model") if isinstance(graph, Mapping) else None
    name = next((text for text in (named, source.get("name"), model) if isinstance(text, str) and text), "plan")
    return f"{name} on {source['cluster']}" if isinstance(source.get("cluster"), str) else name


def title(plan: PlacementPlan, step_time_s: float | None, model: str = "") -> str:
    """Returns model, cluster and step time."""
    takes = "does not fit" if step_time_s is None else f"{seconds_text(step_time_s)} a step"
    return f"{model_and_cluster(plan, model)[:200]}, {takes}"


def what_runs(plan: PlacementPlan) -> str:
    """Returns the strategy in one line, or how many groups of ops are on how many devices."""
    if plan.strategy is not None:
        return uniform_words(plan.strategy)
    groups, devices = len(plan.device_of_group), len(np.unique(plan.device_of_group))
    return f"{groups} group{'' if groups == 1 else 's'} of ops on {devices} device{'' if devices == 1 else 's'}"


def samples_of(plan: PlacementPlan) -> int | None:
    """Samples of a step; None where that is not known."""
    return plan.samples if plan.strategy is None else plan.strategy.batch


def sentence(plan: PlacementPlan) -> str:
    """Returns a sentence: the strategy, the step time for how many samples, and the memory of the fullest device."""
    predicted, samples = plan.predicted, samples_of(plan)
    said = f"{model_and_cluster(plan)}: {what_runs(plan)}. "
    batch = "A step" if samples is None else f"A step of {samples} sample{'' if samples == 1 else 's'}"
    if predicted.step_time_s is None:
        return said + (f"{batch} does not fit." if predicted.feasible is False else f"{batch} was not simulated.")
    said += f"{batch} takes {seconds_text(predicted.step_time_s)}"
    said += "" if predicted.samples_per_s is None else f", {predicted.samples_per_s:.2f} samples/s"
    if not predicted.peak_memory_bytes:
        return f"{said}."
    share = "" if predicted.fullest_share is None else f", at most {percent(predicted.fullest_share)} of a device's memory"
    return f"{said}, with a peak of {bytes_text(max(predicted.peak_memory_bytes))}{share}."


def verdict(feasible: bool | None, share: float | None) -> tuple[str, str]:
    """Returns whether a plan fits, and how well: the class of a badge and its text."""
    if not feasible:
        return "bad", "infeasible" if feasible is False else "not simulated"
    level = fullness(share)
    return BADGES[level], "feasible" if level == "roomy" else f"feasible, {percent(share)} of memory"


def head(name: str, badge: tuple[str, str], lead: Iterable[str]) -> str:
    """Returns a heading with a verdict, and lines under it."""
    lines = "".join(f'<p class="lead">{escape(line)}</p>' for line in lead if line)
    return f'<h1>{escape(name)} <span class="badge {badge[0]}">{escape(badge[1])}</span></h1>{lines}'


def figure_list(figures: Iterable[Figure]) -> str:
    """Returns the HTML of key figures."""
    cells = "".join(f"<div><dt>{k}</dt><dd>{escape(v)} <small>{escape(note)}</small></dd></div>" for k, v, note in figures)
    return f'<dl class="figures">{cells}</dl>'


def html_head(plan: PlacementPlan) -> str:
    """Returns the head of a plan's report from what the plan predicts."""
    predicted, samples = plan.predicted, samples_of(plan)
    peaks = predicted.peak_memory_bytes
    used = len(plan.strategy.devices) if plan.strategy is not None else len(np.unique(plan.device_of_group))
    rate = predicted.samples_per_s
    filled = "" if predicted.fullest_share is None else f"up to {percent(predicted.fullest_share)} of a device"
    figures = [
        ("Step time", seconds_text(predicted.step_time_s), "" if samples is None else f"{samples} samples"),
        ("Throughput", "-" if rate is None else f"{rate:,.1f}", "" if rate is None else "samples/s"),
        ("Devices used", str(used), f"of {len(peaks)}" if peaks else ""),
        *([("Largest peak", bytes_text(max(peaks)), filled)] if peaks else []),
    ]
    badge = verdict(predicted.feasible, predicted.fullest_share)
    top = head(title(plan, predicted.step_time_s), badge, [f"{what_runs(plan)}."])
    return f'<div class="rlplace-plan">{_STYLE}{top}{figure_list(figures)}</div>'
