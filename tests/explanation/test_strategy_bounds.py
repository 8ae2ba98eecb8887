"""What bounds a whole strategy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.explanation.bounds import strategy_bounds
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs, random_draft


def test_the_parts_add_up_to_the_step_and_the_fullest_device_is_named() -> None:
    cluster = Cluster.preset("a100-80g:4+v100:4")
    costs = random_costs(np.random.default_rng(1), cluster, 9)
    for seed in range(40):
        draft = random_draft(np.random.default_rng(seed), cluster, 9)
        question = SearchProblem(DraftEvaluator(costs, cluster), draft.batch)
        said, bounds = question.scores.evaluate(draft), strategy_bounds(question, draft)
        assert sum(bounds.seconds.values()) == pytest.approx(said.step_time_s, rel=1e-9)
        shares = [peak / device.memory_bytes for peak, device in zip(said.peak_memory_bytes, cluster.devices, strict=True)]
        assert bounds.fullest == cluster.devices[shares.index(max(shares))].name
        assert not any(draft.recompute) or bounds.seconds["running again"] >= 0.0


def test_what_runs_again_is_what_recomputation_costs() -> None:
    cluster = Cluster.preset("a100-80g:1")
    costs = random_costs(np.random.default_rng(2), cluster, 6)
    question = SearchProblem(DraftEvaluator(costs, cluster), 4)
    draft = Draft((0, 6), (Mesh((0,)),), (0,), bytes([2] * 6), bytes(6), (2,), (2,))
    bounds = strategy_bounds(question, draft)
    again = costs.passes(0, draft.places[0].cut(2)).again_s[2].sum() * 2
    assert bounds.seconds["running again"] == pytest.approx(again, rel=1e-9)
    without = strategy_bounds(question, dataclasses.replace(draft, recompute=bytes(6)))
    assert without.seconds["running again"] == 0.0
    assert without.seconds["computing"] == pytest.approx(bounds.seconds["computing"], rel=1e-9)
