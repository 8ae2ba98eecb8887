"""Unlike pipelines beside each other: their rule by hand, both executors, and a search that finds them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.strategy.drafts import UNLIKE, Draft, Mesh, draft_of_strategy, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.executor.reference import evaluate_reference
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem
from rlplace.strategy.search.unlike import other_shares
from tests.strategy.random_costs import random_costs, random_draft
from tests.strategy.test_executor_twin import FIELDS

EIGHT = Cluster.preset("a100-80g:4+t4:4")


def chain(devices: tuple[int, ...], microbatches: int, blocks: int = 4) -> Draft:
    """One stage a device."""
    bounds = tuple(blocks * index // len(devices) for index in range(len(devices) + 1))
    schedule = "1f1b" if len(devices) > 1 else None
    places = tuple(Mesh((device,)) for device in devices)
    return Draft(bounds, places, tuple(range(len(devices))), bytes(blocks), bytes(blocks), (2,), (microbatches,), schedule)


def beside(one: Draft, *others: Draft) -> Draft:
    return dataclasses.replace(one, beside=others)


@pytest.mark.parametrize("count", [2, 3])
def test_by_hand(count: int) -> None:
    """The step is the slowest pipeline's passes, the sums of the gradients of the busiest device, and the updates."""
    costs = dataclasses.replace(random_costs(np.random.default_rng(0), EIGHT, 4, alike=True), item=1.0)
    evaluator = DraftEvaluator(costs, EIGHT)
    pipelines = [chain((0, 1), 4), chain((4,), 2), chain((5,), 1)][:count]
    alone = [evaluator.evaluate(one) for one in pipelines]
    said = evaluator.evaluate(beside(*pipelines))
    size, ends = float(costs.held().gradient_bytes[0]), [one.devices for one in pipelines[1:]]
    groups = [(first, *(own[0] for own in ends)) for first in (0, 1)]
    block_s = [collective_s(EIGHT.links, "all_gather", group, count * size) for group in groups]
    summed = 2 * block_s[0] + 2 * block_s[1]  # the single device of the second pipeline takes part in all four
    passes = max(one.passes_s for one in alone) + summed
    assert said.passes_s == pytest.approx(passes, rel=0.01)
    assert said.step_time_s - said.passes_s == pytest.approx(max(one.step_time_s - one.passes_s for one in alone), rel=1e-9)
    assert sum(said.parts.values()) == pytest.approx(said.step_time_s, rel=1e-12)
    for device in (0, 1, 4):
        assert said.peak_memory_bytes[device] == max(one.peak_memory_bytes[device] for one in alone)
    assert beside(*pipelines).batch == sum(one.batch for one in pipelines)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
def test_twins_agree(seed: int, blocks: int, tied: bool) -> None:
    rng = np.random.default_rng(seed)
    costs = random_costs(rng, EIGHT, blocks, tied=tied)
    halves = []
    for first, cluster in ((0, "a100-80g:4"), (4, "t4:4")):
        draft = random_draft(rng, Cluster.preset(cluster), blocks)
        places = tuple(dataclasses.replace(p, devices=tuple(first + device for device in p.devices)) for p in draft.places)
        halves.append(dataclasses.replace(draft, places=places))
    draft = beside(*halves)
    one, other = DraftEvaluator(costs, EIGHT).evaluate(draft), evaluate_reference(draft, costs, EIGHT)
    for name in (*FIELDS, "passes_s"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12), name
    assert list(one.parts.values()) == pytest.approx(list(other.parts.values()), rel=1e-12, abs=1e-12 * other.step_time_s)
    assert one.bottleneck == other.bottleneck


def test_pipelines_that_share_a_device_are_refused() -> None:
    costs = random_costs(np.random.default_rng(0), EIGHT, 4)
    with pytest.raises(InputError, match="share a device"):
        DraftEvaluator(costs, EIGHT).score(beside(chain((0, 1), 2), chain((1,), 2)))


def test_micro_batches_move_as_few_as_leave_both_whole() -> None:
    draft = beside(chain((0, 1), 4), dataclasses.replace(chain((4, 5), 6), microbatch=(3,)))
    found = [tuple(one.microbatches[0] for one in other.pipelines) for other in other_shares(draft)]
    assert found == [(1, 8), (7, 4)] and all(other.batch == draft.batch for other in other_shares(draft))


@pytest.mark.slow
def test_a_search_gives_unlike_devices_pipelines_of_their_own() -> None:
    """Where computing takes long; an engine that refuses them is not asked for each. What is found is a plan's record, too."""
    cluster = Cluster.preset("a100-80g:2+t4:2")
    costs = random_costs(np.random.default_rng(0), cluster, 6)
    costs = dataclasses.replace(costs, forward=50 * costs.forward, known={})
    question = SearchProblem(DraftEvaluator(costs, cluster), 24, Space.parse("recompute=none offload=none"))
    best = search(question, calls=1500).ranked[0]
    strategy = best.draft.strategy(costs.names)
    assert kind_of(best.draft) == UNLIKE and "; beside it " in uniform_words(strategy)
    assert draft_of_strategy(Strategy.from_dict(strategy.to_dict()), costs.names) == best.draft
    assert {cluster.kinds[device].name for device in best.draft.places[0].devices} == {"a100-80g"}
    assert [one.batch for one in best.draft.pipelines] == [21, 3]  # T4s are seven times slower
    one = search(
        dataclasses.replace(question, why_not=lambda draft: "one pipeline, please" if draft.beside else None), calls=1500
    )
    assert one.ranked[0].step_s > best.step_s and UNLIKE not in one.of_kinds


def test_shares_of_large_batches_can_be_divided_again() -> None:
    """One of 512 samples in odd shares would leave eight devices micro-batches of one size or another's only."""
    cluster = Cluster.preset("h100:1+l4:8")
    costs = random_costs(np.random.default_rng(1), cluster, 6)
    costs = dataclasses.replace(costs, forward=10 * costs.forward, known={})
    space = Space.parse("recompute=none offload=none context=1 tensor=1")
    found = search(SearchProblem(DraftEvaluator(costs, cluster), 512, space), calls=400).of_kinds[UNLIKE]
    assert [one.batch % 8 for one in found.draft.pipelines] == [0, 0] and found.draft.batch == 512
