"""The executor: step time and peak memory of a plan."""

from rlplace.simulator.api import Simulator, TimelineBatch, default_priority, simulate, simulate_many
from rlplace.simulator.timeline import EXECUTOR, Timeline
from rlplace.simulator.trace import trace_events, write_trace

__all__ = [
    "EXECUTOR",
    "Simulator",
    "Timeline",
    "TimelineBatch",
    "default_priority",
    "simulate",
    "simulate_many",
    "trace_events",
    "write_trace",
]
