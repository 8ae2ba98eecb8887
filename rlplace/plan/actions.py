"""Pipeline schedules as the list of actions that each device runs, in the order of `torch.distributed.pipelining`.

A *stage* is a part of a chain; a device runs one or more stages. For every micro-batch a stage runs a forward (F) and a
backward: one action (B), or the gradient of its input (I) and, any time later, the gradients of its weights (W). Only F, B
and I pass something on, so W can fill what would otherwise be a bubble.

=========================== ================================= =============== ==================================
schedule                    torch class                       stages a device where stage s sits (p devices)
=========================== ================================= =============== ==================================
``gpipe``                   ``ScheduleGPipe``                 1               device s
``1f1b``                    ``Schedule1F1B``                  1               device s
``looped_bfs``              ``ScheduleLoopedBFS``             v               device s mod p ("loop")
``interleaved_1f1b``        ``ScheduleInterleaved1F1B``       v               device s mod p ("loop")
``interleaved_zero_bubble`` ``ScheduleInterleavedZeroBubble`` v               device s mod p ("loop")
``zbv``                     ``ScheduleZBVZeroBubble``         2               s, and back from 2p - 1 - s ("v")
``dualpipev``               ``ScheduleDualPipeV``             2               s, and back from 2p - 1 - s ("v")
=========================== ================================= =============== ==================================

With p devices, m micro-batches, equal stages and free links, where one stage takes F for a forward, I for an input gradient,
W for weight gradients and B = I + W: the *bubble* is what a step takes beyond the work v m (F + B) of one device; *in flight*
are the activations that the first device holds at most, counted in micro-batches through all its v stages.

=========================== ============================ ============= ============== =====================
schedule                    bubble                       in flight     for            source
=========================== ============================ ============= ============== =====================
``gpipe``                   (p - 1)(F + B)               m             any m          Huang et al. 2019
``1f1b``                    (p - 1)(F + B)               min(m, p)     any m          Narayanan et al. 2021
``looped_bfs``              (p - 1)(F + B)               m             m >= p         Lamy-Poirier 2022
``interleaved_1f1b``        (p - 1)(F + B)               p + (p - 1)/v m = 2p, 3p, .. Narayanan et al. 2021
``interleaved_zero_bubble`` (p - 1) max(F, I, F + I - W) p             m = p, 2p, ..  Qi et al. 2023, ZB-H1
``zbv``                     (p - 1) F                    p             m >= 2p, F=I=W Qi et al. 2023, ZB-V
``dualpipev``               (p - 1) F                    p + 1/2       m >= 2p, F=I=W the replay
=========================== ============================ ============= ============== =====================

With v stages a device each stage is 1/v of the device's work, which is how interleaving divides the bubble by v. The papers
call the last bubble zero because devices start and end a step one after another, and with an unsynchronised optimizer step the
ramp of one step overlaps the end of the one before. Here a step ends with its last event, so the ramp (p - 1) F counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.plan.schedule import LOOP, ONE, SCHEDULES, V, schedule_named, stages_a_device
from rlplace.text import either

FORWARD_ACTION, BACKWARD_ACTION, INPUT_ACTION, WEIGHT_ACTION = KINDS = "FBIW"
_KIND = {kind: number for number, kind in enumerate(KINDS)}

Rows = NDArray[np.int32]
"""Actions, int32 [., 3]: stage, index into `KINDS`, micro-batch."""


class Action(NamedTuple):
    """One run of a stage.

    Attributes:
        stage: Position in the chain, from 0.
        kind: ``"F"`` forward, ``"B"`` full backward, ``"I"`` gradient of the input, ``"W"`` gradients of the weights.
        microbatch: Number of the micro-batch, from 0.
    """

    stage: int
    kind: str
    microbatch: int


def pipeline_actions(schedule: str, num_devices: int, stages_per_device: int, microbatches: int) -> list[list[Action]]:
    """Returns the actions of every device, in the order in which torch runs them.

    Args:
        schedule: One of `rlplace.plan.schedule.SCHEDULES`.
        num_devices: Devices of the pipeline, p.
        stages_per_device: Stages on each of them, v; the chain has p v stages.
        microbatches: Micro-batches of a step, m.

    Returns:
        The actions of each device.

    Raises:
        InputError: torch has no such schedule for this number of stages or micro-batches.
    """
    return [listed(rows) for rows in pipeline_rows(schedule, num_devices, stages_per_device, microbatches)]


def listed(rows: Rows) -> list[Action]:
    """Returns the actions of an array."""
    return [Action(stage, KINDS[kind], n) for stage, kind, n in rows.tolist()]


def pipeline_rows(schedule: str, num_devices: int, stages_per_device: int, microbatches: int) -> list[Rows]:
    """Returns `pipeline_actions` as an array for each device; takes and raises the same."""
    check_schedule(schedule, num_devices, stages_per_device, microbatches)
    return [_ACTIONS[schedule](device, num_devices, stages_per_device, microbatches) for device in range(num_devices)]


def check_schedule(schedule: str, num_devices: int, stages_per_device: int, microbatches: int) -> None:
    """Refuses what `pipeline_actions` refuses; takes and raises the same."""
    layout = schedule_named(schedule).layout
    for what, value in (("devices", num_devices), ("stages per device", stages_per_device), ("micro-batches", microbatches)):
        whole_number(value, f"schedule {schedule}: {what}", 1)
    wanted = {ONE: 1, V: 2}.get(layout, stages_per_device)
    if stages_per_device != wanted:
        others = [name for name in SCHEDULES if SCHEDULES[name].layout == LOOP]
        raise InputError(
            f"schedule {schedule}: stages per device: expected {wanted}, found {stages_per_device}; "
            f"use {wanted}, or the schedule {either(others)}"
        )
    if schedule == "1f1b":
        _check_filled(schedule, num_devices, microbatches, "gpipe")
    elif schedule == "dualpipev":
        _check_filled(schedule, 2 * num_devices, microbatches, "zbv")
    elif schedule in _IN_ROUNDS:
        _check_rounds(schedule, num_devices, microbatches)


def _passes(kind: str, own: Sequence[int], microbatches: int, size: int) -> Rows:
    """Returns passes of rounds of so many micro-batches: each through one stage of a device after the other."""
    rounds = np.arange(microbatches).reshape(-1, 1, size)
    rows = np.empty((microbatches // size, len(own), size, 3), dtype=np.int32)
    rows[..., 0], rows[..., 1], rows[..., 2] = np.array(own)[:, None], KINDS.index(kind), rounds
    return rows.reshape(-1, 3)


def _in_turn(forwards: Rows, backwards: Rows, weights: Rows, ahead: int, behind: int) -> Rows:
    """Returns so many forwards ahead; then a forward and a backward in turn, and weights so many backwards behind theirs."""
    first, each = np.maximum(np.arange(len(forwards)) - ahead, -1), np.arange(len(backwards))
    turns = np.concatenate([3 * first, 3 * each + 1, 3 * (np.arange(len(weights)) + behind) + 2])
    rows: Rows = np.concatenate([forwards, backwards, weights])[np.argsort(turns, kind="stable")]
    return rows


def _gpipe(device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns every forward, then every backward, both from the first micro-batch on."""
    return np.concatenate([_passes(kind, [device], microbatches, microbatches) for kind in (FORWARD_ACTION, BACKWARD_ACTION)])


