"""What one process does in a step of a cut: passes in order, with what arrives before and what is sent afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from rlplace.runtime.distributed.execution.wire import Message, Turn, posts_of
from rlplace.runtime.distributed.graph.cut import Cut
from rlplace.runtime.distributed.graph.order import Step

AHEAD = 2
"""Receives are posted for this turn and the next."""


def turns_of(cut: Cut, order: Sequence[Step], plan_device: int) -> list[Turn[Step]]:
    """The part of one process in a step.

    Args:
        cut: The segments.
        order: All passes, see `step_order`.
        plan_device: The process, as a device of the plan.
    """
    layout = cut.graph.layout
    device_of = [segment.placement.device for segment in cut.segments]
    trains = {step.segment for step in order if step.backward}
    tags = count(1)

    def message(value: str, step: Step, gradient: bool, source: int, destination: int) -> Message:
        return Message(value, step.microbatch, source, destination, next(tags), gradient)

    # By value, micro-batch and device the index of the last backward pass that reads it.
    last_reader: dict[tuple[str, int, int], int] = {}
    for index, step in enumerate(order):
        if step.backward:
            for value in cut.segments[step.segment].reads:
                last_reader[value, step.microbatch, device_of[step.segment]] = index
    arriving: dict[int, list[Message]] = {}
    leaving: dict[int, list[Message]] = {}
    first_reader: dict[tuple[str, int, int], int] = {}
    backward_of: dict[tuple[int, int], int] = {}
    for index, step in enumerate(order):
        if step.backward:
            backward_of[step.segment, step.microbatch] = index
        else:
            for value in cut.segments[step.segment].reads:
                first_reader.setdefault((value, step.microbatch, device_of[step.segment]), index)
    for index, step in enumerate(order):
        here = device_of[step.segment]
        segment = cut.segments[step.segment]
        if not step.backward:
            for value in segment.makes:
                for there in sorted({device_of[reader] for reader in cut.readers.get(value, ())} - {here}):
                    sent = message(value, step, False, here, there)
                    leaving.setdefault(index, []).append(sent)
                    arriving.setdefault(first_reader[value, step.microbatch, there], []).append(sent)
            continue
        for value in segment.reads:
            maker = cut.maker[value]
            if layout[value].requires_grad and device_of[maker] != here and maker in trains:
                if last_reader[value, step.microbatch, here] == index:
                    sent = message(value, step, True, here, device_of[maker])
                    leaving.setdefault(index, []).append(sent)
                    arriving.setdefault(backward_of[maker, step.microbatch], []).append(sent)
    mine = [index for index, step in enumerate(order) if device_of[step.segment] == plan_device]
    needs = [tuple(sorted(arriving.get(index, ()), key=lambda m: m.tag)) for index in mine]
    frees = _frees(cut, order, plan_device)
    return [
        Turn(order[index], posts, need, tuple(leaving.get(index, ())), tuple(frees.get(index, ())))
        for index, posts, need in zip(mine, posts_of(needs, AHEAD), needs, strict=True)
    ]


def _frees(cut: Cut, order: Sequence[Step], plan_device: int) -> dict[int, list[tuple[str, int]]]:
    """By index of a forward pass of this device the values that are used there for the last time.

    In a step with a backward those without a gradient; without one all but those that the model returns.
    """
    training = any(step.backward for step in order)
    graph = cut.graph
    kept = set() if training else {*filter(lambda item: isinstance(item, str), graph.outputs), graph.loss}
    last: dict[tuple[str, int], int] = {}
    for index, step in enumerate(order):
        segment = cut.segments[step.segment]
        if not step.backward and segment.placement.device == plan_device:
            last.update(((value, step.microbatch), index) for value in (*segment.makes, *segment.reads))
    frees: dict[int, list[tuple[str, int]]] = {}
    for key, index in last.items():
        if key[0] not in kept and not (training and graph.layout[key[0]].requires_grad):
            frees.setdefault(index, []).append(key)
    return frees
