"""The parts of the page that need no script: key figures, tables, sources of the numbers. Every text is escaped."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlplace.cluster.links import fullest_share, fullness
from rlplace.cost.timings import PlanTiming
from rlplace.explanation.report.data import ReportData
from rlplace.explanation.report.lanes import COLLECTIVE
from rlplace.plan.strategy import uniform_words
from rlplace.plan.words import BADGES, escape, figure_list, head, title, verdict
from rlplace.simulator import path as chain
from rlplace.text import bytes_text, percent, seconds_text

_REASONS = 10
_PARTS = 10

_CAUSES = {
    chain.COMPUTE: "computing", chain.TRANSFER: "moving data", chain.COLLECTIVE: "communicating",
    chain.DEVICE: "waiting for a busy device", chain.CHANNEL: "waiting for a busy link", chain.ORDER: "waiting for its turn",
}  # fmt: skip


def page_title(data: ReportData) -> str:
    """Returns model, cluster and step time; the kinds of devices where the plan names no cluster."""
    plan, line = data.plan, data.timeline
    if not isinstance((plan.source or {}).get("cluster"), str):
        kinds = Counter(device.kind or "device" for device in line.devices)
        text = "+".join(f"{kind}:{count}" for kind, count in kinds.items())
        plan = dataclasses.replace(plan, source={**(plan.source or {}), "cluster": text})
    return title(plan, line.step_time_s, line.name)


def summary(data: ReportData) -> str:
    """Returns title, verdict and key figures."""
    line, plan = data.timeline, data.plan
    step, used = line.step_time_s, line.devices_used
    fullest = fullest_share(line.peak_memory_bytes.tolist(), line.devices)
    words = [f"Plan of {plan.planner}", f"{_samples(line.samples)} a step"]
    words.append("groups one by one" if plan.strategy is None else uniform_words(plan.strategy))
    if plan.order is not None:
        words.append("an order of its own")
    lead = [f"{', '.join(words)}.", _bound((plan.predicted.parts or {}) if step else {})]
    parts = ['<section id="summary">' + head(page_title(data), verdict(line.feasible, fullest), lead)]
    if not line.feasible:
        shown = [*line.violations[:_REASONS]]
        if len(line.violations) > _REASONS:
            shown.append(f"and {len(line.violations) - _REASONS} more like these")
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in shown)
        parts.append(f'<div class="notice bad"><p>This plan cannot run as it is:</p><ul>{reasons}</ul></div>')
    busy = float(line.busy_s.sum())
    filled = "no limits" if fullest is None else f"up to {percent(fullest)} of a device"
    figures = [
        ("Step time", seconds_text(step), ""),
        ("Throughput", "-" if not step else f"{line.samples / step:,.1f}", "" if not step else "samples/s"),
        ("Devices used", str(used), f"of {len(line.devices)}"),
        ("Computing", "-" if not step else percent(busy / (step * max(1, used))), "of those devices' time"),
        ("Largest peak", bytes_text(int(line.peak_memory_bytes.max(initial=0))), filled),
    ]
    if len(line.sent_bytes):  # collectives left out
        between = "stages" if plan.strategy is not None else "devices"  # collectives move most of what a strategy moves
        sent = bytes_text(int(line.sent_bytes.sum()))
        figures.append((f"Between {between}", sent, f"in {len(line.sent_bytes):,} transfers"))
    calls = np.isin(data.lanes.row, [i for i, row in enumerate(data.lanes.rows) if row.kind == COLLECTIVE])
    if calls.any():
        span_s = float((data.lanes.end_s[calls] - data.lanes.start_s[calls]).sum())
        figures.append(("Collectives", f"{int(calls.sum()):,}", f"{seconds_text(span_s)} in all"))
    return "\n".join([*parts, f"{figure_list(figures)}</section>"])


_DOING = {
    "compute": "computing", "bubble": "waiting for other stages", "exchange": "exchanging gradients",
    "gather": "gathering weights", "tensor": "tensor parallelism", "hand_over": "handing on activations", "update": "updating",
}  # fmt: skip


def _bound(parts: Mapping[str, float]) -> str:
    """Returns the parts of the busiest place's time under a strategy; nothing where they are not known."""
    total_s, ordered = sum(parts.values()), sorted(parts.items(), key=lambda item: -item[1])
    shares = [(_DOING.get(name, name), seconds / total_s) for name, seconds in ordered if seconds > 0.001 * total_s]
    return f"Bounded by {shares[0][0]}: {', '.join(f'{percent(s)} {name}' for name, s in shares)}." if shares else ""


