"""Plans, models and devices that apply cannot run are refused with the reason, and the model stays as it was."""

import dataclasses

import equality
import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import make_plan
from rlplace.runtime.apply import apply


def tiny():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def plan_of(model, devices=(0, 0, 0), **fields):
    names = equality.op_names(model, ((torch.randn(3, 4),), {}))
    return dataclasses.replace(equality.plan_for(names, devices), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 4}, "4 micro-batches"),
        ({"schedule": "1f1b"}, "schedule is '1f1b'"),
        ({"replicas": [[0], [1]]}, "2 replicas"),
        ({"recompute": [[0], [2]]}, "recomputes the activations of 2 segments, which apply does not"),
        ({"groups": None}, "made from a problem file"),
        ({"groups": [{"name": "g"}] * 3}, "none of its groups names a module"),
        ({"groups": [{"name": "g", "modules": ["0"], "ops": []}]}, "1 groups, but device_of_group has 3"),
    ],
)
def test_plans_that_do_not_run_in_one_process(fields, message):
    model = tiny()
    with pytest.raises(InputError, match=message):
        apply(model, plan_of(model, **fields), ["cpu"])
    assert "forward" not in vars(model)
    assert not hasattr(model, "report")


def test_one_replica_in_another_order_is_fine():
    model = tiny()
    assert apply(model, plan_of(model, replicas=[[1, 0]]), ["cpu"]).report.level == "module"


def test_plan_for_another_model():
    other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(InputError, match=r"another model: Sequential has no such module \(unknown module '1\.0'"):
        apply(tiny(), plan_of(other), ["cpu"])


def test_op_of_the_plan_that_the_graph_lacks():
    model, x = tiny(), torch.randn(3, 4)
    names = ["0/linear", "1/relu", "2/linear_7"]
    plan = equality.plan_for(names, [0, 0, 0])
    with pytest.raises(InputError, match=r"cannot run at op level.*'2/linear_7'"):
        apply(model, plan, ["cpu"], example_inputs=(x,), level="op")
    placed = apply(model, plan, ["cpu"], example_inputs=(x,))
    assert placed.report.level == "module"
    assert "'2/linear_7'" in placed.report.why_not_op


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
    with pytest.raises(InputError, match="must be a list"):
        apply(model, plan_of(model), "cpu")


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
    apply(model, plan, ["cpu"])
    with pytest.raises(InputError, match="already runs a plan"):
        apply(model, plan, ["cpu"])
    other = tiny()
    other.report = "mine"
    with pytest.raises(InputError, match="attribute 'report'"):
        apply(other, plan, ["cpu"])


def test_arguments():
    model = tiny()
    plan = plan_of(model)
    with pytest.raises(InputError, match="must be 'op', 'module' or None"):
        apply(model, plan, ["cpu"], level="ops")
    with pytest.raises(InputError, match="no example_inputs"):
        apply(model, plan, ["cpu"], level="op")
    with pytest.raises(InputError, match="example_inputs is a int"):
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


def test_a_forward_that_depends_on_values_runs_at_module_level(sim):
    model, x = Branches(), torch.ones(2, 4)
    expected = model(x).detach(), model(-x).detach()
    plan = equality.plan_for(["a/linear", "b/linear"], np.array([0, 1]))
    placed = apply(model, plan, sim(2), example_inputs=(x,))
    assert placed.report.level == "module"
    assert "torch.export fails" in placed.report.why_not_op
    torch.testing.assert_close(equality.on_cpu(placed(x)), expected[0])
    torch.testing.assert_close(equality.on_cpu(placed(-x)), expected[1])


class Rows(nn.Module):
    """Its rows pass one by one, which an exported graph shows as a region that only runs as a whole."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.vmap(lambda row: self.a(row).tanh())(x))


def test_a_forward_with_vmap_runs_at_module_level(sim):
    model, x = Rows(), torch.randn(2, 4)
    expected = model(x).detach()
    graph = rlplace.capture(model, (x,), loss=torch.sum)
    assert graph.capture["method"] == "dispatch"
    problem = rlplace.price(graph, "a100-80g:2")
    module_of = np.array([name.startswith("b") for name in problem.group_names], dtype=np.int32)
    placed = apply(model, make_plan(problem, module_of, planner="test"), sim(2), example_inputs=(x,))
    assert placed.report.level == "module" and "torch.vmap" in placed.report.why_not_op
    torch.testing.assert_close(equality.on_cpu(placed(x)), expected)


def test_a_backward_that_runs_elsewhere_takes_the_op_level():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    example = torch.zeros(2, 4)
    problem = rlplace.split_backward(rlplace.price(rlplace.capture(net, example, loss=torch.sum), "l4:2", groups=3))
    apart = make_plan(problem, [int(name.endswith(".backward")) for name in problem.group_names], planner="mine")
    before = set(vars(net))
    for options, reason in [({}, "no example_inputs"), ({"example_inputs": (example,), "level": "module"}, "was asked for")]:
        with pytest.raises(InputError, match=f"runs elsewhere than its forward, which takes the op level, but .*{reason}"):
            rlplace.apply(net, apart, ["cpu", "cpu"], **options)
    assert set(vars(net)) == before
    together = make_plan(problem, [1] * problem.num_groups, planner="mine")
    assert rlplace.apply(net, together, ["cpu", "cpu"], example_inputs=(example,)).report.level == "op"


@pytest.mark.parametrize("devices", [None, 5, "cpu", torch.device("cpu")])
def test_devices_must_be_a_list(devices):
    net = nn.Linear(4, 4)
    problem = rlplace.price(rlplace.capture(net, torch.zeros(2, 4), loss=torch.sum), "l4:2")
    with pytest.raises(InputError, match="devices must be a list"):
        rlplace.apply(net, make_plan(problem, [0] * problem.num_groups, planner="mine"), devices)