def _one_forward_one_backward(device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns one forward ahead for each stage that follows; then a forward and a backward in turn."""
    forwards, backwards = (_passes(kind, [device], microbatches, microbatches) for kind in (FORWARD_ACTION, BACKWARD_ACTION))
    return _in_turn(forwards, backwards, forwards[:0], devices - 1 - device, 0)


def _looped_bfs(device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns every forward, the device's first stage first, then every backward, in reverse."""
    own = range(device, devices * stages, devices)
    forwards, backwards = (_passes(kind, own, microbatches, microbatches) for kind in (FORWARD_ACTION, BACKWARD_ACTION))
    return np.concatenate([forwards, backwards[::-1]])


def _check_filled(schedule: str, stages: int, microbatches: int, other: str) -> None:
    if microbatches < stages:
        raise InputError(
            f"schedule {schedule} needs at least as many micro-batches as stages, found {microbatches} for {stages}; "
            f"use {stages}, or the schedule {other}"
        )


def _check_rounds(schedule: str, devices: int, microbatches: int) -> None:
    """Checks that micro-batches make max(1, m // p) equal rounds, each through one stage of a device after the other."""
    if _fits_rounds(devices, microbatches):
        return
    rounds = microbatches // devices
    near = next(
        value
        for distance in range(1, microbatches)
        for value in (microbatches + distance, microbatches - distance)
        if _fits_rounds(devices, value)
    )
    raise InputError(
        f"schedule {schedule}: {microbatches} micro-batches on {devices} devices do not make {rounds} equal rounds; use {near}"
    )


def _fits_rounds(devices: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // devices) == 0


def _in_rounds(schedule: str, device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns the actions of interleaved 1F1B, or of its zero-bubble form, which splits the backward.

    A round of micro-batches goes through the device's first stage, then its second and so on; then comes the next round.
    Backwards do the same from the last stage to the first. Ahead of the first backward go the forwards of one round for all
    stages but one and, for each device that follows, two forwards (one when the backward is split, since only its first half
    holds up the others). A split backward leaves its weight gradient behind by as many backwards as devices precede this one.
    """
    split = SCHEDULES[schedule].splits_backward
    size = microbatches // max(1, microbatches // devices)  # micro-batches a round
    own, hops = range(device, stages * devices, devices), devices - 1 - device
    forwards = _passes(FORWARD_ACTION, own, microbatches, size)
    backwards = _passes(INPUT_ACTION if split else BACKWARD_ACTION, own[::-1], microbatches, size)
    weights = _passes(WEIGHT_ACTION, own[::-1], microbatches, size) if split else backwards[:0]
    return _in_turn(forwards, backwards, weights, (stages - 1) * size + (hops if split else 2 * hops), device)


def _zero_bubble_v(device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns the actions of ZB-V: of the device's stage on the way down, and of the one on the way back up.

    The order is built for at least 2p - 1 micro-batches, which fill the pipeline; a smaller step leaves the others out.
    """
    down, up = device, 2 * devices - 1 - device
    count = max(2 * devices - 1, microbatches)
    done = {(stage, kind): 0 for stage in (down, up) for kind in "FIW"}
    actions: list[Action] = []

    def run(stage: int, kinds: str) -> None:
        for kind in kinds:
            actions.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    hops = devices - 1 - device
    for _ in range(2 * hops + 1):  # fill: the first micro-batch goes down and comes back
        run(down, "F")
    for _ in range(device):
        run(up, "F")
        run(down, "F")
    for _ in range(hops + 1):
        run(up, "FIW")
    while done[down, "F"] < count or done[up, "F"] < count:  # steady: every kind of both stages once
        if done[down, "F"] < count:
            run(down, "F")
        run(down, "IW")
        run(up, "FIW")
    for _ in range(device):  # drain: what others wait for first, weight gradients last
        run(down, "I")
        run(up, "I")
    for _ in range(hops + 1):
        run(down, "IW")
    while done[up, "W"] < count:
        run(up, "W")
    while done[down, "W"] < count:
        run(down, "W")
    return _rows([action for action in actions if action.microbatch < microbatches])


def _dual_pipe_v(device: int, devices: int, stages: int, microbatches: int) -> Rows:
    """Returns the actions of DualPipeV: the forward of one stage of the device alternates with the backward of its other stage.

    Torch runs such a pair as one action, which here is two in a row. Only the first and the last backwards are split.
    """
    down, up = device, 2 * devices - 1 - device
    done: Counter[tuple[int, bool]] = Counter()
    put_off: deque[Action] = deque()
    actions: list[Action] = []

    def run(stage: int, kind: str) -> None:
        way = (stage, kind == FORWARD_ACTION)
        actions.append(Action(stage, kind, done[way]))
        if kind == INPUT_ACTION:
            put_off.append(Action(stage, WEIGHT_ACTION, done[way]))
        done[way] += 1

    hops = devices - 1 - device
    for _ in range(2 * hops):
        run(down, FORWARD_ACTION)
    for _ in range(device + 1):
        run(down, FORWARD_ACTION)
        run(up, FORWARD_ACTION)
    for _ in range(hops):
        run(up, INPUT_ACTION)
        actions.append(put_off.popleft())
        run(up, FORWARD_ACTION)
    steady = microbatches - 2 * devices + device + 1
    for turn in range(steady + hops):
        if turn < steady:
            run(down, FORWARD_ACTION)
        run(up, BACKWARD_ACTION)
        run(up, FORWARD_ACTION)
        run(down, BACKWARD_ACTION)
    for turn in range(2 * (device + 1)):  # the second half of what is left is split
        run(down if turn % 2 else up, INPUT_ACTION if turn > device else BACKWARD_ACTION)
    for _ in range(hops):
        actions.append(put_off.popleft())
        run(down, INPUT_ACTION)
    return _rows([*actions, *put_off])


def _rows(actions: Sequence[Action]) -> Rows:
    """Returns actions as an array."""
    stages, kinds, numbers = zip(*actions, strict=True)
    return np.array([stages, [_KIND[kind] for kind in kinds], numbers], dtype=np.int32).T


_IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")

_ACTIONS: dict[str, Callable[[int, int, int, int], Rows]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "looped_bfs": _looped_bfs,
    **{name: partial(_in_rounds, name) for name in _IN_ROUNDS},
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}
"""Functions that build the list of a device, for `rlplace.plan.schedule.SCHEDULES`."""


def chain_actions(device_of_stage: Sequence[int], schedule: str, microbatches: int) -> dict[int, list[Action]]:
    """Returns the actions of a chain of stages on their devices.

    Args:
        device_of_stage: Device number of each stage, in chain order.
        schedule: One of `rlplace.plan.schedule.SCHEDULES`.
        microbatches: Micro-batches of a step.

    Returns:
        Actions by device number, in the order in which the chain visits the devices.

    Raises:
        InputError: The schedule cannot run the chain on these devices, or that number of micro-batches; says what it can.
    """
    return {device: listed(rows) for device, rows in chain_rows(device_of_stage, schedule, microbatches).items()}


def chain_rows(device_of_stage: Sequence[int], schedule: str, microbatches: int) -> dict[int, Rows]:
    """Returns `chain_actions` as an array for each device; takes and raises the same."""
    devices, laps = _laps(device_of_stage, schedule)
    return dict(zip(devices, pipeline_rows(schedule, len(devices), laps, microbatches), strict=True))


def _laps(device_of_stage: Sequence[int], schedule: str) -> tuple[list[int], int]:
    """Returns the devices of a chain in the order in which it visits them, and its stages on each.

    Raises:
        InputError: As `chain_actions`.
    """
    layout = schedule_named(schedule).layout
    stages = [int(device) for device in device_of_stage]
    laps = stages_a_device(layout, stages)
    if not laps:
        wanted = {ONE: "one stage on each device", LOOP: "a loop (0 1 2 0 1 2)", V: "a v (0 1 2 2 1 0)"}[layout]
        fit = [name for name in SCHEDULES if stages_a_device(SCHEDULES[name].layout, stages)]
        listed = " ".join(map(str, stages[:40])) + (" ..." if len(stages) > 40 else "")
        raise InputError(
            f"schedule {schedule} cannot run stages on devices {listed or '(none)'}: it needs {wanted}; "
            f"move stages{f', or use the schedule {either(fit)}' if fit else ''}"
        )
    return list(dict.fromkeys(stages)), laps


def check_chain(schedule: str | None, devices_of_stage: Sequence[tuple[int, ...]], microbatches: int, where: str) -> None:
    """Refuses a schedule that does not fit the chain.

    Args:
        schedule: Name of the schedule; None where there is one stage.
        devices_of_stage: Devices of each stage.
        microbatches: Passes a step; with unlike replicas the fewest.
        where: Start of the message.

    Raises:
        InputError: No schedule for several stages, one for a single stage, a layout that it cannot run, or too few passes.
    """
    if len(devices_of_stage) == 1:
        if schedule is not None:
            raise InputError(f"{where}: schedule {schedule} is for several stages, found one; leave it out")
        return
    if schedule is None:
        known = either(SCHEDULES)
        raise InputError(f"{where}: {len(devices_of_stage)} stages need a schedule for chains: {known}")
    number = {devices: index for index, devices in enumerate(dict.fromkeys(devices_of_stage))}
    try:
        order, laps = _laps([number[devices] for devices in devices_of_stage], schedule)
        check_schedule(schedule, len(order), laps, microbatches)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
