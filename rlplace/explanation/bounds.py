"""What bounds a step: its realised critical path, the busiest device and channel, the fullest memory.

Beside them the lower bounds that hold for any plan of the problem: how much quicker a
plan could be at the most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.explanation.stretches import Stretch, channel_names, channel_pairs, stretches
from rlplace.placement.common.bounds import largest_bound
from rlplace.simulator.path import CHANNEL, COLLECTIVE, COMPUTE, DEVICE, TRANSFER, PathPart, path_parts, realised_path
from rlplace.simulator.simulated_plan import SimulatedPlan, channel_holds
from rlplace.strategy.drafts import Draft, joined
from rlplace.strategy.search.tries import SearchProblem
from rlplace.text import gb, ms, percent


@dataclass(frozen=True)
class DeviceLoad:
    """Busy time and memory of one device.

    Attributes:
        name: The device.
        busy_s: Seconds of computing.
        groups: Number of groups placed there.
        peak_bytes: Peak memory, reserved bytes included.
        memory_bytes: Capacity, None without a limit.
    """

    name: str
    busy_s: float
    groups: int
    peak_bytes: int
    memory_bytes: int | None

    @property
    def used(self) -> float:
        """Peak relative to capacity, 0 without a limit."""
        return self.peak_bytes / self.memory_bytes if self.memory_bytes else 0.0


@dataclass(frozen=True)
class ChannelLoad:
    """Busy time and traffic of one channel.

    Attributes:
        name: The devices that it connects; see `rlplace.explanation.stretches.channel_names`.
        channel: Its number.
        busy_s: Seconds during which transfers or collectives hold it.
        size_bytes: Bytes that transfers move over it.
        transfers: Number of transfers and collectives.
    """

    name: str
    channel: int
    busy_s: float
    size_bytes: int
    transfers: int


@dataclass(frozen=True)
class StepBounds:
    """What bounds a step.

    Attributes:
        step_time_s: Step time of the plan.
        path: The critical path by cause and place, longest first; the seconds add up to the step.
        story: The same path in order of time.
        devices: All devices, in their order.
        channels: Channels that are used, busiest first.
        lower_bound_s: No plan of the problem is quicker; 0 where nothing is known.
        lower_bound: Name of that bound: ``"critical path"``, ``"work"``, ``"largest group"`` or ``"memory"``.
    """

    step_time_s: float
    path: tuple[PathPart, ...]
    story: tuple[Stretch, ...]
    devices: tuple[DeviceLoad, ...]
    channels: tuple[ChannelLoad, ...]
    lower_bound_s: float
    lower_bound: str

    @property
    def busiest(self) -> DeviceLoad:
        """The device that computes longest."""
        return max(self.devices, key=lambda device: device.busy_s)

    @property
    def tightest(self) -> DeviceLoad | None:
        """The device whose memory is fullest; None where none has a limit."""
        limited = [device for device in self.devices if device.memory_bytes]
        return max(limited, key=lambda device: device.used, default=None)

    @property
    def most_gain(self) -> float:
        """Share of the step time that any plan could save at the most, by the lower bound."""
        return 1.0 - self.lower_bound_s / self.step_time_s if self.step_time_s > 0 else 0.0

    def seconds(self, *causes: str) -> float:
        """Returns seconds of the critical path by these causes."""
        return math.fsum(part.seconds for part in self.path if part.cause in causes)


def step_bounds(run: SimulatedPlan) -> StepBounds:
    """Analyses a step that completes; see `StepBounds`."""
    path = realised_path(run)
    lower_s, name = largest_bound(run.problem)
    return StepBounds(
        step_time_s=run.step_s,
        path=path_parts(run, path),
        story=stretches(run, path),
        devices=device_loads(run),
        channels=channel_loads(run),
        lower_bound_s=lower_s,
        lower_bound=name,
    )


def device_loads(run: SimulatedPlan) -> tuple[DeviceLoad, ...]:
    """Busy time and memory of every device."""
    problem, line = run.problem, run.line
    groups = np.bincount(run.plan.device_of_group, minlength=problem.num_devices)
    return tuple(
        DeviceLoad(device.name, float(line.busy_s[d]), int(groups[d]), int(line.peak_memory_bytes[d]), device.memory_bytes)
        for d, device in enumerate(problem.devices)
    )


def channel_loads(run: SimulatedPlan) -> tuple[ChannelLoad, ...]:
    """Returns channels that are used, busiest first; one for all channels of the same pairs of devices."""
    problem = run.problem
    busy: dict[int, float] = {}
    size: dict[int, int] = {}
    count: dict[int, int] = {}
    for channels, start, end, _, size_bytes in channel_holds(run):
        for channel in channels:
            busy[channel] = busy.get(channel, 0.0) + (end - start)
            size[channel] = size.get(channel, 0) + size_bytes
            count[channel] = count.get(channel, 0) + 1
    names = channel_names(problem)
    known = channel_pairs(problem)  # a channel may be one of collectives alone
    loads = [
        ChannelLoad(names.get(c, f"channel {c}"), c, busy[c], size[c], count[c]) for c in busy if c in names or c not in known
    ]
    return tuple(sorted(loads, key=lambda load: (-load.busy_s, load.channel)))


def headline(bounds: StepBounds) -> str:
    """Returns one sentence on what takes most of the step."""
    step = bounds.step_time_s
    if step <= 0:
        return "the step takes no time"
    work, move = bounds.seconds(COMPUTE), bounds.seconds(TRANSFER, COLLECTIVE)
    queue, links = bounds.seconds(DEVICE), bounds.seconds(CHANNEL)
    busiest = bounds.busiest
    if busiest.busy_s >= 0.9 * step and queue >= 0.1 * step:
        return f"{busiest.name} computes {_percent(busiest.busy_s / step)} of the step: its work bounds it"
    if busiest.busy_s >= 0.9 * step:
        return f"{_percent(work / step)} of the step goes by with ops that depend on one another, most on {busiest.name}"
    named = (
        (work, "ops that depend on one another"),
        (move, "data on its way between devices"),
        (queue, "ready ops that wait for a busy device"),
        (links, "data that waits for a busy link"),
    )
    seconds, what = max(named)
    return f"{_percent(seconds / step)} of the step goes by with {what}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_COMMUNICATION = ("tensor", "gather", "exchange", "hand_over")


@dataclass(frozen=True)
class StrategyBounds:
    """Where the time of a step goes, by the block executor.

    Attributes:
        seconds: On the busiest stage, by ``computing``, ``running again`` (recomputation, with its collectives),
            ``communication``, ``waiting for other stages`` and ``updates``; they add up to the step.
        blocks: First and last block of the busiest stage.
        devices: Names of the devices of the busiest stage.
        fullest: The device whose memory is fullest.
        peak_bytes: Peak memory of the fullest device.
        memory_bytes: Capacity of the fullest device; None without a limit.
    """

    seconds: Mapping[str, float]
    blocks: tuple[str, str]
    devices: tuple[str, ...]
    fullest: str
    peak_bytes: int
    memory_bytes: int | None

    @property
    def bound(self) -> str:
        """The activity that takes most of the step."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**dataclasses.asdict(self), "bound": self.bound}

    def lines(self) -> list[str]:
        """For people."""
        step_s = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {ms(seconds)} ms ({percent(seconds / step_s)})" for name, seconds in parts if seconds > 0)
        span = " to ".join(dict.fromkeys(self.blocks))
        among = " to ".join(dict.fromkeys((self.devices[0], self.devices[-1])))
        room = (
            "" if not self.memory_bytes else f" of {gb(self.memory_bytes)} GB ({percent(self.peak_bytes / self.memory_bytes)})"
        )
        return [
            f"bounded by {self.bound}: {shares}",
            f"busiest stage: {span} on {among}",
            f"fullest device: {self.fullest}, {gb(self.peak_bytes)} GB{room}",
        ]


