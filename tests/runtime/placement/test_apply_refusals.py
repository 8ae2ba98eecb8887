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

EXAMPLE = (torch.ones(3, 4),)


def tiny():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def plan_of(model, devices=(0, 0, 0), **fields):
    return dataclasses.replace(equality.plan_for(equality.op_names(model, (EXAMPLE, {})), devices), **fields)


class Branches(nn.Module):
    """Export cannot follow this."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum().item() > 0 else self.b(x)


class Triple(torch.autograd.Function):
    """Doubles, with another gradient than that."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class OwnBackward(Branches):
    def forward(self, x):
        return self.b(Triple.apply(self.a(x))).sum()


def named(model, **attributes):
    vars(model).update(attributes)
    return model


PLAN, NESTED = plan_of(tiny()), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
LAZY = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
AB = ["a/linear", "b/linear"]
CASES = {
    "no groups": (tiny(), plan_of(tiny(), groups=None), "made from a problem file"),
    "no ops": (tiny(), plan_of(tiny(), groups=[{"name": "g"}] * 3), "its groups name no ops"),
    "fewer groups": (tiny(), plan_of(tiny(), groups=[{"name": "g", "modules": ["0"], "ops": []}]), "1 groups, but .* has 3"),
    "other modules": (tiny(), plan_of(NESTED), r"another model: Sequential has no such module \(unknown module '1\.0'"),
    "other ops": (tiny(), equality.plan_for(["0/linear", "1/relu", "2/linear_7"], [0] * 3), r"another model.*'2/linear_7'"),
    "an op twice": (tiny(), equality.plan_for(["0/linear"] * 2 + ["1/relu"], [0, 1, 1]), "backward pass runs elsewhere"),
    "meta": (tiny().to("meta"), PLAN, r"'0\.weight' is on the meta device"),
    "lazy": (LAZY, PLAN, r"'0\.weight' is not initialised yet"),
    "a report": (named(tiny(), report="mine"), PLAN, "attribute 'report'"),
    "a forward": (named(tiny(), forward=print), PLAN, "forward was replaced on the instance"),
    "no plan": (tiny(), {"device_of_group": [0]}, "not a PlacementPlan"),
    "no module": (torch.relu, PLAN, r"not a torch\.nn\.Module"),
    "values": (Branches(), equality.plan_for(AB, [0, 1]), r"torch.export fails on Branches .*plan a strategy"),
    "a backward": (OwnBackward(), equality.plan_for(AB, [0, 1]), r"Triple, whose own backward an exported graph would lose"),
}


@pytest.mark.parametrize("name", CASES)
def test_models_and_plans(name):
    model, plan, message = CASES[name]
    before = dict(vars(model)) if isinstance(model, nn.Module) else {}
    with pytest.raises(InputError, match=message):
        apply(model, plan, ["cpu", "cpu"], example_inputs=EXAMPLE)
    assert not before or vars(model).keys() == before.keys()


@pytest.mark.parametrize("method", ["dispatch", "module"])
def test_plans_of_other_capture_methods(method):
    model = tiny()
    problem = rlplace.price(rlplace.capture(model, EXAMPLE, loss=torch.sum, method=method), "a100-80g:2", groups=3)
    with pytest.raises(InputError, match=r"not the one that was planned.*method='export'"):
        apply(model, rlplace.place(problem, planner="round_robin"), ["cpu", "cpu"], example_inputs=EXAMPLE)
    assert "forward" not in vars(model) and not hasattr(model, "report")


def test_placing_twice():
    model = apply(tiny(), PLAN, ["cpu"], example_inputs=EXAMPLE)
    with pytest.raises(InputError, match="already runs a plan"):
        apply(model, PLAN, ["cpu"])


@pytest.mark.parametrize(("given", "message"), [(None, "does not describe the inputs"), (3, "expected a dict, .* found int")])
def test_example_inputs(given, message):
    with pytest.raises(InputError, match=message):
        apply(tiny(), PLAN, ["cpu"], example_inputs=given)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        *((devices, "devices must be a list") for devices in (None, 5, "cpu", torch.device("cpu"))),
        (["cpu", "cpu"], "uses 3 devices, 2 given"),
        (["gpu:0"] * 3, "'gpu:0' is not a device"),
    ],
)
def test_devices(devices, message):
    with pytest.raises(InputError, match=message):
        apply(tiny(), plan_of(tiny(), (0, 2, 1)), devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test needs to be missing")
def test_devices_that_this_machine_lacks():
    with pytest.raises(MissingError, match="'cuda:1' is not usable"):
        apply(tiny(), PLAN, ["cuda:1"])


class Rows(Branches):
    """Its rows pass one by one, which an exported graph shows as a region that only runs as a whole."""

    def forward(self, x):
        return self.b(torch.vmap(lambda row: self.a(row).tanh())(x))


def test_a_forward_with_vmap():
    model, x = Rows(), torch.randn(2, 4)
    graph = rlplace.capture(model, (x,), loss=torch.sum)
    assert graph.capture["method"] == "dispatch"
    problem = rlplace.price(graph, "a100-80g:2")
    module_of = np.array([name.startswith("b") for name in problem.group_names], dtype=np.int32)
    with pytest.raises(InputError, match=r"torch\.vmap"):
        apply(model, make_plan(problem, module_of, planner="test"), ["cpu", "cpu"], example_inputs=(x,))
