"""Pictures of a plan for `render_mode`: device loads as text, the timeline as an image, drawn as in a report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.instance import Instance
from rlplace.envs.observation import load_and_pinned
from rlplace.simulator import simulate
from rlplace.text import bytes_text, seconds_text


def render_ansi(instance: Instance, device_of_group: NDArray[np.int32]) -> str:
    """One line per device: groups, work, provable memory, and a bar of the work."""
    load, pinned = load_and_pinned(instance, device_of_group)
    largest = max(float(load.max()), 1e-30)
    lines = []
    for index, device in enumerate(instance.problem.devices):
        count = int((device_of_group == index).sum())
        bar = "#" * round(30 * load[index] / largest)
        work, held = seconds_text(float(load[index])), bytes_text(float(pinned[index]))
        lines.append(f"{device.name:12s} {count:5d} groups {work:>10s} {held:>8s} {bar}")
    left = int((device_of_group < 0).sum())
    return "\n".join([*lines, f"{left} groups not placed"])


def render_rgb(instance: Instance, device_of_group: NDArray[np.int32]) -> NDArray[np.uint8]:
    """uint8 [height, 640, 3], one row per device with a coloured box per op; white while groups are missing."""
    from rlplace.reporting.lanes import empty_image, lanes_of, paint

    if (device_of_group < 0).any():
        return empty_image(instance.problem.num_devices)
    timeline = simulate(instance.problem, device_of_group, **instance.execution.arguments)
    return paint(lanes_of(instance.problem, timeline))