def strategy_bounds(question: SearchProblem, draft: Draft) -> StrategyBounds:
    """Evaluates a draft with and without what runs again.

    Raises:
        InputError: It cannot be evaluated.
    """
    result, cluster = question.scores.evaluate(draft), question.cluster
    pipelines = (dataclasses.replace(one, recompute=bytes(len(one.recompute))) for one in draft.pipelines)
    plain = question.scores.evaluate(joined(pipelines)).parts
    worked = sum(result.parts[name] for name in ("compute", "tensor"))
    again_s = max(0.0, worked - plain["compute"] - plain["tensor"])
    again_compute_s = min(again_s, max(0.0, result.parts["compute"] - plain["compute"]))
    stage = draft.strategy(question.costs.names).stages[result.bottleneck]
    peaks = list(zip(result.peak_memory_bytes, cluster.devices, strict=True))
    peak, fullest = max(peaks, key=lambda pair: pair[0] / (pair[1].memory_bytes or float("inf")))
    return StrategyBounds(
        seconds={
            "computing": result.parts["compute"] - again_compute_s,
            "running again": again_s,
            "communication": sum(result.parts[name] for name in _COMMUNICATION) - (again_s - again_compute_s),
            "waiting for other stages": result.parts["bubble"],
            "updates": result.parts["update"],
        },
        blocks=(stage.blocks[0], stage.blocks[-1]),
        devices=tuple(cluster.devices[device].name for device in stage.devices),
        fullest=fullest.name,
        peak_bytes=peak,
        memory_bytes=fullest.memory_bytes,
    )