def devices(data: ReportData) -> str:
    """Returns one row a device."""
    line, step = data.timeline, data.timeline.step_time_s
    rows = []
    for index, device in enumerate(line.devices):
        peak, limit = int(line.peak_memory_bytes[index]), device.memory_bytes
        share = None if not limit else peak / limit
        cells = {
            "Device": _cell(device.name),
            "Kind": _cell(device.kind or "-"),
            "Blocks" if data.plan.strategy else "Groups": _cell(f"{data.groups_on_device[index]:,}"),
            "Busy": _cell(seconds_text(float(line.busy_s[index])) if step else "-"),
            "Share of the step": _share(float(line.busy_s[index]) / step) if step else _cell("-"),
            "Idle before, within, after": _cell(_idle(data, index)),
            "Resident": _cell(bytes_text(int(line.resident_bytes[index]))),
            "Peak": _cell(bytes_text(peak), "" if share is None else _LEVELS[fullness(share)]),
            "Memory": _cell("-" if limit is None else bytes_text(limit)),
            "Peak of memory": _cell("-") if share is None else _share(share, _LEVELS[fullness(share)]),
        }
        rows.append(("", cells))
    note = f"Peaks are those of the executor, {data.executor}: weights, gradients, optimizer state, activations and copies."
    if step is None:
        note = "The step does not complete; peaks are what the groups hold all the time."
    return _section("devices", "Devices", _table("Devices", rows) + f'<p class="note">{note}</p>')


def _idle(data: ReportData, device: int) -> str:
    """Returns idle time of a device before its first op, between ops and after the last one."""
    here, step = data.lanes.row == device, data.timeline.step_time_s
    if not step or not here.any():
        return "-"
    first, last = float(data.lanes.start_s[here].min()), float(data.lanes.end_s[here].max())
    within = last - first - float((data.lanes.end_s[here] - data.lanes.start_s[here]).sum())
    return " + ".join(seconds_text(max(0.0, value)) for value in (first, within, step - last))


def path(data: ReportData) -> str:
    """Returns the critical path by cause and place; nothing when the step does not complete."""
    total_s = sum(part.seconds for part in data.path)
    if not total_s:
        return ""
    rows = []
    for part in data.path[:_PARTS]:
        cells = {
            "What": _cell(_CAUSES[part.cause]),
            "Where": _cell(part.where),
            "Time": _cell(seconds_text(part.seconds)),
            "Share of the step": _share(part.seconds / total_s),
            "Links": _cell(f"{part.links:,}"),
        }
        rows.append(("", cells))
    rest_s = sum(part.seconds for part in data.path[_PARTS:])
    note = "The chain of work, transfers and waits that makes the step as long as it is: its links add up to the step."
    if rest_s:
        note += f" Left out: {len(data.path) - _PARTS:,} parts of {percent(rest_s / total_s)} together."
    return _section("path", "Critical path", _table("Critical path", rows) + f'<p class="note">{note}</p>')


def costliest(data: ReportData) -> str:
    """Returns the module that computes longest, in a sentence."""
    spent: dict[str, float] = {}
    for name, seconds in zip(data.timeline.group_names, data.timeline.group_s.tolist(), strict=True):
        module = chain.module_of(name)
        spent[module] = spent.get(module, 0.0) + seconds
    most = max(spent, key=lambda name: spent[name])
    if not spent[most]:
        return ""
    share = percent(spent[most] / sum(spent.values()))
    return f'<p class="lead">Costliest module: {escape(most)}, {seconds_text(spent[most])}, {share} of all work.</p>'


def planners(data: ReportData) -> str:
    """Returns one row a planner; nothing when there are none."""
    if not data.planners:
        return ""
    best = next((row.samples_per_s for row in data.planners if row.this), None)
    rows = []
    for row in data.planners:
        relation = "-" if not (best and row.samples_per_s) else f"{row.samples_per_s / best:.3f}"
        cells = {
            "Planner": _cell(row.planner),
            "Step time": _cell(seconds_text(row.step_time_s)),
            "Samples/s": _cell("-" if row.samples_per_s is None else f"{row.samples_per_s:,.1f}"),
            "Speed against this plan": _cell(relation),
            "Devices": _cell(str(row.devices_used or "-")),
            "Largest share of memory": _cell(percent(row.memory_share), _LEVELS[fullness(row.memory_share)]),
            "Planning": _cell("-" if row.seconds is None else f"{row.seconds:.2f} s"),
        }
        rows.append(_noted(row.this, row.note, cells))
    samples = _samples(data.timeline.samples)
    note = (
        f"Simulated by the same executor, {data.executor}, on the same problem, {samples} a step for everyone. "
        "Plans that do not fit come last."
    )
    return _section("planners", "Planners", _table("Planners", rows) + f'<p class="note">{note}</p>')


