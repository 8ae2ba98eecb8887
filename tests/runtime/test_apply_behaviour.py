"""What a placed module keeps of the unplaced one besides its numbers; planned models run as planned."""

import copy
import inspect

import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.plan.device_map import device_of_op
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality, sim_device, small_models


def place(name, devices, seed=3, **changes):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name](**changes)
    reference = copy.deepcopy(model)
    plan = equality.random_plan(equality.op_names(model, inputs), len(devices), seed)
    return apply(model, plan, devices, example_inputs=inputs), reference, inputs, loss_of


@pytest.mark.parametrize("name", ["gpt2", "awkward"])
def test_smaller_last_batch_and_eval(sim, name):
    placed, reference, inputs, loss_of = place(name, sim(3))
    smaller = {key: value[:3] for key, value in inputs.items()}
    equality.assert_same_step(placed, reference, inputs, loss_of)
    equality.assert_same_step(placed, reference, smaller, loss_of)
    placed.eval()
    reference.eval()
    assert not any(module.training for module in placed.modules())
    with torch.no_grad():
        ours, theirs = placed(**smaller), reference(**smaller)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(equality.on_cpu(a), b, rtol=1e-4, atol=2e-6)
        assert not a.requires_grad
    equality.assert_same_state(placed, reference)
    placed.train()
    reference.train()
    equality.assert_same_step(placed, reference, inputs, loss_of)


def test_state_dict_round_trip(sim):
    placed, reference, inputs, loss_of = place("awkward", sim(3))
    assert list(placed.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in reference.named_parameters()]
    other = small_models.Awkward()
    placed.load_state_dict(other.state_dict())
    assert placed.head.weight is placed.embed.weight
    equality.assert_same_step(placed, other, inputs, loss_of)
    fresh = small_models.Awkward()
    fresh.load_state_dict({name: equality.on_cpu(value) for name, value in placed.state_dict().items()})
    equality.assert_same_state(placed, fresh)


def test_parameters_stay_the_same_objects_and_ties_stay(sim):
    torch.manual_seed(0)
    model, inputs, _ = small_models.gpt2()
    before = dict(model.named_parameters())
    plan = equality.random_plan(equality.op_names(model, inputs), 3, 5)
    placed = apply(model, plan, sim(3), example_inputs=inputs)
    assert placed.lm_head.weight is placed.transformer.wte.weight
    assert all(parameter is before[name] for name, parameter in placed.named_parameters())
    assert {p.device.type for p in placed.parameters()} == {"sim"}
    assert sum(placed.report.parameter_bytes) == sum(
        t.numel() * t.element_size() for t in [*placed.parameters(), *placed.buffers()]
    )


