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


def rows(places, replicas):
    """Device lists of replicas; None for one."""
    return [[r * places + p for p in range(places)] for r in range(replicas)] if replicas > 1 else None


class Pair:
    """A distributed model and the plain one.

    Attributes:
        plain, placed: The models.
        inputs: Keyword inputs of a batch of 4.
        worst: Largest differences so far, by what was compared, on this rank.
    """

    def __init__(self, name, places, replicas=1, *, model=None, double=True, change=None, engine=None, **fields):
        """Distributes a model of `small_models`.

        Args:
            name: Of the model.
            places, replicas: Of the plan; ranks beyond their product are outside the plan.
            model: Module, inputs and loss to take instead.
            double: In double precision.
            change: Called with the model before anything else.
            engine: Name of the engine.
            fields: Of the plan, or arguments of `plan_of`.
        """
        self.plain, self.inputs, self.loss = model or build(name, double)
        graph, graphs = None, None
        if change is not None:
            change(self.plain)
        elif model is None and double:
            graph, graphs, self.loss = traced(name, self.plain, self.inputs, self.loss)
        self.replicas, self.microbatches = replicas, fields.get("microbatches", 1)
        fields = {"deal": "chain", "replicas": rows(places, replicas), **fields}
        plan = plan_of(self.plain, self.inputs, places, loss=self.loss, graph=graph, **fields)
        model = copy.deepcopy(self.plain)
        self.placed = distribute(model, plan, self.inputs, loss=self.loss, engine=engine, graphs=graphs)
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

    def share(self, name, tensor):
        """The part of a tensor of a parameter's shape that this rank trains."""
        shares = self.placed._shared.shares
        return shares[name].of(tensor) if name in shares and tensor is not None else tensor

    def plain_step(self, inputs):
        """Backward of a batch in the micro-batches of the plan.

        Every replica begins with the running statistics that there were; those of the first are kept.
        """
        split = parts_of(inputs, self.replicas, self.microbatches)
        start = {key: buffer.clone() for key, buffer in self.plain.named_buffers()}
        total, first, latest = 0.0, start, 0
        for part, replica in zip(split.parts, split.replica, strict=True):
            if replica != latest:
                first = first if latest else {key: buffer.clone() for key, buffer in self.plain.named_buffers()}
                self._set_buffers(start)
                latest = replica
            loss = self.plain_loss(**keywords(inputs, part.leaves)) * part.weight
            loss.backward()
            total += loss.item()
        if latest:
            self._set_buffers(first)
        return total

    def _set_buffers(self, values):
        for key, buffer in self.plain.named_buffers():
            buffer.copy_(values[key])

    def compare_gradients(self):
        expected = dict(self.plain.named_parameters())
        for name, parameter in self.placed.named_parameters():
            theirs = self.share(name, expected[name].grad)
            assert (parameter.grad is None) == (theirs is None), name
            self.note("gradient", largest_difference(parameter.grad, theirs))

    def compare_state(self):
        expected = {**dict(self.plain.named_parameters()), **dict(self.plain.named_buffers())}
        for name, value in self.placed.state_dict().items():
            what = "parameter" if isinstance(expected.get(name), torch.nn.Parameter) else "buffer"
            if name in expected:
                self.note(what, largest_difference(value.double(), expected[name].double()))


def state_bytes(optimizer):
    """Of the moments."""
    return sum(
        v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()
    )


def train(name, places, replicas=1, *, steps=5, clip=0.5, **options):
    """AdamW with clipping; what differs, and the bytes of optimizer state here and in the plain loop."""
    pair = Pair(name, places, replicas, **options)
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
    updated = [name for name, share in pair.placed._shared.trained.items() if share in ours.state]
    return {
        "worst": pair.worst,
        "names": {name for name, _ in pair.placed.named_parameters()},
        "engine": pair.placed.report,
        "state_bytes": state_bytes(ours),
        "own_bytes": sum(pair.placed._own.parameters[name].nbytes for name in updated),
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
