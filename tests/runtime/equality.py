"""Plans and models of tests, and comparisons of a placed module with the unplaced one."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rlplace.model.capture.export import export_training_graph
from rlplace.model.capture.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.runtime.placement.forward_graph import forward_graph
from tests.runtime import small_models


def op_names(model, inputs):
    """Captured forward ops of a model, in execution order."""
    mode = new_fake_mode()
    args, kwargs = inputs if isinstance(inputs, tuple) else ((), inputs)
    traced = export_training_graph(fake_copy(model, mode), fake_inputs(args, mode), fake_inputs(kwargs, mode))
    return list(traced.op_name_of_node.values())


def strategy_plan(strategy, **fields):
    """A plan of a whole strategy, which is given as it stands in files."""
    nothing = np.zeros(0, dtype=np.int32)
    return PlacementPlan("0" * 64, "strategy", 0, nothing, strategy=Strategy.from_dict(strategy), **fields)


def plan_for(names, device_of_op, **fields):
    """A plan with one group per op."""
    groups = [{"name": name, "modules": [name.rpartition("/")[0]], "ops": [name]} for name in names]
    fields = {"groups": groups, **fields}
    return PlacementPlan("0" * 64, "test", 0, np.asarray(device_of_op, dtype=np.int32), **fields)


def split_plan(names, forward, backward):
    """A plan with a group per op, and one for the backward of each."""
    groups, devices = [], []
    for op, a, b in zip(names, forward, backward, strict=True):
        groups += [{"name": op, "modules": [], "ops": [op]}, {"name": f"{op}.backward", "modules": [], "ops": []}]
        devices += [int(a), int(b)]
    return PlacementPlan("0" * 64, "test", 0, np.asarray(devices, dtype=np.int32), groups=groups)


def random_plan(names, devices, seed=0):
    """Every op anywhere."""
    return plan_for(names, np.random.default_rng(seed).integers(0, devices, len(names)))


def plan_of(model, inputs, devices, *, loss=None, target=None, groups=6, deal="random", seed=0, graph=None, **fields):
    """A plan of consecutive groups of ops.

    Args:
        model: Its graph is traced.
        inputs: Keyword inputs.
        devices: Devices of one replica.
        loss, target: As in `forward_graph`.
        groups: How many; None is one per op.
        deal: "random", "chain" (equal runs of groups, in order) or a list with the device of each group.
        seed: Of the random deal.
        graph: Traced before.
        fields: Of the plan.
    """
    graph = graph or forward_graph(model, (), inputs, loss=loss, target=target)
    ops = list(graph.op_of_node.values())
    count = len(ops) if groups is None else groups
    edges = [len(ops) * number // count for number in range(count + 1)]
    rows = [{"name": f"g{i}", "modules": [], "ops": ops[edges[i] : edges[i + 1]]} for i in range(count)]
    generator = random.Random(seed)
    if deal == "random":
        dealt = [generator.randrange(devices) for _ in range(count)]
    elif deal == "chain":
        dealt = [number * devices // count for number in range(count)]
    else:
        dealt = list(deal)
    return PlacementPlan("0" * 64, "test", 0, np.array(dealt, dtype=np.int32), groups=rows, **fields)


SINGLE_PRECISION = {"mixtral"}
"""Its products of groups of experts have no kernel in double precision."""


def build(name, double=True, **options):
    """A small model, its inputs, and its loss function (None where the output has the loss)."""
    torch.manual_seed(0)
    model, inputs, loss = small_models.MODELS[name](**options)
    if double and name not in SINGLE_PRECISION:
        model = model.double()
        inputs = pytree.tree_map(
            lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, inputs
        )
    return model, inputs, None if loss is small_models._own_loss else loss


def loss_of(output, loss):
    """The loss of an output, which has it or makes it."""
    return output.loss if loss is None else loss(output)


def largest_difference(found, expected, least=1.0):
    """Of two tensors or None, in units of the larger of `least` and the largest value expected."""
    if found is None or expected is None:
        other = found if expected is None else expected
        return 0.0 if other is None else float(other.abs().max())
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=least)) if expected.numel() else 0.0


def on_cpu(tensor):
    return tensor.detach().to("cpu")


def assert_same_step(placed, reference, inputs, loss_of, tolerance=2e-6):
    """One forward and backward pass: outputs, loss, buffers and every gradient."""
    ours, theirs = placed(**inputs), reference(**inputs)
    our_leaves, our_spec = pytree.tree_flatten(ours)
    their_leaves, their_spec = pytree.tree_flatten(theirs)
    assert our_spec == their_spec
    for a, b in zip(our_leaves, their_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(on_cpu(a), b, rtol=1e-4, atol=tolerance)
        else:
            assert a == b
    our_loss, their_loss = loss_of(ours), loss_of(theirs)
    torch.testing.assert_close(on_cpu(our_loss), their_loss.detach(), rtol=1e-5, atol=tolerance)
    our_loss.backward()
    their_loss.backward()
    assert_same_gradients(placed, reference, tolerance)
    assert_same_state(placed, reference, tolerance)


def assert_same_gradients(placed, reference, tolerance):
    gradients = 0
    for (name, a), (other, b) in zip(placed.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            gradients += 1
            assert a.grad.device == a.device
            torch.testing.assert_close(
                on_cpu(a.grad), b.grad, rtol=1e-4, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert gradients > 0


def assert_same_state(placed, reference, tolerance=2e-6):
    ours, theirs = placed.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    for name in theirs:
        torch.testing.assert_close(
            on_cpu(ours[name]), theirs[name], rtol=1e-4, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
        )


def train_both(placed, reference, inputs, loss_of, make_optimizer, steps=3):
    """Trains both on the same batch and compares after every step."""
    ours, theirs = make_optimizer(placed.parameters()), make_optimizer(reference.parameters())
    for _ in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        assert_same_step(placed, reference, inputs, loss_of)
        ours.step()
        theirs.step()
        assert_same_state(placed, reference, 5e-6)


def adam(parameters):
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-4)
