"""A timeline as a trace for Perfetto or Chrome's about://tracing: a track per device and one per link that is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlplace.errors import InputError
from rlplace.files import write_json
from rlplace.problem import PHASES, Problem
from rlplace.simulator.timeline import EXECUTOR, Timeline

_MICROSECONDS = 1e6
_DEVICES, _LINKS = 1, 2  # process numbers, which Perfetto shows as two sections


def trace_events(problem: Problem, timeline: Timeline) -> list[dict[str, Any]]:
    """Returns the events of a trace file: one complete event ("X") an op and a transfer, times in microseconds.

    Collectives have a track among the links.

    Raises:
        InputError: The step does not complete, so there is nothing to draw; or the timeline is of another problem.
    """
    if len(timeline.device_of_op) != problem.num_ops:
        raise InputError(
            f"trace: the timeline has {len(timeline.device_of_op)} ops, the problem {problem.num_ops}; "
            "draw it with the problem that was simulated"
        )
    if timeline.step_time_s is None:
        raise InputError(f"trace: the step does not complete: {timeline.violations[0]}")
    pairs = sorted(set(zip(timeline.transfer_source.tolist(), timeline.transfer_destination.tolist(), strict=True)))
    track_of_pair = {pair: track for track, pair in enumerate(pairs)}
    events = [_name(_DEVICES, None, "devices"), _name(_LINKS, None, "links")]
    events += [_name(_DEVICES, track, device.name) for track, device in enumerate(problem.devices)]
    for (source, destination), track in track_of_pair.items():
        events.append(_name(_LINKS, track, f"{problem.devices[source].name} to {problem.devices[destination].name}"))
    collective_of = {op: collective for collective in problem.collectives for op in collective.ops}
    held = sorted({collective.channels for collective in problem.collectives})  # those of one track never overlap
    for number, channels in enumerate(held):
        members = next(collective.ops for collective in problem.collectives if collective.channels == channels)
        names = ", ".join(problem.devices[timeline.device_of_op[op]].name for op in members)
        events.append(_name(_LINKS, len(pairs) + number, f"collectives of {names}"))
    for op in np.argsort(timeline.start_s, kind="stable").tolist():
        details = {
            "op": op,
            "group": problem.group_names[problem.op_group[op]],
            "temporary_bytes": int(problem.temporary_bytes[op]),
        }
        start, end, phase = timeline.start_s[op], timeline.end_s[op], PHASES[problem.op_phase[op]]
        if op not in collective_of:
            track = int(timeline.device_of_op[op])
            events.append(_span(_DEVICES, track, problem.op_names[op], phase, start, end, details))
        elif collective_of[op].ops[0] == op:
            track = len(pairs) + held.index(collective_of[op].channels)
            events.append(_span(_LINKS, track, problem.op_names[op], "collective", start, end, details))
    for i, tensor in enumerate(timeline.transfer_tensor.tolist()):
        producer = int(problem.tensor_producer[tensor])
        name = problem.op_names[producer] if producer >= 0 else problem.group_names[problem.tensor_owner[tensor]]
        pair = (int(timeline.transfer_source[i]), int(timeline.transfer_destination[i]))
        details = {"tensor": tensor, "bytes": int(problem.tensor_bytes[tensor])}
        start, end = timeline.transfer_start_s[i], timeline.transfer_end_s[i]
        events.append(_span(_LINKS, track_of_pair[pair], name, "transfer", start, end, details))
    return events


def write_trace(problem: Problem, timeline: Timeline, path: str | Path) -> None:
    """Writes a timeline as trace-event JSON, atomically; open it at ui.perfetto.dev."""
    write_json(
        path,
        {
            "traceEvents": trace_events(problem, timeline),
            "displayTimeUnit": "ms",
            "otherData": {
                "problem": problem.name,
                "executor": EXECUTOR,
                "step_time_s": timeline.step_time_s,
                "peak_memory_bytes": timeline.peak_memory_bytes.tolist(),
            },
        },
    )


def _name(process: int, track: int | None, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": process, "name": "process_name" if track is None else "thread_name"}
    if track is not None:
        event["tid"] = track
    return event | {"args": {"name": name}}


def _span(process: int, track: int, name: str, category: str, start: float, end: float, details: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": float(start) * _MICROSECONDS,
        "dur": float(end - start) * _MICROSECONDS,
        "args": details,
    }
