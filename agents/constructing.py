"""Plans that a policy of `rlplace/Placement-v0` builds, many at once: half a branch at a time, half branches side by side."""

from __future__ import annotations

import math
import time
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents.graph_network import GraphNetwork
from rlplace.agents.policies import Policy
from rlplace.envs.base import greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.instance import Instance, make_instance, side_by_side
from rlplace.envs.observation import graph_arrays
from rlplace.envs.vector.construct import RUNNING, Builds, builds_for, construct, plots_of
from rlplace.problem.generate import random_problem

_PROBE, _HOPE = 64, 0.7
"""Groups after which the pace is known, and the share of that pace at which the others are hoped to take."""


def seen_by(builds: Builds, rows: NDArray[np.int64]) -> dict[str, Tensor]:
    """What a policy reads of some environments: the observation without the plan."""
    return {
        "graph": torch.from_numpy(builds.instance[rows])[:, None],
        "candidates": torch.from_numpy(builds.table[rows]),
        "candidate_group": torch.from_numpy(builds.group[rows]),
        "context": torch.from_numpy(builds.context[rows]),
    }


def built(policy: Policy, instance: Instance, count: int, *, seed: int = 0, deadline_s: float = math.inf) -> NDArray[np.int32]:
    """Builds plans; the first two are the likeliest of either order, the others are drawn.

    Args:
        policy: Of `rlplace/Placement-v0`.
        instance: What to place.
        count: N, number of plans.
        seed: Of the draws.
        deadline_s: Moment on the monotonic clock by which the plans are needed; it gives up as soon as they would be late.

    Returns:
        int32 [N, G], or [0, G] where the time was too short; what no legal device was left for sits where it fills
        devices least.
    """
    both = (instance, side_by_side(instance))
    policy.know([graph_arrays(instance)] * 2)
    plots, builds = tuple(plots_of(both)), builds_for(count, *instance.allowed.shape)
    builds.instance[:] = np.arange(count) % 2
    every = np.arange(count)
    random, actions = torch.Generator().manual_seed(seed % (1 << 63)), np.zeros(count, dtype=np.int64)
    construct(plots, tuple(builds), every, actions, True)
    rows, begin_s, groups = every, time.monotonic(), instance.problem.num_groups
    for placed in range(groups):
        if not len(rows):
            break
        now_s = time.monotonic()
        if placed <= 1:  # the first decision pays for the messages
            begin_s = now_s
        left_s = _HOPE * (groups - placed) * (now_s - begin_s) / (placed - 1) if placed >= _PROBE else 0.0
        if now_s + left_s > deadline_s:
            return builds.plan[:0]
        with torch.inference_mode():
            logits = policy.look(seen_by(builds, rows))[0]
            noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=random).clamp(1e-7, 1 - 1e-7)))
            noise[torch.from_numpy(rows < 2)] = 0.0
            chosen = (logits + noise).masked_fill(~torch.from_numpy(builds.legal[rows]), -torch.inf).argmax(dim=1)
        actions[rows] = chosen.numpy()
        construct(plots, tuple(builds), rows, actions, False)
        rows = rows[builds.status[rows] == RUNNING]
    return np.where(builds.plan >= 0, builds.plan, greedy_fit(instance)).astype(np.int32)


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, the kernel of construction, so that time limits do not include it."""
    instance = make_instance(random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2), compute_floor=False)
    built(GraphNetwork(features=CONSTRUCTION_FEATURES), instance, 2)
