"""Bounds of whole strategies, and their steps on other hardware."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.explanation.comparison import AS_IS
from rlplace.explanation.report.report import render
from rlplace.explanation.report.sections import summary
from rlplace.explanation.strategies import StrategyStep
from rlplace.explanation.timeline import strategy_page
from rlplace.plan.plan import PlacementPlan
from rlplace.planned import Planned
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs, random_draft


def step_of(problem, draft):
    return StrategyStep(SimpleNamespace(plan=SimpleNamespace(strategy=None), search_problem=problem, draft=lambda _: draft))


def test_the_parts_add_up_to_the_step_and_the_fullest_device_is_named():
    cluster = Cluster.preset("a100-80g:4+v100:4")
    costs = random_costs(np.random.default_rng(1), cluster, 9)
    for seed in range(40):
        draft = random_draft(np.random.default_rng(seed), cluster, 9)
        problem = SearchProblem(DraftEvaluator(costs, cluster), draft.batch)
        step, bounds = problem.scores.evaluate(draft), step_of(problem, draft).bounds()
        assert sum(bounds.seconds.values()) == pytest.approx(step.step_time_s, rel=1e-9)
        shares = [peak / device.memory_bytes for peak, device in zip(step.peak_memory_bytes, cluster.devices, strict=True)]
        assert bounds.fullest == cluster.devices[shares.index(max(shares))].name
        assert not any(draft.recompute) or bounds.seconds["running again"] >= 0.0


def test_running_again_is_the_cost_of_recomputation():
    cluster = Cluster.preset("a100-80g:1")
    costs = random_costs(np.random.default_rng(2), cluster, 6)
    problem = SearchProblem(DraftEvaluator(costs, cluster), 4)
    draft = Draft((0, 6), (Mesh((0,)),), (0,), bytes([2] * 6), bytes(6), (2,), (2,))
    bounds = step_of(problem, draft).bounds()
    again = costs.passes(0, draft.places[0].cut(2)).again_s[2].sum() * 2
    assert bounds.seconds["running again"] == pytest.approx(again, rel=1e-9)
    without = step_of(problem, dataclasses.replace(draft, recompute=bytes(6))).bounds()
    assert without.seconds["running again"] == 0.0
    assert without.seconds["computing"] == pytest.approx(bounds.seconds["computing"], rel=1e-9)


@pytest.mark.parametrize("memory", [1.0, 0.5])
def test_no_change_is_worse_than_the_best_plan_known(memory):
    """The best as things are is among the answers wherever it can run, and devices that may stay idle cost nothing."""
    cluster = Cluster.preset("a100-80g:2")
    devices = tuple(dataclasses.replace(d, memory_bytes=int(memory * d.memory_bytes)) for d in cluster.devices)
    cluster = dataclasses.replace(cluster, devices=devices)
    problem = SearchProblem(DraftEvaluator(random_costs(np.random.default_rng(3), cluster, 5), cluster), 8)
    best = search(problem, calls=60).ranked[0]
    step = step_of(problem, best.draft)
    answers = {answer.change: answer for answer in step.what_if(calls=60)}
    base = answers[AS_IS]
    assert base.same_s == best.step_s and base.replanned_s is not None and base.replanned_s <= best.step_s
    devices = answers["twice the devices (a100-80g:4)"]
    for name in ("double the memory", "all links twice as fast"):
        assert answers[name].same_feasible and answers[name].replanned_s <= base.replanned_s * (1 + 1e-9)
    assert devices.replanned_s <= devices.same_s
    twice = answers["twice the batch"]
    assert twice.samples == 16 and twice.replanned_s <= 2 * base.same_s * (1 + 1e-9)
    without = step.what_if(calls=0)
    assert all(answer.replanned_s is None and answer.same_s == answers[answer.change].same_s for answer in without)


def test_a_page_of_many_devices_has_one_row_for_those_that_do_the_same(tmp_path, monkeypatch):
    path = tmp_path / "x.plan.json"
    words = ["--cluster", "h100:2x4", "--batch", "8", "--seq", "16", "--calls", "20", "--space", "pipeline=2 replicate=4"]
    assert main(["place", "hf:gpt2,n_layer=4,n_embd=64,n_head=2,vocab_size=512", *words, "--out", str(path)]) == 0
    each = strategy_page(Planned(PlacementPlan.load(path)))
    monkeypatch.setattr("rlplace.explanation.timeline.MOST_ROWS", 4)
    few = strategy_page(Planned(PlacementPlan.load(path)))
    assert len(each.timeline.devices) == 8 and [device.name for device in few.timeline.devices] == [
        "gpu0 and 3 like it",
        "gpu4 and 3 like it",
    ]
    assert few.timeline.counts.tolist() == [4, 4] and few.timeline.step_time_s == each.timeline.step_time_s
    for name in ("peak_memory_bytes", "busy_s", "resident_bytes"):
        assert getattr(few.timeline, name).tolist() == getattr(each.timeline, name)[[0, 4]].tolist()
    assert few.groups_on_device.tolist() == each.groups_on_device[[0, 4]].tolist()
    assert summary(few)["figures"] == summary(each)["figures"]
    assert len(render(few)) < len(render(each))
