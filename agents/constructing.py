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
from rlplace.agents.policies import Policy, narrowed
from rlplace.envs.base import greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.instance import Instance, make_instance, side_by_side
from rlplace.envs.observation import graph_arrays
from rlplace.envs.vector.construct import RUNNING, builds_for, construct, plots_of
from rlplace.problem.generate import random_problem

_PROBE, _HOPE = 64, 0.7
"""Groups after which the pace is known, and the share of that pace at which the others are hoped to take."""


def built(policy: Policy, instance: Instance, count: int, *, seed: int = 0, deadline_s: float = math.inf) -> NDArray[np.int32]:
    """Builds plans; the first two are the likeliest of either order, the others are drawn.

    Args:
        policy: Of `rlplace/Placement-v0`.
        instance: What to place.
        count: N, number of plans.
        seed: Of the draws.
        deadline_s: Moment on the monotonic clock by which the plans are needed: where all would be late, only the first two are
            built, and none where these would be, too.

    Returns:
        int32 [N, G], or [2, G] or [0, G] where the time was too short; what no legal device was left for sits where it fills
        devices least.
    """
    both = (instance, side_by_side(instance))
    policy.know([graph_arrays(instance)] * 2)
    plots, builds = tuple(plots_of(both)), builds_for(count, *instance.allowed.shape)
    builds.instance[:] = np.arange(count) % 2
    rows, actions, state = np.arange(count), np.zeros(count, dtype=np.int64), tuple(builds)
    construct(plots, state, rows, actions, True)
    shown = {"candidates": builds.table, "candidate_group": builds.group, "context": builds.context, "legal": builds.legal}
    seen = {name: torch.from_numpy(value) for name, value in shown.items()}  # they follow what `construct` writes
    seen["graph"] = torch.from_numpy(builds.instance)[:, None]
    random = torch.Generator().manual_seed(seed % (1 << 63))
    begin_s, since, groups, made = time.monotonic(), 0, instance.problem.num_groups, count
    with torch.inference_mode():
        for placed in range(groups):
            now_s = time.monotonic()
            if placed <= 1:  # the first decision pays for the messages
                begin_s, since = now_s, placed
            left_s = _HOPE * (groups - placed) * (now_s - begin_s) / (placed - since) if placed - since >= _PROBE else 0.0
            if now_s + left_s > deadline_s:
                if made <= 2 or now_s > deadline_s:
                    return builds.plan[:0]
                rows, made, begin_s, since = rows[rows < 2], 2, now_s, placed
            if not len(rows):
                break
            if placed % _PROBE == 0 and made > 2:
                noise = _gumbel(_PROBE, builds.legal.shape, random)
            now = slice(None) if len(rows) == count else torch.from_numpy(rows)
            shown_now = seen if len(rows) == count else {name: value[now] for name, value in seen.items()}
            logits = policy.decide(narrowed(shown_now, policy.features, CONSTRUCTION_FEATURES))
            if made > 2:
                logits = logits + noise[placed % _PROBE, now]
            actions[rows] = torch.where(shown_now["legal"], logits, -torch.inf).argmax(dim=1).numpy()
            construct(plots, state, rows, actions, False)
            rows = rows[builds.status[rows] == RUNNING]
    return np.where(builds.plan >= 0, builds.plan, greedy_fit(instance))[:made].astype(np.int32)


def _gumbel(times: int, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Noise [times, plans, devices] whose largest sum with logits is a draw; none for the first two plans."""
    noise = -torch.log(-torch.log(torch.rand(times, *shape, generator=random).clamp(1e-7, 1 - 1e-7)))
    noise[:, :2] = 0.0
    return noise


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, the kernel of construction, so that time limits do not include it."""
    instance = make_instance(random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2), compute_floor=False)
    built(GraphNetwork(features=CONSTRUCTION_FEATURES), instance, 2)
