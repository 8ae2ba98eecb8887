"""What the processes of the joint-graph tests run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import small_models
import torch
from torch.utils import _pytree as pytree

from rlplace.plan import PlacementPlan
from rlplace.runtime.distributed.batches import split_batch
from rlplace.runtime.distributed.forward_graph import forward_graph
from rlplace.runtime.distributed.joint.assign import joint_places
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.ranks import ranks_of
from rlplace.runtime.distributed.tensors import meta_copy, own_tensors

def plan_of(graph, forward, backward, **fields):
    """A plan with a group per op, its backward in a group of its own."""
    groups, devices = [], []
    for op, a, b in zip(graph.op_of_node.values(), forward, backward, strict=True):
        groups += [{"name": op, "modules": [], "ops": [op]}, {"name": f"{op}.backward", "modules": [], "ops": []}]
        devices += [int(a), int(b)]
    return PlacementPlan("0" * 64, "test", 0, np.asarray(devices, dtype=np.int32), groups=groups, **fields)


def random_places(graph, world, seed):
    drawn = np.random.default_rng(seed).integers(0, world, (2, len(graph.op_of_node)))
    return drawn[0], drawn[1]


def make_model(name, dropout=0.0):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]() if not dropout else small_models.MODELS[name](dropout)
    return model, inputs, None if loss_of is small_models._own_loss else loss_of


def keywords(inputs, leaves):
    """The keyword inputs of one micro-batch."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_structure(((), inputs)))[1]


class Setup:
    """A model whose engine runs on this process."""

    def __init__(self, name, world, *, microbatches=1, seed=0, dropout=0.0, train=True, plan=None, replicas=None):
        self.name, self.dropout = name, dropout
        self.model, self.inputs, self.loss = make_model(name, dropout)
        self.model.train(train)
        self.split = split_batch((((), self.inputs),), len(replicas or [0]), microbatches)
        leaves = self.split.parts[0].leaves
        meta = meta_copy(self.model)
        kwargs = keywords(self.inputs, leaves)
        self.graph = forward_graph(meta, (), kwargs, loss=self.loss)
        if plan is None:
            used = world if replicas is None else len(replicas[0])
            plan = plan_of(self.graph, *random_places(self.graph, used, seed), microbatches=microbatches, replicas=replicas)
        self.plan = plan
        self.ranks = ranks_of(self.plan, torch.device("cpu"))
        held = {**dict(meta.named_parameters()), **dict(meta.named_buffers()), **self.graph.constants}
        self.joint = joint_graph(self.graph, held, leaves)
        self.places = joint_places(self.graph, self.joint, self.plan)
        self.own = own_tensors(self.model, self.places.owners, self.graph.constants, self.ranks.place, self.ranks.device)
        self.engine = JointEngine(self.places, self.ranks, self.own.parameters, self.own.buffers, self.own.owners)

    @property
    def parts(self):
        return [part for part, r in zip(self.split.parts, self.split.replica, strict=True) if r == self.ranks.replica]


def optimizer_of(kind, parameters):
    parameters = list(parameters)
    if not parameters:
        return None
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters, 1e-3, eps=1e-4)


def train_and_compare(setup, optimizer="sgd", steps=3, tolerance=1e-6):
    """Trains both; returns the worst relative error of losses, gradients, parameters and buffers, and where it is."""
    model, inputs, loss_of = make_model(setup.name, setup.dropout)
    model.train(setup.model.training)
    ours, theirs = optimizer_of(optimizer, setup.own.parameters.values()), optimizer_of(optimizer, model.parameters())
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    worst = (0.0, "")
    for step in range(steps):
        theirs.zero_grad()
        loss = torch.zeros(())
        for part in setup.split.parts:
            out = model(**keywords(inputs, part.leaves))
            one = (out.loss if loss_of is None else loss_of(out)) * part.weight
            one.backward()
            loss += one.detach()
        if ours is not None:
            ours.zero_grad()
        found = setup.engine.train(setup.parts, 7, step)
        worst = max(worst, (relative(found, loss), f"loss {step}"))
        for name, parameter in setup.own.parameters.items():
            assert (parameter.grad is None) == (parameters[name].grad is None), (step, name)
            if parameter.grad is not None and setup.own.owners[name][0] == setup.ranks.place:
                worst = max(worst, (relative(parameter.grad, parameters[name].grad), f"gradient {step} {name}"))
        theirs.step()
        if ours is not None:
            ours.step()
        for name, parameter in setup.own.parameters.items():
            worst = max(worst, (relative(parameter, parameters[name]), f"parameter {step} {name}"))
        for name, buffer in setup.own.buffers.items():
            if name in buffers:
                worst = max(worst, (relative(buffer, buffers[name]), f"buffer {step} {name}"))
    assert worst[0] < tolerance, worst
    return worst


def relative(found, expected):
    """Largest difference by the largest value; what is zero but for rounding is compared by 1e-3."""
    found, expected = found.detach().double(), expected.detach().double()
    if found.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
