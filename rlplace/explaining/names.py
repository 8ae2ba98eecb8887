"""Names for people: modules of groups, and channels by the devices that they join."""

from __future__ import annotations

from rlplace.problem import Problem


def module_of(group_name: str) -> str:
    """The module that a group is counted to: its path up to the first number, or all of it.

    ``transformer.h.3`` of ``transformer.h.3.mlp.act#2``, ``lm_head`` of itself.
    """
    path = group_name.partition("@")[0].partition("#")[0]
    parts = path.split(".")
    for end, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:end])
    return path


def pair_name(problem: Problem, source: int, destination: int) -> str:
    """``gpu0->gpu1``."""
    return f"{problem.devices[source].name}->{problem.devices[destination].name}"


def channel_pairs(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """The pairs of devices that use each channel."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for i, row in enumerate(problem.links.effective_channels):
        for j, held in enumerate(row):
            if i != j:
                for channel in held:
                    pairs.setdefault(channel, []).append((i, j))
    return pairs


def channel_names(problem: Problem) -> dict[int, str]:
    """What each channel is: the pair that it joins, what leaves or enters a device, or the pairs that share it.

    Of channels that the same pairs use, such as the ports of the only two devices, the first one stands for all.
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
