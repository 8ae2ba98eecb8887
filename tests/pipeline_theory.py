"""Closed forms for pipelines of equal stages and free links: the bubble and the activations in flight.

Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B and interleaved 1F1B), Lamy-Poirier 2022 (looped BFS), Qi et al. 2023
(zero bubble, where the papers' tables assume equal times of forward, input gradient and weight gradient; the general form below
is the makespan of torch's order). DualPipeV's bubble is the makespan as well: its pairs of a forward and a backward, which its
authors overlap, run one after the other here. A replay of `rlplace.plan.actions` gives exactly these numbers, which is what
they are for: to test executors.
"""

from __future__ import annotations

from rlplace.plan.schedule import SCHEDULES, V


def bubble_s(
    schedule: str,
    num_devices: int,
    stages_per_device: int,
    microbatches: int,
    *,
    forward_s: float,
    input_s: float,
    weight_s: float,
) -> float:
    """Seconds of a step beyond the work of one device, of p devices with v stages each and m micro-batches.

    `forward_s`, `input_s` and `weight_s` are those of one stage and one micro-batch; a full backward is the last two together.
    """
    ramp, backward_s = num_devices - 1, input_s + weight_s
    if schedule in ("gpipe", "1f1b"):
        return ramp * (forward_s + backward_s)
    if schedule in ("looped_bfs", "interleaved_1f1b"):
        # Rounds of fewer micro-batches than devices leave a gap between two stages of a device.
        gaps = (stages_per_device - 1) * max(0, num_devices - microbatches)
        return (ramp + gaps) * (forward_s + backward_s)
    if SCHEDULES[schedule].layout == V:
        assert microbatches >= 2 * num_devices - 1 and forward_s == input_s == weight_s, "no closed form"
        return ramp * forward_s
    assert microbatches >= num_devices, "no closed form"
    return ramp * max(forward_s, input_s, forward_s + input_s - weight_s)


def in_flight(schedule: str, num_devices: int, stages_per_device: int, microbatches: int, device: int) -> int:
    """Most activations that a device holds, in units of one stage's for one micro-batch.

    An activation is held from the start of its forward to the end of its backward (the weight gradient, when split).
    """
    if schedule in ("gpipe", "looped_bfs"):
        return stages_per_device * microbatches
    if schedule == "1f1b":
        return min(microbatches, num_devices - device)
    if SCHEDULES[schedule].layout == V:
        assert microbatches >= 2 * num_devices, "no closed form"
        return 2 * num_devices + (schedule == "dualpipev")
    round_size = microbatches // max(1, microbatches // num_devices)
    ahead = (stages_per_device - 1) * round_size
    ahead += num_devices if SCHEDULES[schedule].splits_backward else 2 * (num_devices - 1 - device) + 1
    return min(ahead, stages_per_device * microbatches)
