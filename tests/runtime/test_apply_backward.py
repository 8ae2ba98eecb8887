"""Plans whose backward runs elsewhere, and copies on streams of their own."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.plan import PlacementPlan
from rlplace.runtime.placement import wire
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality, sim_device, small_models


def build(name, devices, sim, seed=0, double=True):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    if double:
        model = model.double()
        inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    reference = copy.deepcopy(model)
    names = equality.op_names(model, inputs)
    places = np.random.default_rng(seed).integers(0, devices, (2, len(names)))
    placed = apply(model, equality.split_plan(names, *places), sim(devices), example_inputs=inputs)
    return placed, reference, inputs, loss_of


@pytest.mark.parametrize("name", ["gpt2", "awkward", *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet", "lstm"))])
def test_random_devices_train_like_the_plain_model(sim, name):
    placed, reference, inputs, loss_of = build(name, 3, sim)
    equality.train_both(placed, reference, inputs, loss_of, equality.adam)
    placed.eval(), reference.eval()
    with torch.no_grad():
        ours, theirs = (torch.utils._pytree.tree_leaves(m(**inputs)) for m in (placed, reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(equality.on_cpu(a), b)


def chain(devices=("sim:0", "sim:1"), backward=(1, 1, 1)):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(), torch.randn(3, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    names = equality.op_names(model, ((x,), {}))
    return apply(model, equality.split_plan(names, [0, 0, 0], backward), devices, example_inputs=(x,)), reference, x


def test_weights_are_where_their_backward_runs_and_travel_once(sim):
    sim(2)
    placed, reference, x = chain()
    assert {str(parameter.device) for parameter in placed.parameters()} == {"sim:1"}
    x = x.to("sim:0")
    sim_device.copies.clear()
    loss = placed(x).sum()
    assert str(loss.device) == "sim:0"
    # Four parameters come to the forward; backward needs the input and the output of the ReLU.
    there = [copy.size_bytes for copy in sim_device.copies if copy.source == "sim:1"]
    assert sorted(there) == sorted(p.numel() * 8 for p in reference.parameters())
    assert sum(copy.destination == "sim:1" for copy in sim_device.copies) == 2
    sim_device.copies.clear()
    loss.backward()
    assert [copy.destination for copy in sim_device.copies] == ["sim:1"]  # the gradient of the output


def test_other_outputs_may_get_the_gradient(sim):
    """What backward needs is known in backward only: the forward runs again, with the same random numbers."""
    placed, reference, inputs, loss_of = build("gpt2", 2, sim)
    for _ in range(2):
        for model in (placed, reference):
            model.zero_grad()
            model(**inputs).logits.square().mean().backward()
        equality.assert_same_gradients(placed, reference, 1e-9)
    equality.assert_same_step(placed, reference, inputs, loss_of)


def test_dropout_is_the_same_in_forward_and_backward(sim):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.first(x))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    names = equality.op_names(model, ((x,), {}))
    placed = apply(model, equality.split_plan(names, [0, 1], [1, 0]), sim(2), example_inputs=(x,))
    torch.manual_seed(1)
    first = placed(x)
    first.sum().backward()
    kept = (equality.on_cpu(first) != 0).double()
    assert 0 < kept.mean() < 1
    torch.testing.assert_close(equality.on_cpu(placed.first.bias.grad).double(), 2 * kept.sum(0))
    torch.manual_seed(1)
    torch.testing.assert_close(equality.on_cpu(placed(x)), equality.on_cpu(first))
    assert not torch.equal(equality.on_cpu(placed(x)), equality.on_cpu(first))


def test_gradients_of_inputs_frozen_weights_and_accumulation(sim):
    sim(2)
    placed, reference, x = chain(backward=(1, 0, 1))
    for model in (placed, reference):
        model[0].weight.requires_grad_(False)
    inputs = [x.clone().to(device).requires_grad_() for device in ("sim:1", "cpu")]
    for model, given in zip((placed, reference), inputs, strict=True):
        for _ in range(2):
            model(given).square().sum().backward()
    assert placed[0].weight.grad is None
    equality.assert_same_gradients(placed, reference, 1e-9)
    torch.testing.assert_close(equality.on_cpu(inputs[0].grad), inputs[1].grad)
    assert str(inputs[0].grad.device) == "sim:1"


def test_a_bipartition_plan_runs(sim):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS["bert"]()
    reference = copy.deepcopy(model)
    problem = rlplace.split_backward(rlplace.price(rlplace.capture(model, inputs), "l4:2"))
    plan = rlplace.place(problem, planner="bipartition", seed=0)
    apart = np.array(plan.device_of_group)
    apart[[name.endswith(".backward") for name in problem.group_names]] ^= 1  # the planner may have found no reason to
    for devices in (plan.device_of_group, apart):
        placed = apply(
            copy.deepcopy(reference), PlacementPlan(plan.problem, "test", 0, devices, groups=plan.groups, source=plan.source),
            sim(2), example_inputs=inputs,
        )  # fmt: skip
        equality.assert_same_step(placed, copy.deepcopy(reference), inputs, loss_of)


LOG = []


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        LOG.append(f"{self.name} waits for {event}")

    def record_event(self):
        LOG.append(f"event on {self.name}")
        return f"event of {self.name}"


class Tensor:
    def __init__(self, device):
        self.device = torch.device(device)

    def to(self, device, non_blocking=False):
        LOG.append(f"copy to {device}, {'' if non_blocking else 'not '}async, under {' and '.join(sorted(CURRENT))}")
        return Tensor(device)

    def record_stream(self, stream):
        LOG.append(f"memory on {self.device} is used by {stream.name}")


CURRENT = []


@pytest.fixture
def cuda(monkeypatch):
    LOG.clear()

    @contextlib.contextmanager
    def stream(s):
        CURRENT.append(s.name)
        yield
        CURRENT.pop()

    made = {}

    def side_stream(source, destination):
        return made.setdefault((source, destination), (Stream(f"side of {source}"), Stream(f"side of {destination}")))

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"compute of {device}"))
    monkeypatch.setattr(wire, "side_stream", side_stream)


def test_a_copy_holds_up_neither_device_until_it_is_read(cuda):
    moving = wire.start_copy(Tensor("cuda:0"), torch.device("cuda:1"))
    assert LOG == [
        "side of cuda:0 waits for compute of cuda:0",
        "copy to cuda:1, async, under side of cuda:0 and side of cuda:1",
        "event on side of cuda:1",
        "memory on cuda:0 is used by side of cuda:0",
    ]
    LOG.clear()
    assert wire.finish(moving).device == torch.device("cuda:1")
    assert LOG == ["compute of cuda:1 waits for event of side of cuda:1", "memory on cuda:1 is used by compute of cuda:1"]


@pytest.mark.parametrize(
    ("source", "destination"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0"), ("sim:0", "sim:1")]
)
def test_other_copies_are_plain(cuda, sim, source, destination):
    tensor = Tensor(source)
    moved = wire.finish(wire.start_copy(tensor, torch.device(destination)))
    assert moved.device == torch.device(destination)
    assert LOG == [f"copy to {destination}, not async, under "]


def test_copies_start_where_their_values_are_made(sim):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            first = self.body[1](self.body[0](x))
            return self.body[3](self.body[2](first)) + first

    net = Skip()
    names = equality.op_names(net, ((x,), {}))
    places = {"body.0/linear": 0, "body.1/relu": 0, "body.2/linear_1": 0, "body.3/linear_2": 0, "/add": 1, "add": 1}
    apply(net, equality.plan_for(names, [places[name] for name in names]), sim(2), example_inputs=(x,))
    (parts,) = net.forward._parts.values()
    nodes = list(parts.forward.module.graph.nodes)
    relu, last = (next(n for n in nodes if n.target is op) for op in (torch.ops.aten.relu.default, torch.ops.aten.add.Tensor))
    starts = [node for node in nodes if node.target is wire.start_copy and node.args[0] is relu]
    assert len(starts) == 1
    finish = next(iter(starts[0].users))
    assert finish.target is wire.finish
    products = [number for number, node in enumerate(nodes) if node.target is torch.ops.aten.addmm.default]
    assert nodes.index(relu) + 1 == nodes.index(starts[0]) < products[1] < products[2] < nodes.index(finish) < nodes.index(last)
