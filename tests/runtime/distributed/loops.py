"""Training loops over a distributed model beside the same loop over the model itself, on every rank of a job."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from equal import SINGLE_PRECISION, build, keywords, largest_difference, loss_of, parts_of
from launch import run
from plans import plan_of

from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.graph.forward_graph import Graphs, forward_graph

DOUBLE = {"loss": 2e-6, "norm": 1e-9, "gradient": 1e-9, "parameter": 1e-9, "buffer": 1e-9}
SINGLE = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-5, "parameter": 1e-4, "buffer": 0.0}
"""transformers computes the loss in single precision, and mixtral runs in single precision only."""
TRACED = {}
"""By model its graph, those of its micro-batches, and its loss: tracing takes most of the time."""


def traced(name, model, inputs, loss):
    if name not in TRACED:
        TRACED[name] = forward_graph(model, (), inputs, loss=loss), Graphs(), loss
    return TRACED[name]


class Pair:
    """A distributed model and the plain one.

    Attributes:
        plain, placed: The models.
        inputs: Keyword inputs of a batch of 4.
        worst: Largest differences so far, by what was compared, on this rank.
    """

    def __init__(self, name, places, *, model=None, double=True, change=None, **fields):
        """Distributes a model of `small_models`.

        Args:
            name: Of the model.
            places: Of the plan; ranks beyond them are outside the plan.
            model: Module, inputs and loss to take instead.
            double: In double precision.
            change: Called with the model before anything else.
            fields: Of the plan, or arguments of `plan_of`.
        """
        self.plain, self.inputs, self.loss = model or build(name, double)
        graph, graphs = None, None
        if change is not None:
            change(self.plain)
        elif model is None and double:
            graph, graphs, self.loss = traced(name, self.plain, self.inputs, self.loss)
        self.microbatches = fields.get("microbatches", 1)
        fields = {"deal": "chain", **fields}
        plan = plan_of(self.plain, self.inputs, places, loss=self.loss, graph=graph, **fields)
        model = copy.deepcopy(self.plain)
        self.placed = distribute(model, plan, self.inputs, loss=self.loss, graphs=graphs)
        self.worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}

    def note(self, what, difference):
        self.worst[what] = max(self.worst[what], float(difference))

    def batch(self, samples=4):
        """Inputs of some samples, those of a batch over and over."""
        numbers = torch.arange(samples) % 4
        return {k: v[numbers] if isinstance(v, torch.Tensor) and len(v) == 4 else v for k, v in self.inputs.items()}

    def plain_loss(self, **inputs):
        return loss_of(self.plain(**inputs), self.loss)

    def placed_loss(self, **inputs):
        output = self.placed(**inputs)
        return output.loss if self.loss is None else output

    def plain_step(self, inputs):
        """Backward of a batch in the micro-batches of the plan."""
        total = 0.0
        for part in parts_of(inputs, self.microbatches).parts:
            loss = self.plain_loss(**keywords(inputs, part.leaves)) * part.weight
            loss.backward()
            total += loss.item()
        return total

    def compare_gradients(self):
        expected = dict(self.plain.named_parameters())
        for name, parameter in self.placed.named_parameters():
            theirs = expected[name].grad
            assert (parameter.grad is None) == (theirs is None), name
            self.note("gradient", largest_difference(parameter.grad, theirs))

    def compare_state(self):
        expected = {**dict(self.plain.named_parameters()), **dict(self.plain.named_buffers())}
        for name, value in self.placed.state_dict().items():
            what = "parameter" if isinstance(expected.get(name), torch.nn.Parameter) else "buffer"
            if name in expected:
                self.note(what, largest_difference(value.double(), expected[name].double()))


def train(name, places, *, steps=5, clip=0.5, **options):
    """AdamW with clipping; what differs."""
    pair = Pair(name, places, **options)
    # A large epsilon: a gradient that is zero but for rounding must not become a step of full size.
    ours = torch.optim.AdamW(pair.placed.parameters(), lr=1e-2, eps=1e-4)
    theirs = torch.optim.AdamW(pair.plain.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(steps):
        loss = pair.placed_loss(**pair.inputs)
        loss.backward()
        pair.note("loss", abs(loss.item() - pair.plain_step(pair.inputs)))
        norm, expected = pair.placed.clip_grad_norm_(clip), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), clip)
        pair.note("norm", abs(norm - expected) / expected)
        pair.compare_gradients()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    pair.compare_state()
    return {
        "worst": pair.worst,
        "names": {name for name, _ in pair.placed.named_parameters()},
        "engine": pair.placed.report,
        "rank": dist.get_rank(),
    }


def trainings(cases):
    """Several of `train` in one job."""
    return [train(*arguments, **options) for arguments, options in cases]


def case(name, *shape, **options):
    """Arguments of `train`."""
    return (name, *shape), {"double": name not in SINGLE_PRECISION, **options}


def check(world, cases):
    """Runs cases over some processes; what each rank found, per case."""
    found = list(zip(*run(world, trainings, cases, timeout_s=500), strict=True))
    for (arguments, options), ranks in zip(cases, found, strict=True):
        limits = DOUBLE if options["double"] else SINGLE
        for rank in ranks:
            assert all(rank["worst"][what] <= limit for what, limit in limits.items()), (arguments, options, rank)
    return found
