"""The critical path as people read it: visits to devices and links, in order of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.problem import Problem
from rlplace.simulator.path import CHANNEL, COLLECTIVE, COMPUTE, ORDER, TRANSFER, Link, location_of, pair_name
from rlplace.simulator.simulated_plan import SimulatedPlan


def channel_pairs(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """Returns the pairs of devices that use each channel."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for i, row in enumerate(problem.links.effective_channels):
        for j, held in enumerate(row):
            if i != j:
                for channel in held:
                    pairs.setdefault(channel, []).append((i, j))
    return pairs


def channel_names(problem: Problem) -> dict[int, str]:
    """What each channel is: the pair that it joins, what leaves or enters a device, or the pairs that share it.

    Where the same pairs use several channels, such as the ports of the only two devices, the first one stands for all.
    """
    first = {tuple(pairs): channel for channel, pairs in reversed(sorted(channel_pairs(problem).items()))}
    names = {channel: _channel(problem, list(pairs)) for pairs, channel in first.items()}
    repeated: dict[str, list[int]] = {}
    for channel, name in names.items():
        repeated.setdefault(name, []).append(channel)
    for name, channels in repeated.items():
        if len(channels) > 1:
            names |= {channel: f"{name} (channel {channel})" for channel in channels}
    return names


def _channel(problem: Problem, pairs: list[tuple[int, int]]) -> str:
    sources, destinations = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    if len(pairs) == 1:
        return pair_name(problem, *pairs[0])
    if len(sources) == 1:
        return f"out of {problem.devices[sources[0]].name}"
    if len(destinations) == 1:
        return f"into {problem.devices[destinations[0]].name}"
    return f"{_some(problem, sources)}->{_some(problem, destinations)}"


def _some(problem: Problem, devices: list[int]) -> str:
    names = [problem.devices[device].name for device in devices]
    return ",".join(names) if len(names) <= 4 else f"{names[0]}..{names[-1]}"


@dataclass(frozen=True)
class Stretch:
    """Consecutive links of the critical path in one place: a device, a pair of devices, the collectives.

    Attributes:
        where: Device, ``gpu0->gpu1``, or ``collectives``.
        start_s, end_s: From the beginning of the step.
        wait_s: Seconds of it that are waits for the device or the link.
        links: Number of links of the path.
        first, last: What runs, moves or waits in the first and the last of them.
        blocker: What occupies the device or link during the longest wait; empty where nothing does.
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


def stretches(run: SimulatedPlan, path: Sequence[Link]) -> tuple[Stretch, ...]:
    """Returns the path, with consecutive links of one location joined."""
    joined: list[list[Link]] = []
    for link in path:
        if joined and location_of(run, joined[-1][0]) == location_of(run, link):
            joined[-1].append(link)
        else:
            joined.append([link])
    return tuple(_stretch(run, links) for links in joined)


def _stretch(run: SimulatedPlan, links: list[Link]) -> Stretch:
    waits = [link for link in links if link.cause not in (COMPUTE, TRANSFER, COLLECTIVE)]
    longest = max(waits, key=lambda link: link.seconds, default=None)
    blocker = run.problem.op_names[longest.blocker] if longest is not None and longest.blocker >= 0 else ""
    where, first, last = location_of(run, links[0]), _name(run, links[0]), _name(run, links[-1])
    ops = first if first == last else f"{first} .. {last}"
    if len(waits) == len(links) and longest is not None:
        what = f"{ops} waits for {where}, {_why(longest, blocker)}"
    elif links[0].destination >= 0:
        what = f"{ops} moves over {where}"
    else:
        what = f"{ops} communicates" if links[0].device < 0 else f"{where} computes {ops}"
    if longest is not None and len(waits) < len(links):
        what += f", waits included: {_why(longest, blocker)}"
    wait_s = sum(link.seconds for link in waits)
    return Stretch(where, links[0].start_s, links[-1].end_s, wait_s, len(links), first, last, blocker, what)


def _why(wait: Link, blocker: str) -> str:
    if wait.cause == ORDER:
        return "idle until its turn comes"
    return f"busy with {blocker}" if blocker else "behind earlier transfers" if wait.cause == CHANNEL else "busy"


def _name(run: SimulatedPlan, link: Link) -> str:
    """Returns name of the op; for a parameter that is sent, of its group."""
    return run.problem.op_names[link.op] if link.op >= 0 else run.problem.group_names[link.group]
