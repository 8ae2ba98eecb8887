"""Closed forms for pipelines of equal stages and free links: the bubble and the activations in flight.

Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B and interleaved 1F1B), Qi et al. 2023 (zero bubble, where the papers'
tables assume equal times of forward, input gradient and weight gradient; the general form below is the makespan of torch's
order). A replay of `rlplace.actions` gives exactly these numbers, which is what they are for: to test executors.
"""

from __future__ import annotations

from rlplace.actions import LAYOUTS, pipeline_actions
from rlplace.errors import InputError, unknown_name
from rlplace.schedule import PIPELINE_SCHEDULES


def bubble_s(
    schedule: str,
    num_devices: int,
    stages_per_device: int,
    microbatches: int,
    *,
    forward_s: float,
    input_s: float,
    weight_s: float,
    layout: str = "loop",
) -> float:
    """Seconds of a step beyond the work of one device.

    Args:
        schedule: One of `PIPELINE_SCHEDULES`.
        num_devices: p.
        stages_per_device: v.
        microbatches: m.
        forward_s: Forward of one stage and one micro-batch.
        input_s: Gradient of its input.
        weight_s: Gradients of its weights; a full backward takes `input_s` + `weight_s`.
        layout: ``"loop"`` or ``"v"``.

    Raises:
        InputError: The schedule does not exist, or no closed form holds: zero bubble with m < p, or in a v with m < 2p - 1 or
            unequal times.
    """
    _check(schedule, num_devices, stages_per_device, microbatches, layout)
    ramp, backward_s = num_devices - 1, input_s + weight_s
    if schedule in ("gpipe", "1f1b"):
        return ramp * (forward_s + backward_s)
    if schedule == "interleaved":  # rounds of fewer micro-batches than devices leave a gap between two stages of a device
        gaps = (stages_per_device - 1) * max(0, num_devices - microbatches)
        return (ramp + gaps) * (forward_s + backward_s)
    if layout == "v" and stages_per_device == 2:
        if microbatches < 2 * num_devices - 1 or not forward_s == input_s == weight_s:
            raise InputError("theory: zero_bubble in a v has a closed form for m >= 2p - 1 and three equal times only")
        return ramp * forward_s
    if microbatches < num_devices:
        raise InputError(f"theory: zero_bubble has a closed form for m >= p only, found {microbatches} < {num_devices}")
    return ramp * max(forward_s, input_s, forward_s + input_s - weight_s)


def in_flight(
    schedule: str, num_devices: int, stages_per_device: int, microbatches: int, device: int, *, layout: str = "loop"
) -> int:
    """Most activations that a device holds, in units of one stage's for one micro-batch.

    An activation is held from the start of its forward to the end of its backward (the weight gradient, when split).

    Args:
        schedule: One of `PIPELINE_SCHEDULES`.
        num_devices: p.
        stages_per_device: v.
        microbatches: m.
        device: Position in the pipeline, from 0.
        layout: ``"loop"`` or ``"v"``.

    Raises:
        InputError: The schedule does not exist, or no closed form holds: in a v with m < 2p.
    """
    _check(schedule, num_devices, stages_per_device, microbatches, layout)
    if not 0 <= device < num_devices:
        raise InputError(f"theory: device {device} is outside 0..{num_devices - 1}")
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, num_devices - device)
    if layout == "v" and stages_per_device == 2:
        if microbatches < 2 * num_devices:
            raise InputError("theory: zero_bubble in a v has a closed form for m >= 2p only")
        return 2 * num_devices
    round_size = microbatches // max(1, microbatches // num_devices)
    ahead = (stages_per_device - 1) * round_size
    ahead += num_devices if schedule == "zero_bubble" else 2 * (num_devices - 1 - device) + 1
    return min(ahead, stages_per_device * microbatches)


def _check(schedule: str, num_devices: int, stages_per_device: int, microbatches: int, layout: str) -> None:
    """Refuses what `pipeline_actions` refuses, except 1F1B with fewer micro-batches than stages, which only torch does."""
    if schedule not in PIPELINE_SCHEDULES:
        raise unknown_name("pipeline schedule", schedule, PIPELINE_SCHEDULES)
    if layout not in LAYOUTS:
        raise unknown_name("stage layout", layout, LAYOUTS)
    known = "gpipe" if schedule == "1f1b" else schedule
    pipeline_actions(known, num_devices, stages_per_device, microbatches, layout=layout)
