"""Applied plans: outputs, loss, gradients and optimizer steps are the unplaced model's, and so is the rest of the module."""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.model.capture.caches import turn_off_caches
from rlplace.plan import PlacementPlan
from rlplace.plan.device_map import device_of_op
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality, sim_device, small_models
from tests.runtime.sim_device import Copy

QUICK = ("gpt2", "t5", "resnet", "lstm", "awkward")


def place(name, devices, *, backward=False, seed=3, double=False):
    """A placed model, the plain one, inputs and the loss; every op anywhere, with `backward` that of each elsewhere."""
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    if double:
        model = model.double()
        inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    reference, names = copy.deepcopy(model), equality.op_names(model, inputs)
    turn_off_caches(reference)  # placed models run without
    places = np.random.default_rng(seed).integers(0, len(devices), (2, len(names)))
    plan = equality.split_plan(names, *places) if backward else equality.plan_for(names, places[0])
    placed = apply(model, plan, devices, example_inputs=inputs)
    assert placed is model
    return placed, reference, inputs, loss_of


def assert_same_outputs(placed, reference, inputs):
    with torch.no_grad():
        ours, theirs = (torch.utils._pytree.tree_leaves(m(**inputs)) for m in (placed, reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(equality.on_cpu(a), b, rtol=1e-4, atol=2e-6)
        assert not a.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in small_models.MODELS])
def test_random_devices_train_like_the_plain_model(sim, name):
    placed, reference, inputs, loss_of = place(name, sim(4), backward=True, seed=1)
    sim_device.copies.clear()
    placed(**inputs), reference(**inputs)
    # Inputs come from outside, once to each device that reads them.
    assert len(sim_device.copies) == placed.report.copies_per_forward
    equality.train_both(placed, reference, inputs, loss_of, equality.adam, steps=2)
    assert len({one.source for one in sim_device.copies if one.source != "cpu"}) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "awkward"])
def test_smaller_last_batch_and_eval(sim, name):
    placed, reference, inputs, loss_of = place(name, sim(3))
    smaller = {key: value[:3] for key, value in inputs.items()}
    equality.assert_same_step(placed, reference, inputs, loss_of)
    equality.assert_same_step(placed, reference, smaller, loss_of)
    placed.eval(), reference.eval()
    assert not any(module.training for module in placed.modules())
    assert_same_outputs(placed, reference, smaller)
    equality.assert_same_state(placed, reference)
    placed.train(), reference.train()
    equality.assert_same_step(placed, reference, inputs, loss_of)


def test_parameters_and_state_dict_are_those_of_the_model(sim):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.awkward()
    before = dict(model.named_parameters())
    names = equality.op_names(model, inputs)
    placed = apply(model, equality.random_plan(names, 3, 3), sim(3), example_inputs=inputs)
    assert [name for name, _ in placed.named_parameters()] == list(before)
    assert all(parameter is before[name] for name, parameter in placed.named_parameters())
    assert {p.device.type for p in placed.parameters()} == {"sim"}  # those without a reader, too
    assert not placed.frozen.requires_grad
    assert sum(placed.report.parameter_bytes) == sum(t.nbytes for t in [*placed.parameters(), *placed.buffers()])
    other, fresh = small_models.Awkward(), small_models.Awkward()
    placed.load_state_dict(other.state_dict())
    assert placed.head.weight is placed.embed.weight
    equality.assert_same_step(placed, other, inputs, loss_of)
    fresh.load_state_dict({name: equality.on_cpu(value) for name, value in placed.state_dict().items()})
    equality.assert_same_state(placed, fresh)


def test_calls_are_those_of_the_model(sim):
    """Output type, signature, and inputs of any device, which are not changed."""
    placed, reference, inputs, loss_of = place("bert", sim(2))
    there = {key: value.to("sim:1") for key, value in inputs.items()}
    ours, theirs = placed(**there), reference(**inputs)
    assert type(ours) is type(theirs) and list(ours) == list(theirs)
    assert ours.loss.device.type == "sim"
    assert loss_of(ours).item() == pytest.approx(loss_of(theirs).item(), abs=1e-6)
    assert list(inspect.signature(placed.forward).parameters) == list(inspect.signature(reference.forward).parameters)
    assert all(torch.equal(equality.on_cpu(there[key]), inputs[key]) for key in inputs)


@pytest.mark.slow
def test_a_placed_module_is_not_deep_copied(sim):
    placed, _, inputs, _ = place("dlrm", sim(2))
    with pytest.raises(InputError, match="copy it before apply"):
        copy.deepcopy(placed)
    batch = {"dense": inputs["batch"]["dense"][:2], "sparse": [ids[:2] for ids in inputs["batch"]["sparse"]]}
    assert placed(batch, 2.0)["score"].shape == (2, 1)  # another signature is still exported


