"""The unplaced model beside the distributed one: the same steps in one process, and how far they are apart.

The reference goes micro-batch by micro-batch, with the shares that the distributed model gives them, so that batch
normalisation sees the same samples. A model with dropout or other random ops runs as its exported graph, in which these ops
draw from the same streams as in the distributed one; any other model runs as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from rlplace.errors import InputError
from rlplace.graph.export import rewrite_devices
from rlplace.graph.fake import meta_copy
from rlplace.graph.inputs import split_inputs
from rlplace.runtime.distributed.execution.batches import samples_of
from rlplace.runtime.distributed.graph.forward_graph import Loss, flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.measure import Autocast, loss_of
from rlplace.runtime.native.batches import Share, even_sizes, passes_of, signature_of

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest accepted difference by dtype of compute: of a loss relative to itself, of a tensor to its largest element."""

_NOISE = 0.01
"""Share of the tolerance of a gradient that is rounding: optimizers that divide by the gradient's size enlarge it."""


@dataclass(eq=False)
class Reference:
    """The unplaced model, trained in one process like the distributed one.

    Attributes:
        model: On its device.
        optimizer: Of its parameters.
        device: Where it computes.
        loss: Of a model that does not return it.
        microbatches: In so many passes it runs a step.
        seed: Of random ops.
        clip: Norm that gradients are clipped to.
        autocast: Makes what forwards run under.
        same_streams: Whether the distributed model draws from the streams of the exported graph.
        dtype: What parameters are cast to for a step, as under mixed precision.
        steps: So many it has made.
        streams: Whether it runs as exported graph, because it has random ops.
        slack: By parameter how far its updates may have carried it because a gradient is known up to rounding only.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    loss: Loss | None
    microbatches: int
    seed: int
    clip: float | None = None
    autocast: Autocast = contextlib.nullcontext
    same_streams: bool = True
    dtype: torch.dtype | None = None
    steps: int = 0
    streams: bool = False
    slack: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        self._runs: dict[Any, Callable[[Any], torch.Tensor]] = {}

    def step(self, batch: Any, tolerance: float) -> float:
        """One step; leaves the gradients in place and returns the loss."""
        samples, total = samples_of(batch), 0.0
        sizes = even_sizes(samples, min(samples, self.microbatches))
        self.optimizer.zero_grad(set_to_none=True)
        share = Share(0, sizes, tuple(size / samples for size in sizes), samples)
        for part in passes_of({"call": batch}, share, ["call"], (), self.device):
            args, kwargs = split_inputs(part.inputs["call"])
            key = signature_of(part.inputs)
            with self.autocast():
                if key not in self._runs:
                    self._runs[key] = self._runner(args, kwargs)
                with random_key(self.seed, self.steps):
                    value = self._runs[key]((args, kwargs)) * part.weight
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self._note_slack(tolerance)
        self.optimizer.step()
        self.steps += 1
        return total

    def _runner(self, args: Any, kwargs: Any) -> Callable[[Any], torch.Tensor]:
        graph = forward_graph(meta_copy(self.model), args, kwargs, loss=self.loss)
        if graph.random_ops == 0:
            return lambda call: loss_of(functional_call(self.model, self._cast(), *call), self.loss)
        if not self.same_streams:
            raise InputError(
                f"run: --verify: the model has {graph.random_ops} random ops, such as dropout, and under a strategy every "
                "process draws from torch's own stream; switch them off in the MODEL, for example "
                "hf:gpt2,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0, and plan that, or leave --verify out"
            )
        self.streams = True
        for node in graph.module.graph.nodes:
            rewrite_devices(node, self.device)
        graph.module.recompile()
        tensors = {**self.parameters, **dict(self.model.named_buffers()), **graph.constants}
        held = [tensors[name].to(self.device) for name in graph.held]
        where = -1 if graph.loss is None else graph.loss

        def run(call: Any) -> torch.Tensor:
            loss: torch.Tensor = graph.module(*held, *flat_inputs(*call))[where]
            return loss.reshape(())

        return run

    def _cast(self) -> dict[str, torch.Tensor]:
        """Parameters in the dtype that they are gathered in under mixed precision."""
        return {} if self.dtype is None else {name: p.to(self.dtype) for name, p in self.parameters.items()}

    def _note_slack(self, tolerance: float) -> None:
        """How far the next update may carry a parameter because its gradient is known up to rounding only.

        Adam divides by the size of the gradient: an element whose gradient is nothing but rounding, such as the bias of keys
        in attention, moves by up to the learning rate in either direction.
        """
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        magnitudes = {name: p.grad.detach().abs() for name, p in self.parameters.items() if p.grad is not None}
        largest = max((float(g.max()) for g in magnitudes.values()), default=0.0)
        for name, gradient in magnitudes.items():
            unsure = (_NOISE * tolerance * largest / gradient.clamp_min(1e-38)).clamp_max(2.0) * rate
            self.slack[name] = self.slack[name] + unsure if name in self.slack else unsure


@dataclass
class RunComparison:
    """How far the distributed model is from the unplaced one; errors are in units of what is accepted.

    Attributes:
        tolerance: See `TOLERANCE`.
        losses: Per step the relative difference of the loss.
        worst: Name and error of the worst "gradient", after the first step, and "parameter", after the last.
        streams: Whether the reference ran as exported graph, because it has random ops.
    """

    tolerance: float
    losses: list[float] = field(default_factory=list)
    worst: dict[str, tuple[str, float]] = field(default_factory=lambda: {"gradient": ("", 0.0), "parameter": ("", 0.0)})
    streams: bool = False

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        return max(self.losses, default=0.0) <= self.tolerance and all(error <= 1.0 for _, error in self.worst.values())

    def compare_loss(self, loss: float, expected: float) -> None:
        """Notes the losses of one step."""
        difference = abs(loss - expected) / max(abs(expected), 1e-12)
        self.losses.append(difference if difference == difference else float("inf"))

    def compare_gradients(self, gradients: Mapping[str, Any], reference: Reference) -> None:
        """Notes gradients (None: there is none) by first name, after the first step."""
        largest = max((float(p.grad.abs().max()) for p in reference.parameters.values() if p.grad is not None), default=0.0)
        for name, expected in reference.parameters.items():
            grad = torch.zeros_like(expected) if expected.grad is None else expected.grad
            found = gradients.get(name)
            accepted = self.tolerance * (float(grad.abs().max()) + _NOISE * largest) + 1e-30
            self._note("gradient", name, grad if found is None else found.to(grad) - grad, accepted)

    def compare_parameters(self, parameters: Mapping[str, Any], reference: Reference) -> None:
        """Notes parameters by first name, after the last step."""
        self.streams = reference.streams
        for name, expected in reference.parameters.items():
            slack = reference.slack.get(name, torch.zeros(()))
            allowed = self.tolerance * float(expected.detach().abs().max()) + slack.to(expected) + 1e-30
            self._note("parameter", name, parameters[name].to(expected.detach()) - expected.detach(), allowed)

    def _note(self, kind: str, name: str, difference: torch.Tensor, accepted: Any) -> None:
        """Keeps the worst tensor; not a number counts as infinitely far."""
        error = float((difference.abs() / accepted).max()) if difference.numel() else 0.0
        error = error if error == error else float("inf")
        self.worst[kind] = max(self.worst[kind], (name, error), key=lambda pair: pair[1])

    def lines(self) -> list[str]:
        """For people."""
        how = "run as a graph with the same random streams" if self.streams else "run as it is"
        verdict = "equal" if self.equal else "NOT EQUAL"
        return [
            f"{verdict} to the unplaced model ({how}) within {self.tolerance:g}: losses of {len(self.losses)} steps differ "
            f"by up to {max(self.losses, default=0.0):.1e} of their size",
            "; ".join(
                f"worst {kind} {name}: {error:.2g} of what is accepted" if name else f"every {kind} equal bit for bit"
                for kind, (name, error) in self.worst.items()
            ),
        ]
