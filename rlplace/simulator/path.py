"""The realised critical path: the chain of work, transfers and waits that made a step as long as it was.

Walking back from the last op to end: an op ran for some time; before that it was ready and waited while its device was busy
with others; and it became ready when its last input arrived, by a transfer or from an op of its own device. A transfer moved
for some time; before that it waited for its channels; and it was there to be sent when its producer ended. So every moment of
the step belongs to exactly one link of the chain, and the links' seconds add up to the step.

Waits are part of the chain, and what goes on during a wait is named but not followed: the chain follows what depends on what.
With `through_devices` it also follows what kept a device busy, as is the custom for pipelines, whose ops have a fixed order.
Where several inputs arrived in the same instant the first of them is followed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.problem.order import grouped
from rlplace.simulator.simulated_plan import SimulatedPlan, channel_holds

Key = TypeVar("Key")

COMPUTE, TRANSFER, COLLECTIVE, DEVICE, CHANNEL, ORDER = "compute", "transfer", "collective", "device busy", "link busy", "order"


CAUSES = (COMPUTE, TRANSFER, COLLECTIVE, DEVICE, CHANNEL, ORDER)
"""Causes of the links of a chain: an op runs; a tensor moves; a collective runs; a ready op waits for its device; a
transfer or collective waits for its channels; a ready op waits for its turn in the order while its device is idle."""


@dataclass(frozen=True)
class Link:
    """One link of the chain.

    Attributes:
        cause: One of `CAUSES`.
        start_s, end_s: From the beginning of the step.
        device: Where it computes or waits; of a transfer the source; -1 of collectives.
        destination: Receiving device of transfers and their waits, else -1.
        group: Group of the simulated problem that runs, is sent from, or waits.
        op: Op of the simulated problem; of transfers the producer, -1 for a parameter.
        blocker: Op that the device is busy with, or that made what the channels are busy with; -1 where nothing is.
    """

    cause: str
    start_s: float
    end_s: float
    device: int
    destination: int
    group: int
    op: int
    blocker: int = -1

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def realised_path(run: SimulatedPlan, *, through_devices: bool = False) -> tuple[Link, ...]:
    """Returns the chain in order of time; links of no length are left out.

    Args:
        run: The simulated plan.
        through_devices: Whether an op that found its device busy follows what the device did before.

    The first link begins at 0, each begins where the one before ends, and the last ends with the step. Empty when the step
    cannot complete.
    """
    if run.line.step_time_s is None or run.problem.num_ops == 0:
        return ()
    return tuple(link for link in reversed(list(_Walk(run, through_devices).back())) if link.end_s > link.start_s)


Before = tuple[bool, int] | None
"""What came last before a link could begin: whether it is a transfer, and its number, else an op's; None: the step began."""


