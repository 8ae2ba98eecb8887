"""`Correction`: what measurements have changed about a priced problem, and the problem with it applied.

Axes: D devices, G groups, C channels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem


@dataclass(frozen=True, eq=False)
class Correction:
    """Factors on a priced problem.

    Attributes:
        device_factor: float64 [D], on the times of all ops of the device.
        group_factor: float64 [G, D], further factor of each group there.
        channel_slowdown: float64 [C], on the transfer times of a channel; a transfer is slowed by the slowest of its channels.
        pair_slowdown: float64 [D, D], further factor of an ordered pair of devices.
        latency_s: float64 [D, D], added to every transfer.
        step_factor: On the step time, for what no op and no transfer accounts for.
    """

    device_factor: NDArray[np.float64]
    group_factor: NDArray[np.float64]
    channel_slowdown: NDArray[np.float64]
    pair_slowdown: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    step_factor: float = 1.0

    def link_slowdown(self, problem: Problem) -> NDArray[np.float64]:
        """float64 [D, D], on transfer times between devices, 1 on the diagonal."""
        slow = np.array(self.pair_slowdown)
        for i, row in enumerate(problem.links.effective_channels):
            for j, channels in enumerate(row):
                if i != j and channels:
                    slow[i, j] *= max(float(self.channel_slowdown[c]) for c in channels)
        np.fill_diagonal(slow, 1.0)
        return slow


def no_correction(problem: Problem) -> Correction:
    """The correction that changes nothing."""
    devices = problem.num_devices
    return Correction(
        device_factor=np.ones(devices),
        group_factor=np.ones((problem.num_groups, devices)),
        channel_slowdown=np.ones(num_channels(problem)),
        pair_slowdown=np.ones((devices, devices)),
        latency_s=np.zeros((devices, devices)),
    )


def num_channels(problem: Problem) -> int:
    """C: one more than the largest channel number."""
    return 1 + max((c for row in problem.links.effective_channels for cell in row for c in cell), default=-1)


def corrected(problem: Problem, correction: Correction) -> Problem:
    """The problem as measurements say that it is; a new problem with a fingerprint of its own.

    Fabrics (the times of collectives) stay as they are.
    """
    slow, added_s = correction.link_slowdown(problem), np.array(correction.latency_s)
    np.fill_diagonal(added_s, 0.0)
    links = dataclasses.replace(
        problem.links,
        bandwidth_bytes_per_s=problem.links.bandwidth_bytes_per_s / slow,
        latency_s=problem.links.latency_s * slow + added_s,
    )
    return dataclasses.replace(
        problem,
        name=f"{problem.name}, corrected",
        time_s=problem.time_s * (correction.device_factor * correction.group_factor)[problem.op_group],
        links=links,
        tensor_transfer_s={t: s * slow + added_s for t, s in problem.tensor_transfer_s.items()},
        source=None,
    )
