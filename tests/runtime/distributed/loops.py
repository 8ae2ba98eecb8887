"""Training loops over a distributed model beside the same loop over the model itself, on every rank of a job."""

from __future__ import annotations

import copy

import torch
from equal import largest_difference
from plans import plan_of

from rlplace.runtime.distributed.distribute import distribute


class Pair:
    """A distributed model and the plain one.

    Attributes:
        plain, placed: The models.
        inputs: Keyword inputs of a batch of 4.
        worst: Largest differences so far, by what was compared, on this rank.
    """

    def __init__(self, places, model, inputs, *, change=None, **fields):
        """Distributes a model.

        Args:
            places: Of the plan; ranks beyond them are outside the plan.
            model: The plain model.
            inputs: Keyword inputs of a batch of 4.
            change: Called with the model before anything else.
            fields: Of the plan, or arguments of `plan_of`.
        """
        self.plain, self.inputs = model, inputs
        if change is not None:
            change(self.plain)
        fields = {"deal": "chain", **fields}
        plan = plan_of(self.plain, self.inputs, places, **fields)
        self.placed = distribute(copy.deepcopy(self.plain), plan, self.inputs)
        self.worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}

    def note(self, what, difference):
        self.worst[what] = max(self.worst[what], float(difference))

    def batch(self, samples=4):
        """Inputs of some samples, those of a batch over and over."""
        numbers = torch.arange(samples) % 4
        return {k: v[numbers] if isinstance(v, torch.Tensor) and len(v) == 4 else v for k, v in self.inputs.items()}

    def plain_loss(self, **inputs):
        return self.plain(**inputs)["loss"]

    def placed_loss(self, **inputs):
        return self.placed(**inputs)["loss"]

    def plain_step(self, inputs):
        """Backward of a batch."""
        loss = self.plain_loss(**inputs)
        loss.backward()
        return loss.item()

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
