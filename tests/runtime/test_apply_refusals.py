"""Plans, models and devices that apply cannot run are refused with the reason, and the model stays as it was."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import make_plan
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality


def tiny():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


EXAMPLE = (torch.ones(3, 4),)


def plan_of(model, devices=(0, 0, 0), **fields):
    names = equality.op_names(model, ((torch.randn(3, 4),), {}))
    return dataclasses.replace(equality.plan_for(names, devices), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": None}, "made from a problem file"),
        ({"groups": [{"name": "g"}] * 3}, "its groups name no ops"),
        ({"groups": [{"name": "g", "modules": ["0"], "ops": []}]}, "1 groups, but device_of_group has 3"),
    ],
)
def test_plans_that_do_not_run_in_one_process(fields, message):
    model = tiny()
    with pytest.raises(InputError, match=message):
        apply(model, plan_of(model, **fields), ["cpu"])
    assert "forward" not in vars(model)
    assert not hasattr(model, "report")


def test_plan_for_another_model():
    other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(InputError, match=r"another model: Sequential has no such module \(unknown module '1\.0'"):
        apply(tiny(), plan_of(other), ["cpu"])


def test_op_of_the_plan_that_the_graph_lacks():
    model = tiny()
    plan = equality.plan_for(["0/linear", "1/relu", "2/linear_7"], [0, 0, 0])
    with pytest.raises(InputError, match=r"another model.*'2/linear_7'"):
        apply(model, plan, ["cpu"], example_inputs=EXAMPLE)
    assert "forward" not in vars(model)


def test_an_op_on_two_devices():
    plan = equality.plan_for(["0/linear", "0/linear", "1/relu"], [0, 1, 1])
    with pytest.raises(InputError, match="backward pass runs elsewhere"):
        apply(tiny(), plan, ["cpu", "cpu"])


def test_too_few_devices():
    model = tiny()
    with pytest.raises(InputError, match="uses 3 devices, 2 given"):
        apply(model, plan_of(model, (0, 2, 1)), ["cpu", "cpu"])


def test_devices_that_are_none():
    model = tiny()
    with pytest.raises(InputError, match="'gpu:0' is not a device"):
        apply(model, plan_of(model), ["gpu:0"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test needs to be missing")
def test_devices_that_this_machine_lacks():
    model = tiny()
    with pytest.raises(MissingError, match="'cuda:1' is not usable"):
        apply(model, plan_of(model), ["cuda:1"])


def test_weights_that_do_not_exist():
    model = tiny()
    plan = plan_of(model)
    with pytest.raises(InputError, match=r"'0\.weight' is on the meta device"):
        apply(model.to("meta"), plan, ["cpu"])
    with pytest.raises(InputError, match=r"'0\.weight' is not initialised yet"):
        apply(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)), plan, ["cpu"])


def test_placing_twice_and_attribute_in_the_way():
    model = tiny()
    plan = plan_of(model)
    apply(model, plan, ["cpu"], example_inputs=EXAMPLE)
    with pytest.raises(InputError, match="already runs a plan"):
        apply(model, plan, ["cpu"])
    other = tiny()
    other.report = "mine"
    with pytest.raises(InputError, match="attribute 'report'"):
        apply(other, plan, ["cpu"])


def test_arguments():
    model = tiny()
    plan = plan_of(model)
    with pytest.raises(InputError, match="does not describe the inputs of its model"):
        apply(model, plan, ["cpu"])
    with pytest.raises(InputError, match="example_inputs: expected a dict, a tuple or a tensor, found int"):
        apply(model, plan, ["cpu"], example_inputs=3)
    with pytest.raises(InputError, match="not a PlacementPlan"):
        apply(model, {"device_of_group": [0]}, ["cpu"])
    with pytest.raises(InputError, match=r"not a torch\.nn\.Module"):
        apply(torch.relu, plan, ["cpu"])


class Branches(nn.Module):
    """Export cannot follow this."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum().item() > 0 else self.b(x)


def test_a_forward_that_depends_on_values_is_refused():
    model, x = Branches(), torch.ones(2, 4)
    plan = equality.plan_for(["a/linear", "b/linear"], np.array([0, 1]))
    with pytest.raises(InputError, match=r"torch.export fails on Branches .*plan a strategy"):
        apply(model, plan, ["cpu", "cpu"], example_inputs=(x,))
    assert "forward" not in vars(model) and not hasattr(model, "report")


class Rows(nn.Module):
    """Its rows pass one by one, which an exported graph shows as a region that only runs as a whole."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.vmap(lambda row: self.a(row).tanh())(x))


def test_a_forward_with_vmap_is_refused():
    model, x = Rows(), torch.randn(2, 4)
    graph = rlplace.capture(model, (x,), loss=torch.sum)
    assert graph.capture["method"] == "dispatch"
    problem = rlplace.price(graph, "a100-80g:2")
    module_of = np.array([name.startswith("b") for name in problem.group_names], dtype=np.int32)
    with pytest.raises(InputError, match=r"torch\.vmap"):
        apply(model, make_plan(problem, module_of, planner="test"), ["cpu", "cpu"], example_inputs=(x,))


@pytest.mark.parametrize("devices", [None, 5, "cpu", torch.device("cpu")])
def test_devices_must_be_a_list(devices):
    model = tiny()
    with pytest.raises(InputError, match="devices must be a list"):
        apply(model, plan_of(model), devices)
