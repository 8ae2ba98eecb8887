"""The bounds of a placement's step: its realised critical path, the busiest device and channel, the fullest memory.

Beside them lower bounds that hold for any plan of the problem: they limit how much quicker a plan could be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlplace.explanation.comparison import MOST_ROWS
from rlplace.placement.common.bounds import largest_bound
from rlplace.problem import Problem
from rlplace.simulator.path import (
    CHANNEL,
    COLLECTIVE,
    COMPUTE,
    DEVICE,
    ORDER,
    TRANSFER,
    Link,
    PathPart,
    location_of,
    pair_name,
    path_parts,
    realised_path,
)
from rlplace.simulator.simulated_plan import SimulatedPlan, channel_holds
from rlplace.text import gb, ms, percent, table


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
        name: The devices that it connects; see `channel_names`.
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
class Stretch:
    """Consecutive links of the critical path in one place: a device, a pair of devices, the collectives.

    Attributes:
        where: Device, ``gpu0->gpu1``, or ``collectives``.
        start_s, end_s: From the beginning of the step.
        wait_s: Seconds of it that are waits for the device or the link.
        links: Number of links of the path.
        first, last: The op that runs, moves or waits in the first and the last of them.
        blocker: The op that occupies the device or link during the longest wait; empty where none does.
        sentence: The stretch in words.
    """

    where: str
    start_s: float
    end_s: float
    wait_s: float
    links: int
    first: str
    last: str
    blocker: str
    sentence: str


@dataclass(frozen=True)
class StepBounds:
    """The bounds of a step.

    Attributes:
        step_time_s: Step time of the plan.
        path: The critical path by cause and place, longest first; the seconds add up to the step.
        story: The path in order of time.
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

    @property
    def headline(self) -> str:
        """The largest part of the step, in one sentence."""
        step = self.step_time_s
        if step <= 0:
            return "the step takes no time"
        work, move = self.seconds(COMPUTE), self.seconds(TRANSFER, COLLECTIVE)
        queue, links, busiest = self.seconds(DEVICE), self.seconds(CHANNEL), self.busiest
        if busiest.busy_s >= 0.9 * step and queue >= 0.1 * step:
            return f"{busiest.name} computes {100 * busiest.busy_s / step:.0f} % of the step: its work bounds it"
        if busiest.busy_s >= 0.9 * step:
            return f"{100 * work / step:.0f} % of the step is spent in ops that depend on one another, most on {busiest.name}"
        seconds, state = max(
            (work, "in ops that depend on one another"),
            (move, "moving data between devices"),
            (queue, "with ready ops waiting for a busy device"),
            (links, "with data waiting for a busy link"),
        )
        return f"{100 * seconds / step:.0f} % of the step is spent {state}"

    def lines(self) -> list[str]:
        """Returns tables of the critical path, its longest stretches in order of time, the devices and the links."""
        step = self.step_time_s or 1.0
        rows = [[part.cause, part.where, ms(part.seconds), percent(part.seconds / step)] for part in self.path[:MOST_ROWS]]
        if rest := self.path[MOST_ROWS:]:
            seconds = sum(part.seconds for part in rest)
            rows.append([f"{len(rest)} more", "", ms(seconds), percent(seconds / step)])
        lines = [*table(["critical path", "<where", "ms", "of step"], rows), ""]
        by_length = sorted(self.story, key=lambda stretch: stretch.start_s - stretch.end_s)
        longest = {id(stretch) for stretch in by_length[:MOST_ROWS]}
        rows = [[ms(s.start_s), ms(s.end_s), ms(s.wait_s), s.sentence] for s in self.story if id(s) in longest]
        lines += table(["from ms", "to ms", "waiting", "<what"], rows)
        if left := len(self.story) - len(rows):
            lines.append(f"and {left} shorter stretches in between")
        rows = []
        for device in self.devices:
            memory = gb(device.peak_bytes), gb(device.memory_bytes), percent(device.used) if device.memory_bytes else "-"
            rows.append([device.name, ms(device.busy_s), percent(device.busy_s / step), str(device.groups), *memory])
        lines += ["", *table(["device", "busy ms", "of step", "groups", "peak GB", "memory GB", "used"], rows)]
        if self.channels:
            rows = [
                [link.name, ms(link.busy_s), percent(link.busy_s / step), str(link.transfers), gb(link.size_bytes)]
                for link in self.channels[:4]
            ]
            lines += ["", *table(["link", "busy ms", "of step", "transfers", "GB"], rows)]
        lines += ["", f"busiest device {self.busiest.name}"]
        if self.tightest is not None:
            lines.append(f"tightest memory {self.tightest.name}, {percent(self.tightest.used)} used")
        if self.lower_bound_s > 0:
            lines.append(
                f"no plan takes less than {ms(self.lower_bound_s)} ms ({self.lower_bound}): at most "
                f"{percent(max(self.most_gain, 0.0))} can be gained"
            )
        return lines


