"""A planner, a device kind and a cost model for rlplace, in one module.

Install it with ``pip install ./examples/plugin`` (``--no-deps --no-build-isolation`` without a network); from then on
``rlplace place MODEL --cluster toy40:4 --planner even_cut --costs roofline`` knows the names. Nothing has to be imported.
"""

from __future__ import annotations

import numpy as np

from rlplace.cluster import DeviceKind
from rlplace.errors import InfeasibleError
from rlplace.model.graph.opgraph import OpGraph
from rlplace.problem import Problem
from rlplace.simulator import simulate


def even_cut(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, devices: int | None = None) -> np.ndarray:
    """Cuts the groups, in their order, into consecutive parts of about equal work, one a device.

    Args:
        problem: G groups on D devices.
        seed: Not used: the cut is the same for every seed. A planner takes it all the same.
        time_limit_s: Not used: this takes no time. A search returns its best plan when the time is up.
        devices: An option of this planner: how many devices to use; default the number for which the step is the shortest.

    Returns:
        int [G], the device of every group. rlplace checks it, simulates it and makes the plan.
    """
    work = np.bincount(problem.op_group, weights=np.nanmean(problem.time_s, axis=1), minlength=problem.num_groups)
    middle = (np.cumsum(work) - work / 2) / max(work.sum(), 1e-30)
    counts = range(1, problem.num_devices + 1) if devices is None else [devices]
    found = [np.minimum((middle * count).astype(np.int32), count - 1) for count in counts]
    for cut in found:  # groups that may only sit on one device stay there
        cut[problem.group_device >= 0] = problem.group_device[problem.group_device >= 0]
    lines = [simulate(problem, cut) for cut in found]
    fitting = [(line.step_time_s, number) for number, line in enumerate(lines) if line.feasible]
    if not fitting:
        raise InfeasibleError("even_cut: no even cut fits; try another planner")
    return found[min(fitting)[1]]


def toy40() -> DeviceKind:
    """An imagined accelerator with 40 GB: 20 TFLOP/s in float32, 1 TB/s."""
    return DeviceKind(
        name="toy40",
        peak_flops={"float32": 20e12, "bfloat16": 80e12},
        memory_bandwidth_bytes_per_s=1e12,
        memory_bytes=40_000_000_000,
        gemm_efficiency={"float32": 0.8, "bfloat16": 0.6},
    )


def roofline(graph: OpGraph, kind: DeviceKind) -> np.ndarray | None:
    """Op times by the plain roofline: FLOPs at peak or bytes at the memory's rate, whichever takes longer.

    Returns:
        float64 [N], seconds of every op on the device. NaN for an op, or None for a kind, leaves the built-in model's time.
    """
    if kind.host_processor:
        return None
    seconds = np.maximum(graph.op_flops / kind.peak_flops["float32"], graph.op_bytes / kind.memory_bandwidth_bytes_per_s)
    seconds[graph.op_flops == 0] = np.nan
    return seconds
