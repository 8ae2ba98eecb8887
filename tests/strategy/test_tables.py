"""Embedding tables that replicas divide: who holds what, prices, and plans of a recommender whose copies do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import BACKWARD, UPDATE, OpGraph
from rlplace.model.zoo import load_model
from rlplace.model.zoo.models import KAGGLE
from rlplace.runtime.strategy.facts import conduct_of_graph, model_facts
from rlplace.runtime.strategy.why_not import judge
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.blocks.tables import LEAST_BYTES, EmbeddingTable, deal, loads_of
from rlplace.strategy.costs import EXPERT_ALL_TO_ALL, Cut
from rlplace.strategy.drafts import Mesh, draft_of_strategy, plain_draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.plan import plan_strategy
from rlplace.strategy.search.remarks import memory_parts
from rlplace.strategy.search.space import Space
from tests.strategy.test_executor_twin import check_twins

FOUR = "rtx4090:4"


def recommender(samples: int, options: str = "kaggle=true,most=4000,width=128,hidden=32,layers=2,bag=2") -> OpGraph:
    loaded = load_model(f"zoo:dlrm,{options}", batch=samples)
    return capture(loaded.module, loaded.example_inputs, optimizer="sgd")


@pytest.fixture(scope="module")
def priced() -> PricedBlocks:
    return PricedBlocks(recommender(8), FOUR, recommender(16))


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("width", [64, 256])
def test_tables_of_kaggle_are_balanced(width: int, degree: int) -> None:
    """Tables of 3 to 10,131,227 rows: no device has over 10 % more memory or lookups than the mean, and few are cut."""
    tables = [
        EmbeddingTable(f"{n}", rows, width, 4 * rows * width, 8 * rows * width, 4 * width) for n, rows in enumerate(KAGGLE)
    ]
    words = deal(tables, degree)
    loads = loads_of(tables, words, degree)
    assert (loads.max(1) <= 1.1 * loads.mean(1)).all()
    divided = [table for table in tables if table.path in words]
    assert loads[0].sum() == pytest.approx(sum(table.size_bytes for table in divided), rel=1e-12)
    assert sum(table.weight_bytes for table in tables if table.path not in words) < 26 * LEAST_BYTES
    assert sum(not word.startswith("table") for word in words.values()) <= 8


def test_by_hand(priced: PricedBlocks) -> None:
    """A device holds the part of the busiest one, exchanges no gradient of it, and sends ids and rows twice."""
    assert priced.tables and priced.why_not(Cut(8, tables=4)) is None
    large = [rows for rows in KAGGLE if min(rows, 4000) * 128 * 4 >= LEAST_BYTES]
    total = sum(min(rows, 4000) * 128 * 4 for rows in large)
    words = {path: word for own in priced.modules(Cut(8, tables=4)).values() for path, word in own.items()}
    assert len(words) == len(large)
    whole, held = priced.held(), priced.held(1, 1, 4)
    assert whole.weight_bytes.sum() - held.weight_bytes.sum() == total
    assert 2 * total / 4 <= held.expert_bytes[2].sum() <= 1.1 * 2 * total / 4  # weights and gradients
    assert held.optimizer_bytes.sum() == whole.optimizer_bytes.sum() + held.expert_bytes[2].sum()
    passes, plain = priced.passes(0, Cut(8, tables=4)), priced.passes(0, Cut(8))
    held_by = [sum(4 if word == f"table {n}" else not word.startswith("table") for word in words.values()) for n in range(4)]
    rows = 8 * 2 * 128 * 4 * max(held_by)  # of the process that sends most, all its tables together
    assert passes.collective_bytes[1, EXPERT_ALL_TO_ALL].sum() == pytest.approx(rows, rel=0.1)  # ids of a bag by the op's bytes
    assert passes.collective_calls[:, EXPERT_ALL_TO_ALL].sum(1).tolist() == [3, 1]
    assert passes.forward_s == pytest.approx(plain.forward_s)
    one, four = (priced._at(Cut(8, tables=degree)).whole[0] for degree in (1, 4))
    updates = (one.op_phase == UPDATE) & np.isin(one.op_parameter, priced._tables.parameters(4))
    assert four.op_bytes[updates].sum() == pytest.approx(one.op_bytes[updates].sum() / 4, rel=1e-3)
    behind = one.op_phase == BACKWARD
    assert one.op_bytes[behind].sum() - four.op_bytes[behind].sum() == pytest.approx(total * 3 / 4, rel=1e-3)


def test_sparse_tables_are_all_divided_and_cost_what_is_looked_up() -> None:
    """Neither passes nor updates of a card grow with the tables."""
    options = [f"tables=3,rows={rows},width=32,hidden=8,layers=1,sparse=true" for rows in (400, 800)]
    small, large = (PricedBlocks(recommender(8, own), FOUR, recommender(16, own)) for own in options)
    cut = Cut(8, tables=4)
    assert small.tables and sum(map(len, small.modules(cut).values())) == 3
    assert conduct_of_graph(small.graph, "").sparse == tuple(f"tables.{n}.weight" for n in range(3))
    for own in ("forward_s", "backward_s"):
        assert getattr(small.passes(0, cut), own) == pytest.approx(getattr(large.passes(0, cut), own))
    assert small.update_s(0, tables=4) == pytest.approx(large.update_s(0, tables=4))
    assert large.held(1, 1, 4).expert_bytes.sum() == 2 * small.held(1, 1, 4).expert_bytes.sum()
    assert large.held().gradient_bytes.sum() == small.held().gradient_bytes.sum() < 400 * 32 * 4


@pytest.mark.parametrize(
    "place", [Mesh((0, 1, 2, 3), replicate=4, tables=4), Mesh((0, 1, 2, 3), replicate=2, shard=2, sharding=3, tables=4)]
)
def test_both_executors_agree(priced: PricedBlocks, place: Mesh) -> None:
    draft = plain_draft((0, len(priced.names)), [place], microbatch=(4,), microbatches=(2,))
    check_twins(priced, Cluster.preset(FOUR), draft)
    copies = plain_draft((0, len(priced.names)), [Mesh((0, 1, 2, 3), replicate=4)], microbatch=(4,), microbatches=(2,))
    evaluator = DraftEvaluator(priced, Cluster.preset(FOUR))
    found = evaluator.evaluate(draft)
    assert found.peak_memory_bytes[0] < evaluator.evaluate(copies).peak_memory_bytes[0]
    (row,) = memory_parts(draft, priced, Cluster.preset(FOUR), found)
    assert row.parts["tables"] == priced.held(*place.state).expert_bytes.sum() and row.parts["optimizer"] == 0


def test_a_recommender_that_fits_on_no_card_is_divided() -> None:
    """26 tables of 34.6 GB and as many gradients, on four cards of 24 GB; what runs is what is priced."""
    options = "kaggle=true,width=256,bag=1,hidden=64,layers=2"
    model = load_model(f"zoo:dlrm,{options}", batch=8).module
    why_not, _ = judge(model_facts(model))
    how = {"other": recommender(16, options), "calls": 150, "why_not": why_not}
    plan = plan_strategy(recommender(8, options), Cluster.preset(FOUR), 4096, space=Space.parse("offload=none"), **how)
    strategy, stage = plan.strategy, plan.strategy.stages[0]
    assert stage.data_degree == 4 and len(stage.tables) == 15 and plan.predicted.feasible
    assert max(plan.predicted.peak_memory_bytes) < 24e9
    names = PricedBlocks(recommender(8, options), FOUR).names
    assert draft_of_strategy(strategy, names).places[0].tables == 4
    assert "15 embedding tables divided" in plan.predicted.strategies[0]["words"]
