"""What the processes of the joint-graph tests run."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import torch

import rlplace
from rlplace.model.capture.fake import meta_copy
from rlplace.runtime.placement.forward_graph import flat_inputs, forward_graph, random_key, seeded
from rlplace.runtime.placement.placed_model import build_joint
from tests.runtime.equality import build as make_model
from tests.runtime.equality import largest_difference, loss_of, split_plan

SEED = 7


def build(name, world, *, seed=0, double=False, **given):
    """A model traced and put on the devices of a plan: every op, and its backward, anywhere."""
    model, inputs, loss = make_model(name, double, **given)
    graph = forward_graph(meta_copy(model), (), inputs, loss=loss)
    places = np.random.default_rng(seed).integers(0, world, (2, len(graph.op_of_node)))
    plan = split_plan(graph.op_of_node.values(), *places)
    placement = build_joint(graph, plan, torch.device("cpu"))
    return SimpleNamespace(
        model=model, inputs=inputs, loss=loss, graph=graph, plan=plan, joint=placement.joint, placement=placement
    )


def plain_loss(built, model, step):
    """The loss without a plan; random ops draw from the same streams as in every engine."""
    graph = built.graph
    if not graph.module.graph.find_nodes(op="call_function", target=seeded):
        return loss_of(model(**built.inputs), built.loss)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    with random_key(SEED, step):
        flat = graph.module(*(held[name] for name in graph.held), *flat_inputs((), built.inputs))
    return flat[graph.loss]


def optimizer_of(kind, parameters):
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    return (
        torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters, 1e-3, eps=1e-4)
    )


def train_and_compare(name, optimizer, world, *, double=True, steps=3, **options):
    """Trains with and without a plan, and compares losses, gradients, norms, parameters and buffers after every step.

    Returns:
        Both models, and their inputs.
    """
    built = build(name, world, double=double, **options)
    model, placed = (
        built.model,
        rlplace.distribute(copy.deepcopy(built.model), built.plan, built.inputs, loss=built.loss, seed=SEED),
    )
    ours, theirs = (optimizer_of(optimizer, one.parameters()) for one in (placed, model))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    worst = (0.0, "")
    for step in range(steps):
        theirs.zero_grad()
        ours.zero_grad()
        loss, found = (
            plain_loss(built, model, step),
            loss_of(placed(**built.inputs), None if built.loss is None else lambda y: y),
        )
        loss.backward()
        found.backward()
        worst = max(worst, (relative(found, loss), f"loss {step}"))
        for key, parameter in placed.named_parameters():
            assert (parameter.grad is None) == (parameters[key].grad is None), (step, key)
            if parameter.grad is not None:
                worst = max(worst, (relative(parameter.grad, parameters[key].grad), f"gradient {step} {key}"))
        norm, wanted = placed.clip_grad_norm_(1e9), torch.nn.utils.clip_grad_norm_(parameters.values(), 1e9)
        worst = max(worst, (relative(norm, wanted), f"norm {step}"))
        theirs.step()
        ours.step()
        for key, value in (*placed.named_parameters(), *placed.named_buffers()):
            worst = max(worst, (relative(value, (parameters | buffers)[key]), f"{key} {step}"))
    # In single precision sums in another order differ by some units in the last place, by how many depends on the processor.
    assert worst[0] < (1e-6 if double else 4e-6), (name, *worst)
    return placed, model, built.inputs


def relative(found, expected):
    """What is zero but for rounding is compared by 1e-3."""
    return largest_difference(found.double(), expected.double(), 1e-3)