@pytest.mark.slow
def test_autocast_is_that_of_the_call(sim):
    placed, reference, inputs, loss_of = place("bert", sim(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = placed(**inputs), reference(**inputs)
    assert ours.logits.dtype == theirs.logits.dtype == torch.bfloat16
    torch.testing.assert_close(equality.on_cpu(ours.loss), theirs.loss.detach(), rtol=1e-2, atol=1e-2)
    loss_of(ours).backward(), loss_of(theirs).backward()
    for (name, found), expected in zip(placed.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            accepted = 0.1 * float(expected.grad.abs().max()) + 1e-4
            torch.testing.assert_close(equality.on_cpu(found.grad), expected.grad, rtol=0.1, atol=accepted, msg=name)
    placed.zero_grad(), reference.zero_grad()
    equality.assert_same_step(placed, reference, inputs, loss_of)


@pytest.mark.slow
def test_other_outputs_may_get_the_gradient(sim):
    """What backward needs is known in backward only: the forward runs again, with the same random numbers."""
    placed, reference, inputs, loss_of = place("gpt2", sim(2), backward=True, double=True)
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
    placed.eval()
    torch.testing.assert_close(equality.on_cpu(placed(x)), equality.on_cpu(placed(x)), rtol=0, atol=0)


def chain(devices, forward=(0, 0, 0), backward=(1, 1, 1), change=lambda model, x: None):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(), torch.randn(3, 4, dtype=torch.float64)
    reference, names = copy.deepcopy(model), equality.op_names(model, ((x,), {}))
    change(model, x)
    return apply(model, equality.split_plan(names, forward, backward), devices, example_inputs=(x,)), reference, x


def test_weights_are_where_their_backward_runs_and_travel_once(sim):
    placed, reference, x = chain(sim(2))
    assert {str(parameter.device) for parameter in placed.parameters()} == {"sim:1"}
    x = x.to("sim:0")
    sim_device.copies.clear()
    loss = placed(x).sum()
    assert str(loss.device) == "sim:0"
    # Four parameters come to the forward; backward needs the input and the output of the ReLU.
    there = [one.size_bytes for one in sim_device.copies if one.source == "sim:1"]
    assert sorted(there) == sorted(p.numel() * 8 for p in reference.parameters())
    assert sum(one.destination == "sim:1" for one in sim_device.copies) == 2
    sim_device.copies.clear()
    loss.backward()
    assert [one.destination for one in sim_device.copies] == ["sim:1"]  # the gradient of the output


def test_gradients_of_inputs_frozen_weights_and_accumulation(sim):
    placed, reference, x = chain(sim(2), backward=(1, 0, 1))
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


def test_gradients_survive_the_move(sim):
    placed, reference, x = chain(sim(2), (1, 0, 0), (1, 0, 0), lambda model, x: model(x).sum().backward())
    reference(x).sum().backward()
    assert str(placed[0].weight.grad.device) == "sim:1"
    equality.assert_same_gradients(placed, reference, 0)


class Read(nn.Module):
    """Three linears and sums that read the first one's result again."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.first(x)
        return self.second(y) + self.third(y) + y


def test_copies_are_made_once_per_tensor_and_device(sim):
    model, x = Read(), torch.randn(4, 8)
    names = equality.op_names(model, ((x,), {}))
    assert [name.partition("/")[0] for name in names] == ["first", "second", "third", "add", "add_1"]
    placed = apply(model, equality.plan_for(names, [0, 1, 1, 1, 1]), sim(2), example_inputs=(x,))
    sim_device.copies.clear()
    y = placed(x)
    # The input to device 0, then y once to device 1, where three ops read it.
    activation = 4 * 16 * 4
    expected = [Copy("cpu", "sim:0", 4 * 8 * 4), Copy("sim:0", "sim:1", activation)]
    assert sim_device.copies == expected and str(y.device) == "sim:1"
    y.sum().backward()
    assert sim_device.copies == [*expected, Copy("sim:1", "sim:0", activation)]


class InPlaceChild(nn.Module):
    """The child changes its input, and the parent reads it again; the caller's input is changed, too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.child = nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        before = x + 1
        x[:, 0] = 0
        y = self.first(x) * before
        return self.child(y) + y


@pytest.mark.parametrize("seed", range(3))
def test_writes_are_seen_by_all_devices(sim, seed):
    model, x = InPlaceChild(), torch.randn(3, 4)
    reference, names = copy.deepcopy(model), equality.op_names(model, {"x": x})
    placed = apply(model, equality.random_plan(names, 3, seed), sim(3), example_inputs=(x.clone(),))
    ours, theirs = placed(x.clone()).sum(), reference(x.clone()).sum()
    torch.testing.assert_close(equality.on_cpu(ours), theirs.detach())
    ours.backward(), theirs.backward()
    equality.assert_same_gradients(placed, reference, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "planner"), [("gpt2", "round_robin"), ("lstm", "balanced")])
def test_planned_model_runs_as_planned(sim, name, planner):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    reference = copy.deepcopy(model)
    turn_off_caches(reference)
    own = loss_of is small_models._own_loss
    graph = rlplace.capture(model, inputs, loss=None if own else loss_of)
    problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:4"), groups=40)
    plan = rlplace.place(problem, planner=planner, seed=0)
    placed = rlplace.apply(model, plan, sim(4), example_inputs=inputs)
    assert placed.report.ops == len(device_of_op(plan)) > 10
    assert (placed.report.loss_device is None) == own
    equality.assert_same_step(placed, reference, inputs, loss_of)


def test_a_bipartition_plan_runs(sim):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    graph = rlplace.capture(model, (x,), loss=torch.sum)
    problem = rlplace.split_backward(rlplace.price(graph, "l4:2"))
    plan = rlplace.place(problem, planner="bipartition", seed=0)
    apart = np.array(plan.device_of_group)
    apart[[name.endswith(".backward") for name in problem.group_names]] ^= 1  # the planner may have found no reason to
    for devices in (plan.device_of_group, apart):
        moved = PlacementPlan(plan.problem, "test", 0, devices, groups=plan.groups, source=plan.source)
        placed = apply(copy.deepcopy(model), moved, sim(2), example_inputs=(x,))
        equality.assert_same_step(placed, copy.deepcopy(model), {"input": x}, torch.sum)