class _Walk:
    """Looks up what was before."""

    def __init__(self, run: SimulatedPlan, through_devices: bool) -> None:
        self.run, self.line, self.problem = run, run.line, run.problem
        problem = run.problem
        self.device = self.line.device_of_op
        self.input_ptr, self.input = grouped(problem.consumers, problem.edge_tensor, problem.num_ops)
        ends = zip(self.line.transfer_tensor.tolist(), self.line.transfer_destination.tolist(), strict=True)
        self.arrival = {key: transfer for transfer, key in enumerate(ends)}
        self.collective = np.full(problem.num_ops, -1, dtype=np.int64)
        for index, collective in enumerate(problem.collectives):
            self.collective[list(collective.ops)] = index
        self.on_device = [self.by_start(self.device == d) for d in range(problem.num_devices)]
        self.channels = self.channel_uses()
        self.previous = np.full(problem.num_ops, -1, dtype=np.int64)
        for d in range(problem.num_devices if through_devices else 0):
            ops = np.flatnonzero((self.device == d) & (self.collective < 0))
            ops = ops[np.lexsort((self.line.end_s[ops], self.line.start_s[ops]))]
            self.previous[ops[1:]] = ops[:-1]

    def by_start(self, here: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns start, end and number of the ops that took a device's time, in order."""
        ops = np.flatnonzero(here & (self.collective < 0) & (self.line.end_s > self.line.start_s))
        ops = ops[np.argsort(self.line.start_s[ops], kind="stable")]
        return self.line.start_s[ops], self.line.end_s[ops], ops

    def channel_uses(self) -> dict[int, list[tuple[float, float, int]]]:
        """Returns the uses of each channel in order of start: start, end, and the producer of the tensor that moves."""
        uses: dict[int, list[tuple[float, float, int]]] = {}
        for channels, start, end, op, _ in channel_holds(self.run):
            for channel in channels:
                uses.setdefault(channel, []).append((start, end, op))
        for rows in uses.values():
            rows.sort()
        return uses

    def back(self) -> Iterator[Link]:
        """Yields the chain from its end."""
        item: Before = (False, int(self.line.end_s.argmax()))
        while item is not None:
            is_transfer, number = item
            if is_transfer:
                item = yield from self.transfer(number)
            elif self.collective[number] >= 0:
                item = yield from self.together(int(self.collective[number]))
            else:
                item = yield from self.op(number)

    def op(self, op: int) -> Generator[Link, None, Before]:
        device, group = int(self.device[op]), int(self.problem.op_group[op])
        start, end = float(self.line.start_s[op]), float(self.line.end_s[op])
        yield Link(COMPUTE, start, end, device, -1, group, op)
        ready, before = self.ready(op)
        begins, ends, ops = self.on_device[device]
        among = slice(int(np.searchsorted(ends, ready, side="right")), int(np.searchsorted(begins, start)))
        spans = list(zip(begins[among].tolist(), ends[among].tolist(), ops[among].tolist(), strict=True))
        for begin, stop, blocker in reversed(_cover(spans, ready, start)):
            cause = DEVICE if blocker >= 0 else ORDER
            yield Link(cause, begin, stop, device, -1, group, op, blocker)
        return before

    def transfer(self, x: int) -> Generator[Link, None, Before]:
        source, destination = int(self.line.transfer_source[x]), int(self.line.transfer_destination[x])
        start, end = float(self.line.transfer_start_s[x]), float(self.line.transfer_end_s[x])
        tensor = int(self.line.transfer_tensor[x])
        available, before = self.made(tensor)
        op, owner = int(self.problem.tensor_producer[tensor]), int(self.problem.tensor_owner[tensor])
        group = int(self.problem.op_group[op]) if op >= 0 else owner
        yield Link(TRANSFER, start, end, source, destination, group, op)
        held = self.problem.links.effective_channels[source][destination]
        for begin, stop, blocker in reversed(_cover(self.uses(held, available, start), available, start)):
            yield Link(CHANNEL, begin, stop, source, destination, group, op, blocker)
        return before

    def together(self, index: int) -> Generator[Link, None, Before]:
        """Yields a collective; it waited for the last input of all its ops."""
        members = self.problem.collectives[index].ops
        op = members[0]
        start, end, group = float(self.line.start_s[op]), float(self.line.end_s[op]), int(self.problem.op_group[op])
        yield Link(COLLECTIVE, start, end, -1, -1, group, op)
        ready, before = max((self.ready(member) for member in members), key=lambda moment: moment[0])
        held = self.problem.collectives[index].channels
        for begin, stop, blocker in reversed(_cover(self.uses(held, ready, start), ready, start)):
            yield Link(CHANNEL, begin, stop, -1, -1, group, op, blocker)
        return before

    def uses(self, channels: tuple[int, ...], begin: float, end: float) -> list[tuple[float, float, int]]:
        """Returns the uses of any of these channels between two moments, in order of start."""
        return sorted(
            {use for channel in channels for use in self.channels.get(channel, ()) if use[1] > begin and use[0] < end}
        )

    def made(self, tensor: int) -> tuple[float, Before]:
        """Returns the time at which a tensor is complete on the device that produces it, and the op that ended then."""
        maker = int(self.problem.tensor_producer[tensor])
        return (0.0, None) if maker < 0 else (float(self.line.end_s[maker]), (False, maker))

    def ready(self, op: int) -> tuple[float, Before]:
        """Returns when the last input of an op (or its device, where the path counts devices) was ready, and which it is."""
        best: tuple[float, Before] = (0.0, None)
        for tensor in self.input[self.input_ptr[op] : self.input_ptr[op + 1]].tolist():
            x = self.arrival.get((tensor, int(self.device[op])))
            arrived = self.made(tensor) if x is None else (float(self.line.transfer_end_s[x]), (True, x))
            if arrived[0] > best[0] or best[1] is None:
                best = arrived
        last = int(self.previous[op])
        if last >= 0 and best[0] < self.line.end_s[last] <= self.line.start_s[op]:
            return float(self.line.end_s[last]), (False, last)
        return best


def _cover(spans: list[tuple[float, float, int]], begin: float, end: float) -> list[tuple[float, float, int]]:
    """Cuts the time from `begin` to `end` into consecutive pieces, each with the op that occupies it, -1 where none does.

    Args:
        spans: (start, end, op) in order of start; where they overlap, the first one counts.
        begin: Seconds.
        end: Seconds.
    """
    pieces: list[tuple[float, float, int]] = []
    at = begin
    for start, stop, op in spans:
        if at >= end:
            break
        if stop <= at:
            continue
        if start > at:
            pieces.append((at, min(start, end), -1))
            at = min(start, end)
        if at < end:
            pieces.append((at, min(stop, end), op))
            at = min(stop, end)
    if at < end:
        pieces.append((at, end, -1))
    return pieces


@dataclass(frozen=True)
class PathPart:
    """Seconds of the critical path with one cause on one device or link.

    Attributes:
        cause: One of `CAUSES`.
        where: Device, ``gpu0->gpu1``, or ``collectives``.
        seconds: Sum over these links of the path.
        links: Number of these links.
    """

    cause: str
    where: str
    seconds: float
    links: int


def location_of(run: SimulatedPlan, link: Link) -> str:
    """Names the location of a link of the path: device, pair of devices, or ``collectives``."""
    if link.destination >= 0:
        return pair_name(run.problem, link.device, link.destination)
    return run.problem.devices[link.device].name if link.device >= 0 else "collectives"


def pair_name(problem: Problem, source: int, destination: int) -> str:
    """Names a pair of devices: ``gpu0->gpu1``."""
    return f"{problem.devices[source].name}->{problem.devices[destination].name}"


def seconds_by_cause(path: Iterable[Link]) -> dict[str, float]:
    """Returns seconds of a path by cause, each rounded once."""
    return _sums(path, lambda link: link.cause)


def path_parts(run: SimulatedPlan, path: Sequence[Link]) -> tuple[PathPart, ...]:
    """Returns the path by cause and place, longest first."""

    def key(link: Link) -> tuple[str, str]:
        return link.cause, location_of(run, link)

    seconds, count = _sums(path, key), Counter(map(key, path))
    parts = [PathPart(cause, where, value, count[cause, where]) for (cause, where), value in seconds.items()]
    return tuple(sorted(parts, key=lambda part: (-part.seconds, part.cause, part.where)))


def _sums(path: Iterable[Link], key: Callable[[Link], Key]) -> dict[Key, float]:
    ends: dict[Key, list[float]] = {}
    for link in path:
        ends.setdefault(key(link), []).extend((link.end_s, -link.start_s))
    return {name: math.fsum(values) for name, values in ends.items()}  # rounded once


def module_of(group_name: str) -> str:
    """Returns the module of a group: its path up to the first number, or all of it.

    ``transformer.h.3`` of ``transformer.h.3.mlp.act#2``, ``lm_head`` of itself.
    """
    path = group_name.partition("@")[0].partition("#")[0]
    parts = path.split(".")
    for end, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:end])
    return path