def test_dropout_trains(sim):
    placed, _, inputs, _ = place("gpt2", sim(2), dropout=0.2)
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = placed(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert placed(**inputs).loss.item() != placed(**inputs).loss.item()  # a new mask every time
    placed.eval()
    assert placed(**inputs).loss.item() == placed(**inputs).loss.item()


def test_output_has_the_model_s_own_type(sim):
    placed, reference, inputs, _ = place("bert", sim(2))
    ours, theirs = placed(**inputs), reference(**inputs)
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    assert ours.loss.device.type == "sim"
    assert list(inspect.signature(placed.forward).parameters) == list(inspect.signature(reference.forward).parameters)


def test_inputs_may_be_on_any_device_and_are_not_changed(sim):
    placed, reference, inputs, loss_of = place("llama", sim(2))
    there = {key: value.to("sim:1") for key, value in inputs.items()}
    a = loss_of(placed(**there)).item()
    assert a == pytest.approx(loss_of(reference(**inputs)).item(), abs=1e-6)
    assert all(torch.equal(equality.on_cpu(there[key]), inputs[key]) for key in inputs)


class Chain(nn.Module):
    """Two linears and a sum that reads the first one's result again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.third = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.second(y) + self.third(y) + y


def chain_plan(model, inputs, devices):
    names = equality.op_names(model, inputs)
    assert [name.partition("/")[0] for name in names] == ["first", "second", "third", "add", "add_1"]
    return equality.plan_for(names, devices)


def test_copies_are_made_once_per_tensor_and_device(sim):
    model, x = Chain(), torch.randn(4, 8)
    placed = apply(model, chain_plan(model, ((x,), {}), [0, 1, 1, 1, 1]), sim(2), example_inputs=(x,))
    sim_device.copies.clear()
    y = placed(x)
    # The input to device 0, then y once to device 1, where three ops read it.
    activation = 4 * 16 * 4
    expected = [sim_device.Copy("cpu", "sim:0", 4 * 8 * 4), sim_device.Copy("sim:0", "sim:1", activation)]
    assert sim_device.copies == expected
    assert placed.report.copies_per_forward == 2
    assert str(y.device) == "sim:1"
    y.sum().backward()
    assert sim_device.copies == [*expected, sim_device.Copy("sim:1", "sim:0", activation)]


@pytest.mark.parametrize("name", ["t5"])
def test_reported_copies_are_the_ones_made(sim, name):
    placed, _, inputs, loss_of = place(name, sim(3))
    sim_device.copies.clear()
    loss = loss_of(placed(**inputs))
    forward = len(sim_device.copies)
    # Inputs come from outside, once to each device that reads them.
    assert forward == placed.report.copies_per_forward
    loss.backward()
    assert len(sim_device.copies) > forward


class InPlaceChild(nn.Module):
    """The child changes its input, and the parent reads it again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.child = nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        y = self.first(x) * 1
        return self.child(y) + y


def test_write_to_an_input_from_another_device(sim):
    model, x = InPlaceChild(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    names = equality.op_names(model, {"x": x})
    devices = [int(name.startswith("child")) for name in names]
    placed = apply(model, equality.plan_for(names, devices), sim(2), example_inputs=(x,))
    equality.assert_same_step(placed, reference, {"x": x}, lambda y: y.sum())


class WritesToInput(nn.Module):
    """Changes what the caller gave; later ops on other devices must see the change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        before = x + 1
        x[:, 0] = 0
        return self.linear(x) + before * x


def test_a_written_user_input_is_seen_by_all_devices(sim):
    model, x = WritesToInput(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    names = equality.op_names(model, ((x,), {}))
    for seed in range(4):
        ours = copy.deepcopy(model)
        placed = apply(ours, equality.random_plan(names, 3, seed), sim(3), example_inputs=(x.clone(),))
        torch.testing.assert_close(equality.on_cpu(placed(x.clone())), reference(x.clone()).detach())


def test_a_placed_module_is_not_deep_copied(sim):
    placed, _, inputs, _ = place("dlrm", sim(2))
    with pytest.raises(InputError, match="copy it before apply"):
        copy.deepcopy(placed)
    batch = {"dense": inputs["batch"]["dense"][:2], "sparse": [ids[:2] for ids in inputs["batch"]["sparse"]]}
    assert placed(batch, 2.0)["score"].shape == (2, 1)  # another signature is still exported


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


def test_frozen_and_unused_parameters_are_placed(sim):
    placed, _, _, _ = place("awkward", sim(2))
    assert placed.unused.weight.device.type == "sim"
    assert placed.frozen.device.type == "sim"
    assert not placed.frozen.requires_grad


def test_gradients_and_hooks_on_parameters_survive_the_move(sim):
    model, x = Chain(), torch.randn(4, 8)
    model(x).sum().backward()
    before = model.first.weight.grad.clone()
    placed = apply(model, chain_plan(model, ((x,), {}), [1, 0, 0, 0, 0]), sim(2), example_inputs=(x,))
    assert str(placed.first.weight.grad.device) == "sim:1"
    torch.testing.assert_close(equality.on_cpu(placed.first.weight.grad), before)


@pytest.mark.parametrize(
    ("name", "planner"), [("gpt2", "round_robin"), ("t5", "metis"), ("lstm", "balanced"), ("dlrm", "random")]
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
    assert placed.report.ops == len(device_of_op(plan)) > 10
    assert (placed.report.loss_device is None) == own
    equality.train_both(placed, reference, inputs, loss_of, equality.adam, steps=2)


@pytest.mark.parametrize("method", ["dispatch", "module"])
def test_plans_of_other_capture_methods_are_refused(sim, method):
    torch.manual_seed(0)
    model, inputs, _ = small_models.bert()
    problem = rlplace.price(rlplace.capture(model, inputs, method=method), rlplace.Cluster.preset("a100-80g:4"), groups=20)
    with pytest.raises(InputError, match=r"not the one that was planned.*method='export'"):
        rlplace.apply(model, rlplace.place(problem, planner="round_robin"), sim(4), example_inputs=inputs)
    assert "forward" not in vars(model) and not hasattr(model, "report")
