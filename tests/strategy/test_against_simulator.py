"""The block executor and the op-level simulator say the same of what both know: copies, and chains under every schedule.

They differ where they mean different things, and the tests leave that out: the optimizer steps when all gradients are there
(the simulator updates what has come); torch receives every micro-batch in a buffer of its own (the simulator frees what was
read); buckets slow a replica as long as they run (the simulator slows all by the share that the plan's device 0 would have).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from chain_problem import chain_problem
from numpy.random import Generator
from random_costs import RandomCosts, random_costs

from rlplace.cluster import Cluster
from rlplace.schedule import LOOP, ONE, PIPELINE_SCHEDULES, SCHEDULES
from rlplace.simulator import simulate
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.evaluate import Evaluator

PRESETS = ("a100-80g:4", "a100-80g:8", "a100-80g:2+t4:2", "h100:2x4,ib=400g", "rtx4090:4", "a100-80g:4x1,eth=25g")
CLUSTERS = [Cluster.preset(name) for name in PRESETS]


class Unchanging(RandomCosts):
    """Nothing is updated."""

    def update_s(self, kind, tensor=1, expert=1):
        return np.zeros(len(self.names))


def drawn(rng: Generator, cluster: Cluster) -> tuple[RandomCosts, Draft]:
    """Copies on some devices, or a chain of single devices, with recomputation where the schedule has it."""
    blocks = int(rng.integers(4, 13))
    costs = random_costs(rng, cluster, blocks)
    costs = dataclasses.replace(costs, item=1.0, border=costs.border * rng.choice([1, 10]), known={})
    costs = Unchanging(**{item.name: getattr(costs, item.name) for item in dataclasses.fields(costs)})
    devices = rng.permutation(cluster.num_devices).tolist()
    places = int(rng.choice([1, 1, 2, 3, 4]))
    schedule, order = None, [0]
    alike = [device for device in devices if cluster.devices[device].kind == cluster.devices[0].kind]
    copies = int(rng.integers(1, len(alike) + 1))
    chosen = (Place(tuple(alike[:copies]), replicate=copies),)
    if places > 1:
        known = [s for s in PIPELINE_SCHEDULES if s != "dualpipev" and (SCHEDULES[s].layout == ONE or 2 * places <= blocks)]
        schedule = str(rng.choice(known))
        layout = SCHEDULES[schedule].layout
        order = list(range(places))
        if layout != ONE:
            order += order if layout == LOOP else order[::-1]
        chosen = tuple(Place((device,)) for device in devices[:places])
    cuts = sorted(rng.choice(np.arange(1, blocks), len(order) - 1, replace=False).tolist()) if len(order) > 1 else []
    split = schedule is not None and SCHEDULES[schedule].splits_backward
    recompute = bytes(blocks) if split else bytes(rng.integers(0, 3, blocks).tolist())
    microbatches = places * int(rng.integers(2, 4)) if places > 1 else int(rng.integers(1, 5))
    return costs, Draft(
        (0, *cuts, blocks),
        chosen,
        tuple(order),
        recompute,
        bytes(blocks),
        (int(rng.integers(1, 4)),),
        (microbatches,),
        schedule,
    )


def differences(seeds: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relative differences of step time, of copies and of chains, and of peak memory where stages send nothing."""
    copies, chains, memory = [], [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        cluster = CLUSTERS[seed % len(CLUSTERS)]
        costs, draft = drawn(rng, cluster)
        line = simulate(*chain_problem(costs, cluster, draft))
        took = Evaluator(costs, cluster).evaluate(draft).step_time_s
        (copies if draft.stages == 1 else chains).append(took / line.step_time_s - 1)
        silent = dataclasses.replace(costs, border=costs.border * 0, known={})
        line = simulate(*chain_problem(silent, cluster, draft))
        peaks = Evaluator(silent, cluster).evaluate(draft).peak_memory_bytes
        memory += [peaks[device] / line.peak_memory_bytes[device] - 1 for device in draft.devices]
    return abs(np.array(copies)), abs(np.array(chains)), abs(np.array(memory))


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000), marks=pytest.mark.slow)], ids=["100", "1000"])
def test_time_and_memory_are_the_simulators(seeds):
    copies, chains, memory = differences(seeds)
    print(f"copies {copies.mean():.3%} mean, {copies.max():.2%} worst, {len(copies)}; memory {memory.max():.1e} worst")
    print(f"chains {chains.mean():.4%} mean, {chains.max():.2%} worst, {(chains > 1e-9).sum()} of {len(chains)} above 1e-9")
    assert copies.mean() < 0.005 and copies.max() < 0.05  # the simulator's buckets are whole groups
    assert chains.mean() < 0.0005 and chains.max() < 0.02  # tensors that are sent at one instant may queue in another order
    assert memory.max() < 1e-9
