"""The parts of the page that need no script: key figures, tables, sources of the numbers. The template escapes every text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlplace.cluster.links import fullest_share, fullness
from rlplace.cost.timings import PlanTiming
from rlplace.explanation.report.data import ReportData
from rlplace.explanation.report.lanes import COLLECTIVE
from rlplace.plan.strategy import uniform_words
from rlplace.plan.words import BADGES, title, verdict
from rlplace.simulator import path as chain
from rlplace.text import bytes_text, percent, seconds_text

_REASONS = 10
_PARTS = 10

_CAUSES = {
    chain.COMPUTE: "computing", chain.TRANSFER: "moving data", chain.COLLECTIVE: "communicating",
    chain.DEVICE: "waiting for a busy device", chain.CHANNEL: "waiting for a busy link", chain.ORDER: "waiting for its turn",
}  # fmt: skip

_DOING = {
    "compute": "computing", "bubble": "waiting for other stages", "exchange": "exchanging gradients",
    "gather": "gathering weights", "tensor": "tensor parallelism", "hand_over": "sending activations", "update": "updating",
}  # fmt: skip

_LEVELS = {**BADGES, "roomy": ""}
"""Class of a cell by how full a device is."""


class TableCell(NamedTuple):
    """A cell of a table: its text, its class, and the share of a bar."""

    text: str
    kind: str = ""
    share: float | None = None


Row = tuple[str, dict[str, TableCell]]
"""The class of a row, and its cells by the head of their column."""


class Table(NamedTuple):
    """A table of the page; the first column heads the rows."""

    label: str
    heads: list[str]
    rows: list[tuple[str, list[TableCell]]]


class Section(NamedTuple):
    """A section of the page with a table, a note below it, and another table of something named."""

    name: str
    title: str
    table: Table
    note: str
    more: Table | None = None
    more_of: str = ""


def page_title(data: ReportData) -> str:
    """Returns model, cluster and step time; the kinds of devices where the plan names no cluster."""
    plan, line = data.plan, data.timeline
    if not isinstance((plan.source or {}).get("cluster"), str):
        kinds: Counter[str] = Counter()
        for device, count in zip(line.devices, line.counts.tolist(), strict=True):
            kinds[device.kind or "device"] += count
        text = "+".join(f"{kind}:{count}" for kind, count in kinds.items())
        plan = dataclasses.replace(plan, source={**(plan.source or {}), "cluster": text})
    return title(plan, line.step_time_s, line.name)


def summary(data: ReportData) -> dict[str, Any]:
    """Returns verdict, lines of introduction, reasons against the plan, and key figures: names, values and remarks."""
    line, plan = data.timeline, data.plan
    step, used = line.step_time_s, line.devices_used
    fullest = fullest_share(line.peak_memory_bytes.tolist(), line.devices)
    words = [f"Plan of {plan.planner}", f"{_samples(line.samples)} a step"]
    words.append("groups one by one" if plan.strategy is None else uniform_words(plan.strategy))
    if plan.order is not None:
        words.append("an order of its own")
    lead = [f"{', '.join(words)}.", _bound((plan.predicted.parts or {}) if step else {})]
    reasons = list(line.violations[:_REASONS])
    if len(line.violations) > _REASONS:
        reasons.append(f"and {len(line.violations) - _REASONS} more like these")
    filled = "no limits" if fullest is None else f"up to {percent(fullest)} of a device"
    share = "-" if not step else percent(float((line.busy_s * line.counts).sum()) / (step * max(1, used)))
    figures = [
        ("Step time", seconds_text(step), ""),
        ("Throughput", "-" if not step else f"{line.samples / step:,.1f}", "" if not step else "samples/s"),
        ("Devices used", str(used), f"of {line.counts.sum():,}"),
        ("Computing", share, "of those devices' time"),
        ("Largest peak", bytes_text(int(line.peak_memory_bytes.max(initial=0))), filled),
    ]
    if len(line.sent_bytes):  # collectives left out, which move most of the bytes of a strategy
        between = "Between stages" if plan.strategy is not None else "Between devices"
        figures.append((between, bytes_text(int(line.sent_bytes.sum())), f"in {len(line.sent_bytes):,} transfers"))
    calls = np.isin(data.lanes.row, [i for i, row in enumerate(data.lanes.rows) if row.kind == COLLECTIVE])
    if calls.any():
        span_s = float((data.lanes.end_s[calls] - data.lanes.start_s[calls]).sum())
        figures.append(("Collectives", f"{int(calls.sum()):,}", f"{seconds_text(span_s)} in all"))
    level, badge = verdict(line.feasible, fullest)
    reasons = [] if line.feasible else reasons
    return {"level": level, "badge": badge, "lead": [text for text in lead if text], "reasons": reasons, "figures": figures}


def _bound(parts: Mapping[str, float]) -> str:
    """Returns the parts of the busiest place's time under a strategy; nothing where they are not known."""
    total_s, ordered = sum(parts.values()), sorted(parts.items(), key=lambda item: -item[1])
    shares = [(_DOING.get(name, name), seconds / total_s) for name, seconds in ordered if seconds > 0.001 * total_s]
    return f"Bounded by {shares[0][0]}: {', '.join(f'{percent(s)} {name}' for name, s in shares)}." if shares else ""


