"""What the processes of the joint-graph tests run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import small_models
import torch
from torch.utils import _pytree as pytree

from rlplace.plan import PlacementPlan
from rlplace.runtime.distributed.execution.batches import split_batch
from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.joint.engine import JointEngine
from rlplace.runtime.distributed.joint.make import build_joint
from rlplace.runtime.distributed.ranks import ranks_of
from rlplace.runtime.distributed.state.tensors import meta_copy, own_tensors


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


def make_model(name, dropout=0.0, double=False):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]() if not dropout else small_models.MODELS[name](dropout)
    if double:
        model = model.double()
        inputs = pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    return model, inputs, None if loss_of is small_models._own_loss else loss_of


def keywords(inputs, leaves):
    """The keyword inputs of one micro-batch."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_structure(((), inputs)))[1]


@dataclass
class Built:
    """A model traced and put on the devices of a plan."""

    model: object
    inputs: dict
    loss: object
    split: object
    graph: object
    plan: object
    joint: object
    places: object


def build(name, world, *, microbatches=1, seed=0, dropout=0.0, train=True, plan=None, replicas=None, double=False, **fields):
    model, inputs, loss = make_model(name, dropout, double)
    model.train(train)
    split = split_batch((((), inputs),), len(replicas or [0]), microbatches)
    leaves = split.parts[0].leaves
    meta = meta_copy(model)
    graph = forward_graph(meta, (), keywords(inputs, leaves), loss=loss)
    if plan is None:
        used = world if replicas is None else len(replicas[0])
        plan = plan_of(graph, *random_places(graph, used, seed), microbatches=microbatches, replicas=replicas, **fields)
    places = build_joint(graph, plan, torch.device("cpu"))
    return Built(model, inputs, loss, split, graph, plan, places.joint, places)


class Running:
    """What is built, with the engine of this process."""

    def __init__(self, name, world, **options):
        self.name = name
        self.options = {key: options[key] for key in ("dropout", "double", "train") if key in options}
        self.built = build(name, world, **options)
        self.ranks = ranks_of(self.built.plan, torch.device("cpu"))
        places, constants = self.built.places, self.built.graph.constants
        self.own = own_tensors(self.built.model, places.owners, constants, self.ranks.place, self.ranks.device)
        schedule = self.built.plan.schedule
        self.engine = JointEngine(places, self.ranks, self.own, schedule)

    @property
    def parts(self):
        """The micro-batches of this replica."""
        split = self.built.split
        return [part for part, r in zip(split.parts, split.replica, strict=True) if r == self.ranks.replica]

    def reference(self):
        """The plain model as it was built."""
        model, inputs, loss_of = make_model(self.name, self.options.get("dropout", 0.0), self.options.get("double", False))
        return model.train(self.options.get("train", True)), inputs, loss_of


def plain_loss(running, model, part, step):
    """The loss of one micro-batch without a plan; random ops draw from the same streams as in every engine."""
    graph = running.built.graph
    if not graph.random_ops:
        out = model(**keywords(running.built.inputs, part.leaves))
        return out.loss if running.built.loss is None else running.built.loss(out)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    with random_key(7, step, part.number):
        flat = graph.module(*(held[name] for name in graph.held), *part.leaves)
    return flat[graph.outputs.index(graph.loss)]


def optimizer_of(kind, parameters):
    parameters = list(parameters)
    if not parameters:
        return None
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    return (
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters, 1e-3, eps=1e-4)
    )


def train_and_compare(running, optimizer="sgd", steps=3, tolerance=None):
    """Trains with and without a plan; returns the worst relative error of losses, gradients, parameters and buffers."""
    model, _, _ = running.reference()
    own, ranks = running.own, running.ranks
    ours, theirs = optimizer_of(optimizer, own.parameters.values()), optimizer_of(optimizer, model.parameters())
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    worst = (0.0, "")
    for step in range(steps):
        theirs.zero_grad()
        loss = torch.zeros(())
        for part in running.built.split.parts:
            one = plain_loss(running, model, part, step) * part.weight
            one.backward()
            loss = loss + one.detach()
        if ours is not None:
            ours.zero_grad()
        worst = max(worst, (relative(running.engine.train(running.parts, 7, step), loss), f"loss {step}"))
        for name, parameter in own.parameters.items():
            assert (parameter.grad is None) == (parameters[name].grad is None), (step, name)
            if parameter.grad is not None:
                worst = max(worst, (relative(parameter.grad, parameters[name].grad), f"gradient {step} {name}"))
        theirs.step()
        if ours is not None:
            ours.step()
        for name, parameter in own.parameters.items():
            worst = max(worst, (relative(parameter, parameters[name]), f"parameter {step} {name}"))
        for name, buffer in own.buffers.items():
            if name in buffers and len(ranks.replicas) == 1:  # each replica counts its own batches
                worst = max(worst, (relative(buffer, buffers[name]), f"buffer {step} {name}"))
    # In single precision sums in another order differ by some units in the last place, by how many depends on the processor.
    if tolerance is None:
        tolerance = 4e-6 if running.options.get("double") is False else 1e-6
    assert worst[0] < tolerance, (running.name, *worst)
    return worst


def relative(found, expected):
    """Largest difference by the largest value; what is zero but for rounding is compared by 1e-3."""
    found, expected = found.detach().double(), expected.detach().double()
    if found.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
