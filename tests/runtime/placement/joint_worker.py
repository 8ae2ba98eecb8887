"""What the processes of the joint-graph tests run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from rlplace.model.capture.fake import meta_copy, tensors_in
from rlplace.runtime.base.ranks import ranks_of
from rlplace.runtime.placement.forward_graph import flat_inputs, forward_graph, random_key, seeded
from rlplace.runtime.placement.placed_model import Engine, build_joint
from rlplace.runtime.state.whole import own_tree
from tests.runtime.equality import build as make_model
from tests.runtime.equality import largest_difference, loss_of, split_plan


def plan_of(graph, forward, backward):
    """A plan with a group per op, its backward in a group of its own."""
    return split_plan(graph.op_of_node.values(), forward, backward)


def random_places(graph, world, seed):
    drawn = np.random.default_rng(seed).integers(0, world, (2, len(graph.op_of_node)))
    return drawn[0], drawn[1]


def build(name, world, *, seed=0, train=True, double=False, given=None):
    """A model traced and put on the devices of a plan."""
    model, inputs, loss = make_model(name, double, **(given or {}))
    model.train(train)
    graph = forward_graph(meta_copy(model), (), inputs, loss=loss)
    plan = plan_of(graph, *random_places(graph, world, seed))
    placement = build_joint(graph, plan, torch.device("cpu"))
    leaves = flat_inputs((), inputs)
    return SimpleNamespace(
        model=model, inputs=inputs, loss=loss, leaves=leaves, graph=graph, plan=plan, joint=placement.joint, placement=placement
    )


class Running:
    """A model with the joint-graph engine of this process, and what the plain one needs: `double`, its mode and its options."""

    def __init__(self, name, world, *, double=False, train=True, given=None, **options):
        self.name, self.double, self.mode, self.given = name, double, train, given or {}
        self.built = build(name, world, double=double, train=train, given=given, **options)
        self.ranks = ranks_of(self.built.plan, torch.device("cpu"))
        placement, model = self.built.placement, self.built.model
        owners = {name: placement.owners.get(name, (0,)) for name in tensors_in(model)}
        self.own = own_tree(model, owners, self.ranks.rank, self.ranks.device)
        self.engine = Engine(placement, self.ranks, tensors_in(self.own))

    def reference(self):
        """The plain model as it was built, and its inputs."""
        model, inputs, _ = make_model(self.name, self.double, **self.given)
        return model.train(self.mode), inputs


def plain_loss(running, model, step):
    """The loss without a plan; random ops draw from the same streams as in every engine."""
    graph = running.built.graph
    if not graph.module.graph.find_nodes(op="call_function", target=seeded):
        return loss_of(model(**running.built.inputs), running.built.loss)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    with random_key(7, step):
        flat = graph.module(*(held[name] for name in graph.held), *running.built.leaves)
    return flat[graph.loss]


def optimizer_of(kind, parameters):
    parameters = list(parameters)
    if not parameters:
        return None
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    return (
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters, 1e-3, eps=1e-4)
    )


def train_and_compare(running, optimizer, steps=3):
    """Trains with and without a plan, and compares losses, gradients, parameters and buffers."""
    model, _ = running.reference()
    own = running.own
    ours, theirs = optimizer_of(optimizer, own.parameters()), optimizer_of(optimizer, model.parameters())
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    worst = (0.0, "")
    for step in range(steps):
        theirs.zero_grad()
        loss = plain_loss(running, model, step)
        loss.backward()
        if ours is not None:
            ours.zero_grad()
        found = running.engine.train(running.built.leaves, (7, step))
        worst = max(worst, (relative(found, loss.detach()), f"loss {step}"))
        for name, parameter in own.named_parameters():
            assert (parameter.grad is None) == (parameters[name].grad is None), (step, name)
            if parameter.grad is not None:
                worst = max(worst, (relative(parameter.grad, parameters[name].grad), f"gradient {step} {name}"))
        theirs.step()
        if ours is not None:
            ours.step()
        for name, parameter in own.named_parameters():
            worst = max(worst, (relative(parameter, parameters[name]), f"parameter {step} {name}"))
        for name, buffer in own.named_buffers():
            if name in buffers:
                worst = max(worst, (relative(buffer, buffers[name]), f"buffer {step} {name}"))
    # In single precision sums in another order differ by some units in the last place, by how many depends on the processor.
    assert worst[0] < (1e-6 if running.double else 4e-6), (running.name, *worst)


def relative(found, expected):
    """What is zero but for rounding is compared by 1e-3."""
    return largest_difference(found.double(), expected.double(), 1e-3)