def sections(data: ReportData) -> dict[str, Section]:
    """Returns the sections with tables, by name; those without rows are left out."""
    found = (_devices(data), _path(data), _planners(data), _measured(data))
    return {section.name: section for section in found if section is not None}


def _devices(data: ReportData) -> Section:
    line, step = data.timeline, data.timeline.step_time_s
    rows: list[Row] = []
    for index, device in enumerate(line.devices):
        peak, limit, busy_s = int(line.peak_memory_bytes[index]), device.memory_bytes, float(line.busy_s[index])
        share = None if not limit else peak / limit
        level = "" if share is None else _LEVELS[fullness(share)]
        cells = {
            "Device": TableCell(device.name),
            "Kind": TableCell(device.kind or "-"),
            "Blocks" if data.plan.strategy else "Groups": TableCell(f"{data.groups_on_device[index]:,}"),
            "Busy": TableCell(seconds_text(busy_s) if step else "-"),
            "Share of the step": _share(busy_s / step) if step else TableCell("-"),
            "Idle before, within, after": TableCell(_idle(data, index)),
            "Resident": TableCell(bytes_text(int(line.resident_bytes[index]))),
            "Peak": TableCell(bytes_text(peak), level),
            "Memory": TableCell("-" if limit is None else bytes_text(limit)),
            "Peak of memory": TableCell("-") if share is None else _share(share, level),
        }
        rows.append(("", cells))
    note = f"Peaks are those of the executor, {data.executor}: weights, gradients, optimizer state, activations and copies."
    if step is None:
        note = "The step does not complete; peaks are what the groups hold all the time."
    return Section("devices", "Devices", _table("Devices", rows), note)


def _idle(data: ReportData, device: int) -> str:
    """Returns idle time of a device before its first op, between ops and after the last one."""
    here, step = data.lanes.row == device, data.timeline.step_time_s
    if not step or not here.any():
        return "-"
    first, last = float(data.lanes.start_s[here].min()), float(data.lanes.end_s[here].max())
    within = last - first - float((data.lanes.end_s[here] - data.lanes.start_s[here]).sum())
    return " + ".join(seconds_text(max(0.0, value)) for value in (first, within, step - last))


def _path(data: ReportData) -> Section | None:
    """Returns the critical path by cause and place; None when the step does not complete."""
    total_s = sum(part.seconds for part in data.path)
    if not total_s:
        return None
    rows: list[Row] = []
    for part in data.path[:_PARTS]:
        cells = {
            "What": TableCell(_CAUSES[part.cause]),
            "Where": TableCell(part.where),
            "Time": TableCell(seconds_text(part.seconds)),
        }
        rows.append(("", {**cells, "Share of the step": _share(part.seconds / total_s), "Links": TableCell(f"{part.links:,}")}))
    rest_s = sum(part.seconds for part in data.path[_PARTS:])
    note = "The chain of work, transfers and waits that makes the step as long as it is: its links add up to the step."
    if rest_s:
        note += f" Left out: {len(data.path) - _PARTS:,} parts of {percent(rest_s / total_s)} together."
    return Section("path", "Critical path", _table("Critical path", rows), note)


def costliest(data: ReportData) -> str:
    """Returns the module that computes longest, in a sentence; nothing where none computes."""
    spent: Counter[str] = Counter()
    for name, seconds in zip(data.timeline.group_names, data.timeline.group_s.tolist(), strict=True):
        spent[chain.module_of(name)] += seconds
    most = max(spent, key=lambda name: spent[name])
    if not spent[most]:
        return ""
    share = percent(spent[most] / sum(spent.values()))
    return f"Costliest module: {most}, {seconds_text(spent[most])}, {share} of all work."