def measured(data: ReportData) -> str:
    """Returns predicted against measured step times, and the processes of this plan; nothing when there are none."""
    if not data.measured:
        return ""
    rows = []
    for row in data.measured:
        cells = {
            "Plan": _cell(row.name),
            "Engine": _cell(row.engine or "-"),
            "Steps": _cell(str(len(row.step_s))),
            "Measured": _cell(seconds_text(row.median_s)),
            "Spread": _cell(percent(row.spread)),
            "Predicted": _cell(seconds_text(row.predicted_s)),
            "Error": _cell("-" if row.error is None else f"{100 * row.error:+.1f} %"),
        }
        rows.append(_noted(row.plan == data.plan.fingerprint, "", cells))
    body = _table("Predicted against measured step times", rows)
    errors = [abs(row.error) for row in data.measured if row.error is not None]
    notes = [f"Mean error {percent(sum(errors) / len(errors))} over {len(errors)} plans."] if errors else []
    notes.append("Measured: median step of the slowest process. Spread: interquartile range over the median.")
    body += f'<p class="note">{escape(" ".join(notes))}</p>'
    mine = next((row for row in data.measured if row.plan == data.plan.fingerprint and row.places), None)
    if mine is not None:
        body += _places(mine)
    return _section("measured", "Predicted and measured", body)


def _places(row: PlanTiming) -> str:
    rows = []
    for place in row.places:
        cells = {
            "Process": str(place.rank),
            "Host": place.host,
            "Busy": seconds_text(place.busy_s),
            "Predicted busy": seconds_text(place.predicted_busy_s),
            "Waiting": seconds_text(place.wait_s),
            "Update": seconds_text(place.update_s),
            "Peak": "-" if place.peak_memory_bytes is None else bytes_text(place.peak_memory_bytes),
            "Predicted peak": "-" if place.predicted_peak_bytes is None else bytes_text(place.predicted_peak_bytes),
        }
        rows.append(("", {name: _cell(text) for name, text in cells.items()}))
    return f"<h3>This plan by process: {escape(row.name)}</h3>" + _table("This plan by process", rows)


def about(data: ReportData, version: str) -> str:
    """Returns sources of the numbers."""
    line, plan = data.timeline, data.plan
    source = line.source or plan.source or {}
    facts = [
        ("Problem", f"{len(line.group_names):,} groups, {len(line.op_names):,} ops, {line.tensors:,} tensors"),
        ("Drawn", f"{line.ops_run:,} ops, {len(line.sent_bytes):,} transfers"),
        ("Executor", f"{data.executor}, simulated"),
        ("Planner", f"{plan.planner}, seed {plan.seed}"),
    ]
    graph = source.get("graph")
    if isinstance(graph, Mapping) and isinstance(graph.get("model"), str):
        facts.append(("Model", graph["model"][:300]))
    facts += [(name.capitalize(), source[name][:300]) for name in ("cluster", "host") if isinstance(source.get(name), str)]
    facts.append(("Made with", f"rlplace {version}"))
    prints = [("Problem's fingerprint", plan.problem), ("Plan's fingerprint", plan.fingerprint)]
    cells = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts)
    cells += "".join(f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in prints)
    return _section("about", "About", f'<dl class="facts">{cells}</dl>')


def _section(name: str, title: str, body: str) -> str:
    head = f'<div class="head"><h2 id="{name}-title">{title}</h2></div>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{body}</section>'


Cell = tuple[str, str]
"""Escaped text, and the class of the cell."""
Row = tuple[str, dict[str, Cell]]
"""The class of the row, and its cells by the head of their column."""


def _noted(this: bool, said: str, cells: dict[str, Cell]) -> Row:
    """Returns a row with its remarks in a last column; the row of the report's plan is marked."""
    note = ". ".join(part for part in ("this plan" if this else "", said) if part)
    return "this" if this else "", {**cells, "": _cell(note, "text")}


_NOTHING = ("", "-")
"""Cells without content; a column of them is left out."""


def _table(label: str, rows: Sequence[Row]) -> str:
    first, *others = rows[0][1]
    used = [first, *(name for name in others if any(cells[name][0] not in _NOTHING for _, cells in rows))]
    rows = [(kind, {name: cells[name] for name in used}) for kind, cells in rows]
    names = [escape(name) for name in used]
    top = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = []
    for kind, cells in rows:
        own, *rest = cells.values()
        line = f'<th scope="row">{own[0]}</th>' + "".join(
            f'<td{_class(kind)} data-label="{name}">{text}</td>' for name, (text, kind) in zip(names[1:], rest, strict=True)
        )
        body.append(f"<tr{_class(kind)}>{line}</tr>")
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _cell(value: Any, kind: str = "") -> Cell:
    return escape(value), kind


_LEVELS = {**BADGES, "roomy": ""}
"""Class of a cell by how full a device is."""


def _share(value: float, level: str = "") -> Cell:
    width = 100 * min(1.0, max(0.0, value))
    bar = f'<svg class="{f"meter {level}".strip()}" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
    return f'{escape(percent(value))}{bar}<rect width="{width:.1f}" height="10"/></svg>', f"share {level}".strip()


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"
