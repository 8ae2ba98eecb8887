"""The compiled block executor says what the plain one says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.links import Links
from rlplace.errors import InputError
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor import packing
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.executor.meshes import Groups
from rlplace.strategy.executor.reference import evaluate_reference
from rlplace.strategy.executor.traffic import SIZES, ClusterTraffic, table_s
from tests.strategy.random_costs import CLUSTERS, random_costs, random_draft

FIELDS = ("step_time_s", "over_bytes", "stage_busy_s", "peak_memory_bytes", "host_bytes")
PRESETS = {name: Cluster.preset(name) for name in (*CLUSTERS, "h100:4x2,pod=2@100g@1ms", "a100-80g:8x1,pod=2@50g,region=4@9g")}


def check_twins(costs, cluster, draft, evaluator=None):
    one = (evaluator or DraftEvaluator(costs, cluster)).evaluate(draft)
    other = evaluate_reference(draft, costs, cluster)
    for name in FIELDS:
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12), name
    assert list(one.parts.values()) == pytest.approx(list(other.parts.values()), rel=1e-12, abs=1e-12 * other.step_time_s)
    assert (one.feasible, one.bottleneck, list(one.parts)) == (other.feasible, other.bottleneck, list(other.parts))


@settings(max_examples=150)
@given(st.sampled_from(list(PRESETS)), st.integers(0, 2**32), st.integers(1, 24), st.booleans())
def test_twins_agree(name, seed, blocks, tied):
    rng, cluster = np.random.default_rng(seed), PRESETS[name]
    costs = dataclasses.replace(random_costs(rng, cluster, blocks, tied=tied), joins_replicas=blocks % 3 == 0)
    if seed % 3 == 0:  # hosts whose memory is known, and small
        cluster = dataclasses.replace(cluster, host_memory_bytes=(10**8,) * (max(cluster.hosts) + 1))
    if seed % 4 == 0:  # blocks of the first kind are frozen, with nothing trained before them
        costs = dataclasses.replace(costs, ratio=costs.ratio * (costs.classes != costs.classes[0]))
    costs = dataclasses.replace(costs, released=seed % 5 == 0, matrices=float(seed % 3))
    check_twins(costs, cluster, random_draft(rng, cluster, blocks))


def test_frozen_blocks_before_all_trained_ones_are_gathered_once():
    cluster, last = PRESETS["v100:8"], np.arange(6) >= 3
    costs = random_costs(np.random.default_rng(0), cluster, 6, alike=True)
    costs = dataclasses.replace(costs, classes=last.astype(np.int64), forward=costs.forward * 1e-12, fixed_s=0.0)
    draft = Draft((0, 6), (Mesh(tuple(range(8)), shard=8, sharding=3),), (0,), bytes(6), bytes(6), (1,), (1,))
    trained, frozen = (
        DraftEvaluator(each, cluster).evaluate(draft).step_time_s
        for each in (costs, dataclasses.replace(costs, ratio=costs.ratio * last, known={}))
    )
    traffic = ClusterTraffic(cluster)
    gather_s = table_s(traffic.table("all_gather", Groups(tuple(range(8)), 8)), float(costs.held().weight_bytes[0]))
    assert trained - frozen == pytest.approx(3 * gather_s, rel=1e-6)


def test_matrices_are_gathered_in_turns_and_cut_again():
    cluster, devices = PRESETS["v100:8"], tuple(range(8))
    costs = random_costs(np.random.default_rng(0), cluster, 6)
    draft = Draft((0, 6), (Mesh(devices, shard=8, sharding=3),), (0,), bytes(6), bytes(6), (1,), (1,))
    moved, plain = (
        DraftEvaluator(dataclasses.replace(costs, matrices=count, known={}), cluster).evaluate(draft) for count in (4.0, 0.0)
    )
    each_s = [collective_s(cluster.links, "all_to_all", devices, weights * 0.4 / 4) for weights in costs.weights]
    assert moved.step_time_s - plain.step_time_s == pytest.approx(2 * 4 / 8 * sum(each_s), rel=0.02)  # of a table of sizes


@pytest.mark.slow
@pytest.mark.parametrize("kept", [packing.KEPT_FRAMES, 3])
def test_an_evaluator_that_has_seen_much_says_the_same(monkeypatch, kept):
    monkeypatch.setattr(packing, "KEPT_FRAMES", kept)
    cluster = PRESETS["a100-80g:2+t4:2"]
    costs = random_costs(np.random.default_rng(0), cluster, 12, tied=True)
    evaluator = DraftEvaluator(costs, cluster)
    for seed in range(200):
        check_twins(costs, cluster, random_draft(np.random.default_rng(seed), cluster, 12), evaluator)


def test_without_links_the_step_never_ends():
    cluster = PRESETS["a100-80g:4"]
    cluster = dataclasses.replace(cluster, links=Links(np.zeros((4, 4)), np.zeros((4, 4))), text=None)
    costs = random_costs(np.random.default_rng(0), cluster, 4)
    for draft in (
        Draft((0, 4), (Mesh((0, 1), replicate=2),), (0,), bytes(4), bytes(4), (1,), (1,)),
        Draft((0, 2, 4), (Mesh((0,)), Mesh((1,))), (0, 1), bytes(4), bytes(4), (1,), (2,), "1f1b"),
    ):
        result = DraftEvaluator(costs, cluster).evaluate(draft)
        assert result.step_time_s == evaluate_reference(draft, costs, cluster).step_time_s == np.inf
        assert not result.feasible


def test_tables_of_many_sizes_say_what_single_ones_say():
    sizes = np.concatenate([SIZES[1:], 2.0 ** np.random.default_rng(0).uniform(0, 50, 500)])
    traffic = ClusterTraffic(PRESETS["v100:8"])
    traffic.tables[7] = np.inf
    number = traffic.collective("all_reduce", Groups(tuple(range(8)), 8))
    for calls, numbers in ((1.0, [number]), (2.0, [number]), (1.0, [7])):
        found = traffic.moved_s(numbers, sizes[None, None], np.full((1, 1, len(sizes)), calls))[0]
        assert found.tolist() == [calls * table_s(traffic.tables[numbers[0]], size / calls) for size in sizes.tolist()]


def test_cuts_that_do_not_fit_are_refused_though_their_frame_is_known():
    cluster = PRESETS["a100-80g:4"]
    evaluator = DraftEvaluator(random_costs(np.random.default_rng(0), cluster, 6), cluster)
    draft = Draft((0, 3, 6), (Mesh((0,)), Mesh((1,))), (0, 1), bytes(6), bytes(6), (1,), (2,), "1f1b")
    evaluator.score(draft)
    for change in ({"bounds": (0, 6, 6)}, {"bounds": (0, 3, 7)}, {"recompute": bytes(5)}, {"offload": bytes(7)}):
        with pytest.raises(InputError):
            evaluator.score(dataclasses.replace(draft, **change))
