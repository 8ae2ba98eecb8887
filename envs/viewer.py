"""Pictures of a plan for `render_mode`: device loads as text, the timeline as an image."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.instance import Instance

_PALETTE = np.array(
    [
        [31, 119, 180],
        [255, 127, 14],
        [44, 160, 44],
        [214, 39, 40],
        [148, 103, 189],
        [140, 86, 75],
        [227, 119, 194],
        [23, 190, 207],
    ],
    dtype=np.uint8,
)
_ROW, _GAP, _WIDTH = 24, 6, 640


def render_ansi(instance: Instance, device_of_group: NDArray[np.int32]) -> str:
    """One line per device: groups, work in milliseconds, provable memory, and a bar of the work."""
    from rlplace.envs.observation import load_and_pinned

    load, pinned = load_and_pinned(instance, device_of_group)
    largest = max(float(load.max()), 1e-30)
    lines = []
    for index, device in enumerate(instance.problem.devices):
        count = int((device_of_group == index).sum())
        bar = "#" * round(30 * load[index] / largest)
        lines.append(f"{device.name:12s} {count:5d} groups {load[index] * 1e3:10.3f} ms {pinned[index] / 1e9:8.2f} GB {bar}")
    left = int((device_of_group < 0).sum())
    return "\n".join([*lines, f"{left} groups not placed"])


def render_rgb(instance: Instance, device_of_group: NDArray[np.int32]) -> NDArray[np.uint8]:
    """uint8 [height, 640, 3], one row per device with a coloured box per op; white while groups are missing."""
    from rlplace.simulator import simulate

    devices = instance.problem.num_devices
    image = np.full((devices * (_ROW + _GAP) + _GAP, _WIDTH, 3), 255, dtype=np.uint8)
    if (device_of_group < 0).any():
        return image
    timeline = simulate(instance.problem, device_of_group, **instance.execution.arguments)
    if timeline.step_time_s is None:
        return image
    scale = (_WIDTH - 1) / max(timeline.step_time_s, 1e-30)
    for task, op in enumerate(timeline.task_op.tolist()):
        top = _GAP + int(timeline.device_of_op[op]) * (_ROW + _GAP)
        low, high = int(timeline.start_s[task] * scale), int(timeline.end_s[task] * scale)
        image[top : top + _ROW, low : max(high, low + 1)] = _PALETTE[instance.problem.op_group[op] % len(_PALETTE)]
    return image
