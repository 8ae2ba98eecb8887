"""Pipeline schedules as the list of actions that each device runs, in the order of `torch.distributed.pipelining`.

A *stage* is a part of a chain; a device runs one or more stages. For every micro-batch a stage runs a forward (F) and a
backward: one action (B), or the gradient of its input (I) and, any time later, the gradients of its weights (W). Only F, B
and I pass something on, so W can fill what would otherwise be a bubble.

================ ========================================== ======================= ==================================
schedule         torch class                                stages a device         where stage s sits (p devices)
================ ========================================== ======================= ==================================
``gpipe``        ``ScheduleGPipe``                          1                       device s
``1f1b``         ``Schedule1F1B``                           1                       device s
``interleaved``  ``ScheduleInterleaved1F1B``                v                       device s mod p ("loop")
``zero_bubble``  ``ScheduleInterleavedZeroBubble``          v                       device s mod p ("loop")
``zero_bubble``  ``ScheduleZBVZeroBubble``                  2                       s, and back from 2p - 1 - s ("v")
================ ========================================== ======================= ==================================

With p devices, m micro-batches, equal stages and free links, where one stage takes F for a forward, I for an input gradient,
W for weight gradients and B = I + W: the *bubble* is what a step takes beyond the work v m (F + B) of one device; *in flight*
are the activations that the first device holds at most, counted in micro-batches through all its v stages.

====================== =============================== ======================= =============== =========================
schedule               bubble                          in flight               for             source
====================== =============================== ======================= =============== =========================
``gpipe``              (p - 1)(F + B)                  m                       any m           Huang et al. 2019
``1f1b``               (p - 1)(F + B)                  min(m, p)               any m           Narayanan et al. 2021
``interleaved``        (p - 1)(F + B)                  p + (p - 1)/v           m = 2p, 3p, ..  Narayanan et al. 2021
``zero_bubble``, loop  (p - 1) max(F, I, F + I - W)    p                       m = p, 2p, ..   Qi et al. 2023, ZB-H1
``zero_bubble``, v     (p - 1) F                       p                       m >= 2p, F=I=W  Qi et al. 2023, ZB-V
====================== =============================== ======================= =============== =========================

With v stages a device each stage is 1/v of the device's work, which is how interleaving divides the bubble by v. The papers
call the last bubble zero because devices start and end a step one after another, and with an optimizer step that waits for
nobody the ramp of one step overlaps the end of the one before. Here a step ends with its last event, so the ramp (p - 1) F
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlplace.errors import InputError, unknown_name, whole_number
from rlplace.schedule import LIST, LOOP, ONE, PIPELINE_SCHEDULES, SCHEDULES, V, schedule_named
from rlplace.text import either

LAYOUTS = (LOOP, V)

FORWARD_ACTION, BACKWARD_ACTION, INPUT_ACTION, WEIGHT_ACTION = "F", "B", "I", "W"


class Action(NamedTuple):
    """One run of a stage.

    Attributes:
        stage: Position in the chain, from 0.
        kind: ``"F"`` forward, ``"B"`` full backward, ``"I"`` gradient of the input, ``"W"`` gradients of the weights.
        microbatch: From 0.
    """

    stage: int
    kind: str
    microbatch: int


def pipeline_actions(
    schedule: str, num_devices: int, stages_per_device: int, microbatches: int, *, layout: str = "loop"
) -> list[list[Action]]:
    """The actions of every device, in the order in which torch runs them.

    Args:
        schedule: One of `rlplace.schedule.PIPELINE_SCHEDULES`.
        num_devices: Devices of the pipeline, p.
        stages_per_device: Stages on each of them, v; the chain has p v stages.
        microbatches: Micro-batches of a step, m.
        layout: ``"loop"`` (stage s on device s mod p) or ``"v"`` (the second
            half of the chain runs back over the devices). With one stage a device they are the same.

    Returns:
        Per device its actions.

    Raises:
        InputError: torch has no such schedule: for this layout, this many stages or this many micro-batches.
    """
    layouts = schedule_named(schedule, PIPELINE_SCHEDULES, "pipeline schedule").torch_class
    if layout not in LAYOUTS:
        raise unknown_name("stage layout", layout, LAYOUTS)
    for what, value in (("devices", num_devices), ("stages per device", stages_per_device), ("micro-batches", microbatches)):
        whole_number(value, f"schedule {schedule}: {what}", 1)
    if stages_per_device == 1:
        layout = LOOP
    elif LOOP not in layouts:
        others = [name for name in PIPELINE_SCHEDULES if LOOP in SCHEDULES[name].torch_class]
        raise InputError(
            f"schedule {schedule} runs one stage on each device, found {stages_per_device}; "
            f"use 1, or the schedules {either(others)}"
        )
    elif layout not in layouts:
        others = [name for name in PIPELINE_SCHEDULES if layout in SCHEDULES[name].torch_class]
        raise InputError(f"schedule {schedule} runs stages in a loop over the devices, found a {layout}; use {either(others)}")
    return _ACTIONS[schedule](num_devices, stages_per_device, microbatches, layout)


def _gpipe(devices: int, stages: int, microbatches: int, layout: str) -> list[list[Action]]:
    """Every forward, then every backward, both from the first micro-batch on."""
    kinds = (FORWARD_ACTION, BACKWARD_ACTION)
    return [[Action(device, kind, n) for kind in kinds for n in range(microbatches)] for device in range(devices)]


def _one_forward_one_backward(devices: int, stages: int, microbatches: int, layout: str) -> list[list[Action]]:
    """One forward ahead for each stage that follows; then a forward and a backward in turn."""
    if microbatches < devices:
        raise InputError(
            f"schedule 1f1b needs at least as many micro-batches as stages, found {microbatches} for {devices}; "
            f"use {devices}, or the schedule gpipe"
        )
    lists = []
    for device in range(devices):
        ahead = devices - 1 - device
        actions = [Action(device, FORWARD_ACTION, n) for n in range(ahead)]
        for n in range(microbatches):
            if ahead + n < microbatches:
                actions.append(Action(device, FORWARD_ACTION, ahead + n))
            actions.append(Action(device, BACKWARD_ACTION, n))
        lists.append(actions)
    return lists


def _interleaved(devices: int, stages: int, microbatches: int, layout: str) -> list[list[Action]]:
    _check_rounds("interleaved", devices, microbatches)
    return [_in_rounds(device, devices, stages, microbatches, split=False) for device in range(devices)]


def _zero_bubble(devices: int, stages: int, microbatches: int, layout: str) -> list[list[Action]]:
    if layout == V:
        if stages != 2:
            raise InputError(f"schedule zero_bubble in a v needs 2 stages on each device, found {stages}; use 2")
        return [_zero_bubble_v(device, devices, microbatches) for device in range(devices)]
    _check_rounds("zero_bubble", devices, microbatches)
    return [_in_rounds(device, devices, stages, microbatches, split=True) for device in range(devices)]


_ACTIONS = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved": _interleaved, "zero_bubble": _zero_bubble}
"""How the lists of `rlplace.schedule.PIPELINE_SCHEDULES` are made."""


def _check_rounds(schedule: str, devices: int, microbatches: int) -> None:
    """Torch runs micro-batches in max(1, m // p) equal rounds, each through one stage of a device after the other."""
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


def _in_rounds(device: int, devices: int, stages: int, microbatches: int, *, split: bool) -> list[Action]:
    """Interleaved 1F1B, or with `split` its zero-bubble form.

    A round of micro-batches goes through the device's first stage, then its second and so on; then comes the next round.
    Backwards do the same from the last stage to the first. Ahead of the first backward go the forwards of one round for all
    stages but one and, for each device that follows, two forwards (one when the backward is split, since only its first half
    holds up the others). A split backward leaves its weight gradient behind by as many backwards as devices precede this one.
    """
    size = microbatches // max(1, microbatches // devices)  # micro-batches a round
    total = stages * microbatches

    def pick(n: int, kind: str) -> Action:
        lap, place = divmod(n, size * stages)
        turn, inside = divmod(place, size)
        local = turn if kind == FORWARD_ACTION else stages - 1 - turn
        return Action(local * devices + device, kind, lap * size + inside)

    hops = devices - 1 - device
    ahead = min((stages - 1) * size + (hops if split else 2 * hops), total)
    actions = [pick(n, FORWARD_ACTION) for n in range(ahead)]
    for n in range(total):
        if ahead + n < total:
            actions.append(pick(ahead + n, FORWARD_ACTION))
        actions.append(pick(n, INPUT_ACTION if split else BACKWARD_ACTION))
        if split and n >= device:
            actions.append(pick(n - device, WEIGHT_ACTION))
    if split:
        actions += [pick(n, WEIGHT_ACTION) for n in range(max(0, total - device), total)]
    return actions


def _zero_bubble_v(device: int, devices: int, microbatches: int) -> list[Action]:
    """ZB-V: the device's stage on the way down, and the one on the way back up.

    The order is made for at least 2p - 1 micro-batches, which fill the pipeline; those that a smaller step lacks are left out.
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
    return [action for action in actions if action.microbatch < microbatches]


@dataclass(frozen=True)
class StageLayout:
    """How the stages of a chain sit on devices.

    Attributes:
        kind: ``"loop"`` or ``"v"``; one stage a device is a loop of one lap.
        devices: Device numbers in the order in which the chain visits them; `pipeline_actions` calls them 0, 1, ...
        stages_per_device: Stages on each.
    """

    kind: str
    devices: tuple[int, ...]
    stages_per_device: int

    def actions(self, schedule: str, microbatches: int) -> dict[int, list[Action]]:
        """The actions of a schedule by device number; see `pipeline_actions`."""
        lists = pipeline_actions(schedule, len(self.devices), self.stages_per_device, microbatches, layout=self.kind)
        return dict(zip(self.devices, lists, strict=True))


def stage_layout(device_of_stage: Sequence[int], schedule: str) -> StageLayout:
    """Recognises how a chain is laid out, and whether a schedule can run it.

    Args:
        device_of_stage: Device number of each stage, in chain order.
        schedule: One of `rlplace.schedule.PIPELINE_SCHEDULES`.

    Returns:
        The layout. Two stages on a single device are a loop.

    Raises:
        InputError: The schedule cannot run the chain as it sits; says which layouts it can.
    """
    known = tuple(schedule_named(schedule, PIPELINE_SCHEDULES, "pipeline schedule").torch_class)
    stages = [int(device) for device in device_of_stage]
    devices = tuple(dict.fromkeys(stages))
    count = len(devices)
    laps, rest = divmod(len(stages), count) if stages else (0, 0)
    if stages and not rest:
        if stages == list(devices) * laps and (LOOP in known or laps == 1):
            return StageLayout(LOOP, devices, laps)
        if laps == 2 and stages == [*devices, *reversed(devices)] and V in known:
            return StageLayout(V, devices, 2)
    words = {ONE: "one stage on each device", LOOP: "a loop (0 1 2 0 1 2)", V: "a v (0 1 2 2 1 0)"}
    wanted = " or ".join(words[kind] for kind in known)
    found = " ".join(map(str, stages[:40])) + (" ..." if len(stages) > 40 else "")
    raise InputError(
        f"schedule {schedule} cannot run stages on devices {found or '(none)'}: it needs {wanted}; "
        f"move stages, or use the schedule {LIST}"
    )