def step_bounds(run: SimulatedPlan) -> StepBounds:
    """Analyses a step that completes; see `StepBounds`."""
    path = realised_path(run)
    by_place = groupby(path, key=lambda link: location_of(run, link))
    story = tuple(_stretch(run, where, list(links)) for where, links in by_place)
    return StepBounds(
        run.step_s, path_parts(run, path), story, device_loads(run), channel_loads(run), *largest_bound(run.problem)
    )


def device_loads(run: SimulatedPlan) -> tuple[DeviceLoad, ...]:
    """Returns busy time and memory of every device."""
    problem, line = run.problem, run.line
    groups = np.bincount(run.plan.device_of_group, minlength=problem.num_devices)
    return tuple(
        DeviceLoad(device.name, float(line.busy_s[d]), int(groups[d]), int(line.peak_memory_bytes[d]), device.memory_bytes)
        for d, device in enumerate(problem.devices)
    )


def channel_loads(run: SimulatedPlan) -> tuple[ChannelLoad, ...]:
    """Returns channels that are used, busiest first; one for all channels of the same pairs of devices."""
    loads: dict[int, tuple[float, int, int]] = defaultdict(lambda: (0.0, 0, 0))
    for channels, start, end, _, moved_bytes in channel_holds(run):
        for channel in channels:
            busy_s, size_bytes, count = loads[channel]
            loads[channel] = busy_s + (end - start), size_bytes + moved_bytes, count + 1
    names, known = channel_names(run.problem), _channel_pairs(run.problem)  # a channel may be one of collectives alone
    used = [ChannelLoad(names.get(c, f"channel {c}"), c, *load) for c, load in loads.items() if c in names or c not in known]
    return tuple(sorted(used, key=lambda load: (-load.busy_s, load.channel)))


def _channel_pairs(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """Returns the pairs of devices that use each channel."""
    pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, row in enumerate(problem.links.effective_channels):
        for j, channels in enumerate(row):
            for channel in channels if i != j else ():
                pairs[channel].append((i, j))
    return pairs


def channel_names(problem: Problem) -> dict[int, str]:
    """Names each channel by the pair that it joins, the device that it leaves or enters, or the pairs that share it.

    Where the same pairs use several channels, such as the ports of the only two devices, the first one represents all.
    """
    first = {tuple(pairs): channel for channel, pairs in reversed(sorted(_channel_pairs(problem).items()))}
    names = {channel: _channel_name(problem, list(pairs)) for pairs, channel in first.items()}
    repeated: dict[str, list[int]] = defaultdict(list)
    for channel, name in names.items():
        repeated[name].append(channel)
    twins = {channel: name for name, channels in repeated.items() if len(channels) > 1 for channel in channels}
    return names | {channel: f"{name} (channel {channel})" for channel, name in twins.items()}


def _channel_name(problem: Problem, pairs: list[tuple[int, int]]) -> str:
    sources, destinations = ([problem.devices[d].name for d in sorted(set(ends))] for ends in zip(*pairs, strict=True))
    if len(pairs) == 1:
        return pair_name(problem, *pairs[0])
    if len(sources) == 1:
        return f"out of {sources[0]}"
    if len(destinations) == 1:
        return f"into {destinations[0]}"
    return "->".join(",".join(n) if len(n) <= 4 else f"{n[0]}..{n[-1]}" for n in (sources, destinations))


def _stretch(run: SimulatedPlan, where: str, links: Sequence[Link]) -> Stretch:
    problem = run.problem
    waits = [link for link in links if link.cause not in (COMPUTE, TRANSFER, COLLECTIVE)]
    longest = max(waits, key=lambda link: link.seconds, default=None)
    blocker = problem.op_names[longest.blocker] if longest is not None and longest.blocker >= 0 else ""
    first, last = (  # for a parameter that is sent, its group
        problem.op_names[link.op] if link.op >= 0 else problem.group_names[link.group] for link in (links[0], links[-1])
    )
    ops = first if first == last else f"{first} .. {last}"
    if len(waits) == len(links) and longest is not None:
        sentence = f"{ops} waits for {where}, {_reason(longest, blocker)}"
    elif links[0].destination >= 0:
        sentence = f"{ops} moves over {where}"
    else:
        sentence = f"{ops} communicates" if links[0].device < 0 else f"{where} computes {ops}"
    if longest is not None and len(waits) < len(links):
        sentence += f", waits included: {_reason(longest, blocker)}"
    wait_s = sum(link.seconds for link in waits)
    return Stretch(where, links[0].start_s, links[-1].end_s, wait_s, len(links), first, last, blocker, sentence)


def _reason(wait: Link, blocker: str) -> str:
    if wait.cause == ORDER:
        return "idle until its turn comes"
    return f"busy with {blocker}" if blocker else "behind earlier transfers" if wait.cause == CHANNEL else "busy"
