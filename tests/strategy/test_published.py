"""Starts from published planners: their tables against every cut, and what they make of a question."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.plan.schedule import GPIPE, ONE_F_ONE_B
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.published import least_traffic, published_starts, replicated_stages
from rlplace.strategy.search.tries import SearchProblem
from tests.placement.pipedream import profile_chain, read_profile
from tests.strategy.random_costs import random_costs


def cuts(blocks: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), parts - 1)]


@pytest.mark.parametrize("seed", range(12))
def test_pipedream_is_the_best_of_all_stages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, machines, degree = int(rng.integers(2, 6)), int(rng.integers(2, 6)), int(rng.choice([1, 2, 3, 4, 6]))
    seconds, weights, sent = rng.uniform(0.1, 2, blocks), rng.uniform(0, 1, blocks), rng.uniform(0, 1, blocks)

    def slowest(bounds: tuple[int, ...], replicas: tuple[int, ...]) -> float:
        stages = [
            (seconds[a:b].sum() + 4 * (r - 1) / r * weights[a:b].sum()) / r
            for a, b, r in zip(bounds, bounds[1:], replicas, strict=False)
        ]
        return max(*stages, 0.0, *(2 * sent[a - 1] / r for a, r in zip(bounds[1:-1], replicas[1:], strict=True)))

    ways = [r for r in range(1, degree + 1) if degree % r == 0]
    every = [
        slowest(bounds, replicas)
        for parts in range(1, blocks + 1)
        for bounds in cuts(blocks, parts)
        for replicas in itertools.product(ways, repeat=parts)
        if sum(replicas) <= machines
    ]
    bounds, replicas = replicated_stages(seconds, weights, sent, machines, degree)
    assert sum(replicas) <= machines and slowest(bounds, replicas) == pytest.approx(min(every), rel=1e-12)


def test_stages_of_pipedreams_own_vgg16() -> None:
    """Its repository runs VGG16 on four machines as node2..node18 on three and the rest on one (1 GB/s links)."""
    chain = profile_chain(read_profile(Path(__file__).parents[1] / "placement/profiles/vgg16.txt"))
    seconds, weights, sent = chain.forward_s + chain.backward_s, chain.weight_bytes / 1e9, chain.activation_bytes / 1e9
    bounds, replicas = replicated_stages(seconds, weights, sent, machines=4, degree=3)
    assert [chain.names[first] for first in bounds[:-1]] == ["node2", "node19"] and replicas == (3, 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_compiler_sends_least_of_all_balanced_cuts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts, blocks = int(rng.integers(1, 4)), int(rng.integers(4, 8))
    seconds, sent = rng.uniform(0.1, 2, (parts, blocks)), rng.uniform(0, 1, blocks)

    def longest(bounds: tuple[int, ...]) -> float:
        return max(float(seconds[p, a:b].sum()) for p, (a, b) in enumerate(itertools.pairwise(bounds)))

    def traffic(bounds: tuple[int, ...]) -> float:
        return sum(float(sent[cut - 1]) for cut in bounds[1:-1])

    every = cuts(blocks, parts)
    limit = 1.3 * min(map(longest, every))
    found = least_traffic(seconds, sent, limit)
    assert longest(found) <= limit * (1 + 1e-9)
    assert traffic(found) == pytest.approx(min(traffic(one) for one in every if longest(one) <= limit), rel=1e-12)


@pytest.mark.parametrize("text", ["a100-80g:8", "a100-80g:2+t4:2"])
def test_starts_are_strategies_of_the_batch(text: str) -> None:
    """All of them, with GPipe's four micro-batches a stage, and replicas of PipeDream's stages that differ."""
    cluster = Cluster.preset(text)
    costs = random_costs(np.random.default_rng(4), cluster, 9)
    question = SearchProblem(DraftEvaluator(costs, cluster), 32)
    found = list(published_starts(question))
    for draft in found:
        assert draft.strategy(costs.names).batch == 32
        assert np.isfinite(question.scores.score(draft)[0])
    assert {draft.schedule for draft in found} == {GPIPE, ONE_F_ONE_B}
    assert any(draft.schedule == GPIPE and draft.microbatches == (4 * draft.stages,) for draft in found)
    unlike = any(len({place.replicate for place in draft.places}) > 1 for draft in found)
    assert unlike or text != "a100-80g:8"  # over the slow link PipeDream stays on one side
    assert any(draft.microbatches == (1,) and draft.stages > 1 for draft in found)
