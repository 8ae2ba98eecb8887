"""The block executor and the op-level simulator say the same of random drafts: all that a draft can say.

Costs are made up, ten ops a block and pass (`random_ops`). What is left: buckets are full at whole gradients instead of evenly,
and replicas of unlike speed wait for each other in every collective.
"""

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.simulator import simulate
from rlplace.simulator.reference import simulate_reference
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.executor.meshes import AlikeLanes, lanes
from rlplace.strategy.op_level import expand
from rlplace.strategy.op_level.expand import expand_draft
from tests.strategy.random_costs import CLUSTERS, random_costs, random_draft
from tests.strategy.random_ops import RandomOps

KINDS = ("one stage, level 0", "one stage, level 1", "one stage, level 2", "one stage, level 3", "pipelines", "unlike replicas")
PRESETS = {name: Cluster.preset(name) for name in (*CLUSTERS, "a100-80g:4x1,eth=25g")}


def drawn(seed):
    """A model, a cluster and a draft for both; None where torch would wait forever."""
    rng = np.random.default_rng(seed)
    cluster = list(PRESETS.values())[seed % len(PRESETS)]
    blocks = int(rng.integers(4, 13))
    made = random_costs(rng, cluster, blocks, tied=bool(rng.random() < 0.3))
    costs = RandomOps.of(
        dataclasses.replace(made, joins_replicas=blocks % 3 == 0, released=blocks % 4 == 0, matrices=blocks % 2 * 4.0)
    )
    draft = random_draft(rng, cluster, blocks)
    whole = draft.stages == 1 and draft.places[0].sharding == 0
    if whole and 2 in draft.offload and len(set(draft.microbatches)) > 1:  # a block that streams in is reduced in every pass
        return None
    return costs, cluster, draft


def differences(seeds):
    """By kind of draft, relative differences of step time and of the peaks of all devices."""
    found = {kind: ([], []) for kind in KINDS}
    for seed in seeds:
        if (case := drawn(seed)) is None:
            continue
        costs, cluster, draft = case
        said, expanded = DraftEvaluator(costs, cluster).evaluate(draft), expand_draft(draft, costs, cluster)
        line = simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)
        unlike = len(expanded.stands_for) > len(draft.places)
        time, memory = found[KINDS[5 if unlike else 4 if draft.stages > 1 else draft.places[0].sharding]]
        time.append(said.step_time_s / line.step_time_s - 1)
        for peak, devices in zip(line.peak_memory_bytes.tolist(), expanded.stands_for, strict=True):
            for device in devices:
                memory.append(said.peak_memory_bytes[device] / (peak + cluster.devices[device].reserved_bytes) - 1)
    return {kind: (np.array(time), np.array(memory)) for kind, (time, memory) in found.items()}


MORE = [pytest.mark.slow, pytest.mark.long]  # what the page says is of these; the same bounds hold for the first 100


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000), marks=MORE)], ids=["100", "1000"])
def test_time_and_memory_are_the_simulators(seeds):
    for kind, (time, memory) in differences(seeds).items():
        print(
            f"| {kind} | {len(time)} | {abs(time).mean():.3%} | {time.min():+.1%} to {time.max():+.1%} | "
            f"{abs(memory).mean():.2%} | {memory.min():+.1%} to {memory.max():+.1%} |"
        )
        assert abs(time).mean() < 0.02 and abs(time).max() < (0.05 if kind == "unlike replicas" else 0.03)
        assert abs(memory).mean() < 0.005 and abs(memory).max() < 0.02
        if kind == "pipelines":
            assert abs(time).max() < 1e-9


def each_lane(draft, kind):
    """Every lane by itself."""
    devices = [[[d for _, own in replicas for d in own] for replicas in lane.replicas] for lane in lanes(draft)]
    each = enumerate(zip(lanes(draft), devices, strict=True))
    return [AlikeLanes(number, lane.microbatches, (), tuple(map(np.array, own))) for number, (lane, own) in each]


@pytest.mark.parametrize("seed", [2, 3, 5, 9, 12, 39, 123])
def test_lanes_that_are_alike_are_simulated_once(seed, monkeypatch):
    """One device for all that do the same, or one for each lane: the same step, by the plain simulator, too."""
    costs, cluster, draft = drawn(seed)

    def run():
        expanded = expand_draft(draft, costs, cluster)
        return expanded, simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)

    few, once = run()
    monkeypatch.setattr(expand, "alike_lanes", each_lane)
    many, each = run()
    assert sorted(device for row in many.stands_for for device in row) == sorted(draft.devices)
    assert len(few.stands_for) <= len(many.stands_for)
    assert each.step_time_s == pytest.approx(once.step_time_s, rel=1e-12)
    peak = dict(zip(few.stands_for, once.peak_memory_bytes, strict=True))
    for devices, found in zip(many.stands_for, each.peak_memory_bytes, strict=True):
        assert next(size for row, size in peak.items() if devices[0] in row) == found
    plain = simulate_reference(few.problem, few.problem.group_device, order=few.order)
    assert plain.step_time_s == once.step_time_s and (plain.peak_memory_bytes == once.peak_memory_bytes).all()