def _planners(data: ReportData) -> Section | None:
    """Returns one row a planner; None when there are none."""
    if not data.planners:
        return None
    own_s, samples = next((row.step_time_s for row in data.planners if row.this), None), data.timeline.samples
    rows = []
    for row in data.planners:
        cells = {
            "Planner": TableCell(row.planner),
            "Step time": TableCell(seconds_text(row.step_time_s)),
            "Samples/s": TableCell(f"{samples / row.step_time_s:,.1f}" if row.step_time_s else "-"),
            "Speed against this plan": TableCell(f"{own_s / row.step_time_s:.3f}" if own_s and row.step_time_s else "-"),
            "Devices": TableCell(str(row.devices_used or "-")),
            "Largest share of memory": TableCell(percent(row.memory_share), _LEVELS[fullness(row.memory_share)]),
            "Planning": TableCell("-" if row.seconds is None else f"{row.seconds:.2f} s"),
        }
        rows.append(_noted(row.this, row.note, cells))
    note = (
        f"Simulated by the same executor, {data.executor}, on the same problem, {_samples(data.timeline.samples)} a step for "
        "everyone. Plans that do not fit come last."
    )
    return Section("planners", "Planners", _table("Planners", rows), note)


def _measured(data: ReportData) -> Section | None:
    """Returns predicted against measured step times, and the processes of this plan; None when there are none."""
    if not data.measured:
        return None
    rows = []
    for row in data.measured:
        cells = {
            "Plan": row.name,
            "Engine": row.engine or "-",
            "Steps": str(len(row.step_s)),
            "Measured": seconds_text(row.median_s),
            "Spread": percent(row.spread),
            "Predicted": seconds_text(row.predicted_s),
            "Error": "-" if row.error is None else f"{100 * row.error:+.1f} %",
        }
        rows.append(_noted(row.plan == data.plan.fingerprint, "", {name: TableCell(text) for name, text in cells.items()}))
    errors = [abs(row.error) for row in data.measured if row.error is not None]
    notes = [f"Mean error {percent(sum(errors) / len(errors))} over {len(errors)} plans."] if errors else []
    notes.append("Measured: median step of the slowest process. Spread: interquartile range over the median.")
    mine = next((row for row in data.measured if row.plan == data.plan.fingerprint and row.places), None)
    table = _table("Predicted against measured step times", rows)
    more = (None, "") if mine is None else (_places(mine), mine.name)
    return Section("measured", "Predicted and measured", table, " ".join(notes), *more)


def _places(row: PlanTiming) -> Table:
    rows = []
    for place in row.places:
        peaks = (place.peak_memory_bytes, place.predicted_peak_bytes)
        measured, predicted = ("-" if size is None else bytes_text(size) for size in peaks)
        cells = {
            "Process": str(place.rank),
            "Host": place.host,
            "Busy": seconds_text(place.busy_s),
            "Predicted busy": seconds_text(place.predicted_busy_s),
            "Waiting": seconds_text(place.wait_s),
            "Update": seconds_text(place.update_s),
            "Peak": measured,
            "Predicted peak": predicted,
        }
        rows.append(("", {name: TableCell(text) for name, text in cells.items()}))
    return _table("This plan by process", rows)


def about(data: ReportData, version: str) -> Iterator[tuple[str, str, bool]]:
    """Yields sources of the numbers: names and values, and whether the value is code."""
    line, plan = data.timeline, data.plan
    source = line.source or plan.source or {}
    yield "Problem", f"{len(line.group_names):,} groups, {len(line.op_names):,} ops, {line.tensors:,} tensors", False
    yield "Drawn", f"{line.ops_run:,} ops, {len(line.sent_bytes):,} transfers", False
    yield "Executor", f"{data.executor}, simulated", False
    yield "Planner", f"{plan.planner}, seed {plan.seed}", False
    graph = source.get("graph")
    named = {"model": graph.get("model") if isinstance(graph, Mapping) else None}
    named |= {name: source.get(name) for name in ("cluster", "host")}
    for name, value in named.items():
        if isinstance(value, str):
            yield name.capitalize(), value[:300], False
    yield "Made with", f"rlplace {version}", False
    yield "Problem's fingerprint", plan.problem, True
    yield "Plan's fingerprint", plan.fingerprint, True


def _noted(this: bool, remark: str, cells: dict[str, TableCell]) -> Row:
    """Returns a row with its remarks in a last column; the row of the report's plan is marked."""
    note = ". ".join(part for part in ("this plan" if this else "", remark) if part)
    return "this" if this else "", {**cells, "": TableCell(note, "text")}


def _table(label: str, rows: Sequence[Row]) -> Table:
    """Returns a table without the columns that have no content."""
    first, *others = rows[0][1]
    used = [first, *(name for name in others if any(cells[name].text not in ("", "-") for _, cells in rows))]
    return Table(label, used, [(kind, [cells[name] for name in used]) for kind, cells in rows])


def _share(value: float, level: str = "") -> TableCell:
    return TableCell(percent(value), f"share {level}".strip(), min(1.0, max(0.0, value)))


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"
