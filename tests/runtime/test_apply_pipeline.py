"""From a captured and priced model to a plan that runs: every op where the plan says."""

import copy

import equality
import pytest
import small_models
import torch

import rlplace
from rlplace.plan.device_map import device_of_op


@pytest.mark.parametrize(
    ("name", "planner"),
    [
        ("gpt2", "round_robin"),
        ("t5", "metis"),
        ("resnet", "heft"),
        ("swin", "round_robin"),
        ("lstm", "balanced"),
        ("dlrm", "random"),
    ],
)
def test_planned_model_runs_as_planned(sim, name, planner):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    reference = copy.deepcopy(model)
    own = loss_of is small_models._own_loss
    graph = rlplace.capture(model, inputs, loss=None if own else loss_of)
    problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:4"), groups=40)
    plan = rlplace.place(problem, planner=planner, seed=0)
    placed = rlplace.apply(model, plan, sim(4), example_inputs=inputs)
    assert placed.report.level == "op", placed.report
    assert placed.report.ops == len(device_of_op(plan)) > 10
    assert placed.report.ops_moved == 0
    assert (placed.report.loss_device is None) == own
    equality.train_both(placed, reference, inputs, loss_of, equality.adam, steps=2)


@pytest.mark.parametrize("method", ["dispatch", "module"])
def test_plans_of_other_capture_methods_run_at_module_level(sim, method):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.bert()
    reference = copy.deepcopy(model)
    graph = rlplace.capture(model, inputs, method=method)
    problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:4"), groups=20)
    plan = rlplace.place(problem, planner="round_robin")
    placed = rlplace.apply(model, plan, sim(4), example_inputs=inputs)
    assert placed.report.level == "module"
    assert "not the one that was planned" in placed.report.why_not_op
    assert len({str(p.device) for p in placed.parameters()}) > 1
    equality.train_both(placed, reference, inputs, loss_of, equality.sgd, steps=1)


def test_saved_plan_still_applies(sim, tmp_path):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.gpt2()
    reference = copy.deepcopy(model)
    problem = rlplace.price(rlplace.capture(model, inputs), rlplace.Cluster.preset("a100-80g:2"), groups=12)
    rlplace.place(problem, planner="balanced").save(tmp_path / "p.plan.json")
    plan = rlplace.PlacementPlan.load(tmp_path / "p.plan.json")
    small = {key: value[:2] for key, value in inputs.items()}  # not the batch that was captured
    placed = rlplace.apply(model, plan, sim(2), example_inputs=small)
    assert placed.report.level == "op", placed.report
    equality.assert_same_step(placed, reference, small, loss_of)
    equality.assert_same_step(placed, reference, inputs, loss_of)
