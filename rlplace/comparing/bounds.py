"""Sizes and lower bounds of a problem, as a comparison states them."""

from __future__ import annotations

from rlplace.comparing.records import ProblemInfo
from rlplace.planners.common.bounds import device_time_s, lower_bounds
from rlplace.planners.common.execution_bound import finite
from rlplace.planners.common.memory_bound import least_devices, memory_forced
from rlplace.problem import Problem


def problem_info(problem: Problem, model: str, cluster: str, *, view: str) -> ProblemInfo:
    """The problem's sizes and bounds."""
    bounds = lower_bounds(problem)
    return ProblemInfo(
        model=model,
        cluster=cluster,
        view=view,
        fingerprint=problem.fingerprint,
        samples=problem.samples_per_microbatch,
        groups=problem.num_groups,
        ops=problem.num_ops,
        devices=problem.num_devices,
        critical_path_s=bounds.critical_path_s,
        work_s=finite(bounds.work_s),
        largest_group_s=finite(bounds.largest_group_s),
        memory_forced_s=finite(memory_forced(device_time_s(problem), problem.resident_bytes, problem.memory_limit_bytes)),
        least_devices=least_devices(bounds.resident_bytes + bounds.live_bytes, problem.memory_limit_bytes),
    )
