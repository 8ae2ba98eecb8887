"""What is learned from runs elsewhere: known errors come back, files are checked, and what is far is said to be far."""

import dataclasses
import json
import math

import msgspec
import numpy as np
import pytest
import torch
from worlds import pool, question

from rlplace.agents.residual import train_residual
from rlplace.errors import InputError
from rlplace.measured.corrected import corrected, run_of
from rlplace.measured.plan_graph import PlanGraph, together
from rlplace.measured.residual import WEIGHTS, Residual
from rlplace.plan.plan import PlacementPlan
from rlplace.strategy.drafts import draft_of_strategy
from rlplace.strategy.plan import prediction

CLUSTERS = ("a100-80g:4", "h100:4", "a100-80g:2+t4:2")


def wrong_by(draft):
    """What is wrong with this cost model: everything takes 1.1 times as long, with shared parameters 1.5 times."""
    return 1.5 if any(place.sharding for place in draft.places) else 1.1


def runs_of(seed, cluster):
    asked, candidates = question(seed, cluster), pool(seed, cluster)
    return [
        run_of(
            draft, said, asked.costs.names, asked.cluster, status="done", step_s=(said.step_time_s * wrong_by(draft),),
            stack={"own": "1"},
        )
        for draft, said in zip(candidates.drafts, candidates.said, strict=True)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return [run for seed in range(2) for cluster in CLUSTERS[:2] for run in runs_of(seed, cluster)]


@pytest.fixture(scope="module")
def residual(runs):
    return train_residual(runs, members=3, steps=150, hidden=16)


@pytest.mark.slow
def test_a_known_error_comes_back_on_another_model(residual):
    unseen = runs_of(7, CLUSTERS[0])
    mean, spread = residual.of(unseen)
    true = np.log([run.median_s / run.predicted_s for run in unseen])
    assert np.abs(mean - true).mean() < 0.07 < np.abs(true).mean()
    assert np.corrcoef(mean, true)[0, 1] > 0.8 and (spread > 0).all()


def test_equal_for_a_seed(runs):
    first, second = (train_residual(runs[:20], members=2, steps=10, seed=4).of(runs[:5]) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_many_plans_at_once_are_each_alone(residual, runs):
    some = [runs[0], runs[-1], runs[len(runs) // 2]]
    mean, spread = residual.of(some)
    for number, run in enumerate(some):
        alone = residual.of([run])
        assert mean[number] == pytest.approx(alone[0][0], abs=1e-5) and spread[number] == pytest.approx(alone[1][0], rel=1e-4)


def test_names_of_blocks_tell_nothing(residual, runs, tmp_path):
    from rlplace.measured.log import read_runs, write_shared

    write_shared(tmp_path / "a.runs.jsonl", runs[:4])
    foreign = read_runs(tmp_path / "a.runs.jsonl")
    assert foreign[0].strategy != runs[0].strategy
    assert np.allclose(residual.of(foreign)[0], residual.of(runs[:4])[0], atol=1e-6)


def test_a_graph_has_what_the_plan_has():
    graph = PlanGraph.of(runs_of(0, CLUSTERS[1])[0])
    assert len(graph.device_stage) >= len(graph.stages) and graph.blocks.shape[0] == 12
    both, of_stage = together([graph, graph])
    assert len(of_stage) == 2 * len(graph.stages) and torch.equal(both.stages[: len(graph.stages)], graph.stages)


def test_runs_of_others_correct_like_strategies_and_widen_nothing(residual):
    unseen = runs_of(7, CLUSTERS[0])
    slow = [msgspec.structs.replace(run, step_s=(3.0 * run.predicted_s,)) for run in unseen[:6]]
    told = residual.told([*slow, msgspec.structs.replace(slow[0], status="crashed", step_s=())])
    assert len(told.elsewhere) == 6
    before, after = residual.of(unseen), told.of(unseen)
    assert (after[0][:6] > before[0][:6] + 0.3).all()
    assert (after[1] <= before[1] + 1e-9).all() and after[1][:6].mean() < before[1][:6].mean()
    other = runs_of(0, CLUSTERS[2])
    assert np.abs(told.of(other)[0] - residual.of(other)[0]).mean() < np.abs(after[0] - before[0]).mean()


def test_what_is_far_is_said_to_be_far(residual):
    assert residual.strange(["a100-80g"] * 4) is None
    assert "l4" in residual.strange(["a100-80g", "l4"])
    assert "more than 4" in residual.strange(["h100"] * 64)
    assert residual.told(runs_of(0, CLUSTERS[2])).strange(["t4"]) is None


def plan_of(asked, draft):
    return PlacementPlan(
        "1" * 64, "strategy", 0, np.zeros(0, dtype=np.int32), strategy=draft.strategy(asked.costs.names),
        predicted=prediction(asked.scores.evaluate(draft), asked.batch),
    )  # fmt: skip


def test_the_corrected_answer_is_the_least_of_the_corrected(residual):
    asked = question(1)
    drafts = sorted((d for d in pool(1).drafts if asked.scores.evaluate(d).feasible), key=lambda d: -wrong_by(d))
    answer = corrected(asked, plan_of(asked, drafts[0]), residual)
    about = answer.predicted.extra["residual"]
    assert about["low_s"] < about["step_time_s"] < about["high_s"] and about["strange"] is None
    assert about["step_time_s"] != answer.predicted.step_time_s
    chosen = draft_of_strategy(answer.strategy, asked.costs.names)
    assert answer.predicted.step_time_s == asked.scores.evaluate(chosen).step_time_s and answer.predicted.feasible
    own = residual.of([run_of(drafts[0], asked.scores.evaluate(drafts[0]), asked.costs.names, asked.cluster)])[0][0]
    assert about["step_time_s"] <= asked.scores.evaluate(drafts[0]).step_time_s * math.exp(own) * (1 + 1e-9)


def test_far_away_the_planners_answer_stays(residual):
    asked = question(0, CLUSTERS[2])
    plan = plan_of(asked, pool(0, CLUSTERS[2]).drafts[3])
    answer = corrected(asked, plan, residual)
    assert answer.strategy == plan.strategy and "t4" in answer.predicted.extra["residual"]["strange"]


def test_a_folder_gives_the_same_and_anything_else_is_refused(residual, runs, tmp_path):
    residual = dataclasses.replace(residual, widen=1.25)
    residual.save(tmp_path / "r", training={"runs": len(runs)}, card="# Residual\n")
    again = Residual.load(tmp_path / "r")
    assert all(np.array_equal(one, other) for one, other in zip(residual.of(runs[:9]), again.of(runs[:9]), strict=True))
    path, good = tmp_path / "r" / "config.json", (tmp_path / "r" / "config.json").read_text()
    for change, message in (
        ({"members": 0}, "members"), ({"members": 10**9}, "members"), ({"hidden": 17}, "shape"), ({"hidden": -1}, "hidden"),
        ({"features": ["a"]}, "features"), ({"widen": math.inf}, "widen|finite|number"),
        ({"widen": "x"}, "widen"), ({"weight": -1.0}, "weight"),
        ({"stacks": 3}, "stacks"), ({"kinds": [3]}, "kinds"), ({"weights": "0"}, "not the weights"), ({"more": 1}, "more"),
    ):  # fmt: skip
        path.write_text(json.dumps({**json.loads(good), **change}))
        with pytest.raises(InputError, match=message):
            Residual.load(tmp_path / "r")
    path.write_text(good)
    (tmp_path / "r" / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(InputError, match="not the weights"):
        Residual.load(tmp_path / "r")
    with pytest.raises(InputError, match="no folder"):
        Residual.load("nothing-there")


def test_what_tells_nothing_is_refused(runs):
    with pytest.raises(InputError, match="nothing to learn from"):
        train_residual([msgspec.structs.replace(runs[0], status="crashed", step_s=())])
    with pytest.raises(InputError, match="features"):
        PlanGraph.of(msgspec.structs.replace(runs[0], features=(1.0,)))
    with pytest.raises(InputError, match="names device"):
        PlanGraph.of(msgspec.structs.replace(runs[0], kinds=("h100",), hosts=(0,)))
