"""Context parallelism: what a captured model costs when the sequence is divided, and what a search makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.model.graph.opgraph import UPDATE
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import CONTEXT_GATHER, CONTEXT_SCATTER, Cut
from rlplace.strategy.drafts import kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem
from tests.captured import captured
from tests.strategy.random_costs import random_costs

LAYER = 2
HIDDEN = 4 * 32 * 64 * 4
"""Bytes: samples, positions, features, floats."""


@pytest.mark.parametrize(("name", "size"), [("bert", 2 * HIDDEN), ("gpt2", 2 * HIDDEN), ("llama", HIDDEN)])
def test_by_hand(name: str, size: int) -> None:
    """Everything along the sequence is halved; keys and values are gathered twice and their gradients summed once a pass.

    GPT-2 has both in one tensor with the queries; of Llama's two heads both read one of keys and values.
    """
    blocks = PricedBlocks(captured(name), "h100:8", captured(name, 8))
    whole, half, quarter = (blocks.passes(0, Cut(4, context=degree)) for degree in (1, 2, 4))
    for degree, cut in ((2, half), (4, quarter)):
        assert cut.returned_bytes[LAYER] == HIDDEN / degree
        assert cut.kept_bytes[:, LAYER] == pytest.approx(whole.kept_bytes[:, LAYER] / degree, rel=0.01)
        assert cut.collective_bytes[:, CONTEXT_GATHER, LAYER].tolist() == [size, size]
        assert cut.collective_bytes[:, CONTEXT_SCATTER, LAYER].tolist() == [0, size]
        assert cut.collective_calls[:, CONTEXT_GATHER, LAYER].tolist() == [2, 2]
    work = [blocks._at(Cut(4, context=degree)).whole[0] for degree in (1, 2)]
    passes = work[0].op_phase != UPDATE
    assert work[1].op_flops[passes].sum() == pytest.approx(work[0].op_flops[passes].sum() / 2, rel=0.01)
    assert (work[1].op_flops[~passes] == work[0].op_flops[~passes]).all()


def test_both_groups_divide_what_both_cut() -> None:
    blocks = PricedBlocks(captured("bert"), "h100:8", captured("bert", 8))
    both, tensor = blocks.passes(0, Cut(4, 2, True, 2)), blocks.passes(0, Cut(4, 2, True))
    assert both.kept_bytes[0, LAYER] == pytest.approx(tensor.kept_bytes[0, LAYER] / 2, rel=0.01)
    assert (both.collective_bytes[:, :3] * 2 == tensor.collective_bytes[:, :3]).all()
    assert both.collective_bytes[0, CONTEXT_GATHER, LAYER] == 2 * HIDDEN / 2  # heads are cut


@pytest.mark.parametrize(
    ("name", "words"),
    [("resnet", "no fused attention"), ("vit", "17 positions cannot be cut into 4 parts"), ("mlp", "no fused")],
)
def test_what_cannot_be_divided(name: str, words: str) -> None:
    assert words in str(PricedBlocks(captured(name), "h100:8").why_not(Cut(4, context=2)))


def test_one_sample_is_divided_where_that_is_all_there_is() -> None:
    """One long sample on four devices; with four of them replicas exchange less, and context is left alone."""
    cluster = Cluster.preset("a100-80g:4")
    costs = random_costs(np.random.default_rng(1), cluster, 5)
    space = Space.parse("tensor=1 pipeline=1 recompute=none offload=none")
    one = search(SearchProblem(DraftEvaluator(costs, cluster), 1, space), calls=100)
    draft = one.ranked[0].draft
    assert kind_of(draft) == "context parallel" and {place.context for place in draft.places} == {4}
    assert "context parallel 4" in uniform_words(draft.strategy(costs.names))
    four = search(SearchProblem(DraftEvaluator(costs, cluster), 4, space), calls=100)
    assert {place.context for place in four.ranked[0].draft.places} == {1}
    asked = search(SearchProblem(DraftEvaluator(costs, cluster), 4, Space.parse("context=2 tensor=1 pipeline=1")), calls=100)
    assert {place.context for place in asked.ranked[0].draft.places} == {2}
