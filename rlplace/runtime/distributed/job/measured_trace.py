"""A measured step and the predicted one side by side, as a trace for Perfetto or about://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlplace.files import write_json
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.job.measure import Timed
from rlplace.simulator import simulate
from rlplace.simulator.trace import trace_events

_MICROSECONDS = 1e6
_MEASURED = 3  # the simulated sections are 1, devices, and 2, links


def write_measured_trace(timed: Timed, problem: Problem, plan: PlacementPlan, path: str | Path) -> None:
    """Writes both steps, atomically: the sections "devices" and "links" are simulated, "measured" is the median step.

    Args:
        timed: What was measured.
        problem: What the plan was made for.
        plan: The plan.
        path: Where to.
    """
    timeline = simulate(problem, plan)
    events = [*trace_events(problem, timeline), *measured_events(timed)]
    write_json(
        path,
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "problem": problem.name,
                "plan": timed.timing.name,
                "mode": timed.timing.mode,
                "predicted_step_time_s": timeline.step_time_s,
                "measured_step_time_s": timed.timing.median_s,
            },
        },
    )


def measured_events(timed: Timed) -> list[dict[str, Any]]:
    """One complete event for every interval, a track per rank."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _MEASURED, "tid": 0, "args": {"name": f"measured ({timed.timing.mode})"}}
    ]
    host_of = {place.rank: place.host for place in timed.timing.places}
    for rank, intervals in enumerate(timed.events):
        if rank not in host_of:
            continue
        name = f"rank {rank} on {host_of[rank]}"
        events.append({"ph": "M", "name": "thread_name", "pid": _MEASURED, "tid": rank, "args": {"name": name}})
        for event in intervals:
            events.append(
                {
                    "ph": "X",
                    "name": event.kind,
                    "cat": event.kind,
                    "pid": _MEASURED,
                    "tid": rank,
                    "ts": event.start_s * _MICROSECONDS,
                    "dur": event.seconds * _MICROSECONDS,
                }
            )
    return events
