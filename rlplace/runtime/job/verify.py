"""The unplaced model beside the distributed one: the same steps in one process, and how far they are apart.

The reference is a copy of the very weights that are distributed, and runs the model's own code on the whole batch in one piece.
Random numbers are alike for all samples in both, so that dropout can be compared whatever the plan divides.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rlplace.model.capture.fake import computed_values, normalize_alone
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.torch_adapter import pytree
from rlplace.plan.strategy import MEAN, SUM, Strategy
from rlplace.runtime.base.batches import even_sizes, passes_of, share_of
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.steps import Autocast, Loss, loss_of, samples_of
from rlplace.runtime.state.whole import gather_values, seen
from rlplace.runtime.strategy.blocks import has_batch_norm, has_sync_norm
from rlplace.runtime.strategy.rehearsal import AlikeDraws, rehearse, rows_of
from rlplace.runtime.strategy.statistics import statistics_of
from rlplace.runtime.strategy.strategy_model import keyword_inputs

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest accepted difference by dtype of compute: of a loss relative to itself, of a tensor to its largest element."""

_NOISE, _OWN_NOISE = 0.01, 0.25
"""Shares of the tolerance that are rounding, of the largest gradient of all and of a tensor's own: optimizers that divide
by the gradient's size enlarge it."""


class Choices(TorchFunctionMode):
    """Top-k choices, as routers of mixtures make them, that another rounding of the scores may make otherwise.

    Attributes:
        unsure: How many there were.

    Args:
        tolerance: See `TOLERANCE`.
    """

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.unsure, self._noise = 0, _OWN_NOISE * tolerance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, and looks at the first score that was not chosen."""
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk" and 0 < made.values.shape[-1] < args[0].shape[-1]:
            scores = args[0].detach()
            ranked = scores.topk(made.values.shape[-1] + 1).values
            apart = ranked[..., -2] - ranked[..., -1]
            self.unsure += int(((apart > 0) & (apart <= self._noise * scores.abs().amax(-1))).sum())
        return made


@dataclass(eq=False)
class Reference:
    """The unplaced model, trained in one process like the distributed one."""

    model: nn.Module  # a copy, on its device
    optimizer: torch.optim.Optimizer  # of its parameters
    device: torch.device  # where it computes
    loss: Loss | None  # of a model that does not return it
    parts: int = 1  # micro-batches of all replicas that a plan divides a step into
    clip: float | None = None  # norm that gradients are clipped to
    autocast: Autocast = contextlib.nullcontext  # makes the context of forwards
    dtype: torch.dtype | None = None  # dtype that parameters are cast to for a step, as under mixed precision
    steps: int = 0  # number of its steps so far
    # the mean loss over the parts of the first batch; None before it, and where there is one part
    mean_of_parts: float | None = None
    strategy: Strategy | None = None  # the plan's; its parts run one by one where each has statistics of BatchNorm of its own
    why: str = ""  # why that differs from the loss of the batch, where a rehearsal shows it
    # by parameter how far its updates may have carried it because a gradient is known up to rounding only
    slack: dict[str, torch.Tensor] = field(default_factory=dict)
    unsure: int = 0  # choices so far that hang on rounding, behind which any update may be another

    def __post_init__(self) -> None:
        normalize_alone(self.model)
        self.parameters = dict(self.model.named_parameters())

    @property
    def in_parts(self) -> bool:
        """True where parts of a batch are normalized by their own statistics."""
        alone, joined = has_batch_norm(self.model), has_sync_norm(self.model)
        if self.strategy is None or not (alone or joined):
            return False
        replicas = 1 if joined or self.strategy.statistics == "batch" else self.strategy.pipelines[0].data_degree
        return max(self.strategy.pipelines[0].microbatches) * replicas > 1

    def step(self, batch: Any, tolerance: float) -> float:
        """Runs one step on the whole batch in one piece; leaves the gradients in place and returns the loss."""
        batch = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(self.device), batch)
        self.optimizer.zero_grad(set_to_none=True)
        if self.strategy is not None and self.in_parts:
            value = self._step_in_parts(self.strategy, batch)
        else:
            before = copy.deepcopy(self.model, computed_values(self.model)) if self.steps == 0 and self.parts > 1 else None
            with self.autocast(), Choices(tolerance) as choices:
                loss = self._loss_of(self.model, batch)
            self.unsure += choices.unsure
            loss.backward()  # type: ignore[no-untyped-call]
            value = float(loss.detach())
            if before is not None:
                self._compare_parts(before, batch, value, tolerance)
        if self.clip is not None:
            norm = nn.utils.get_total_norm([p.grad.to_dense() for p in self.parameters.values() if p.grad is not None])
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.clip, norm, foreach=False)  # sparse ones, too
        self._note_slack(tolerance)
        self.optimizer.step()
        self.steps += 1
        return value

    def _step_in_parts(self, strategy: Strategy, batch: Any) -> float:
        """Runs forward and backward of the parts of a batch one by one; the running statistics of the first replica stay."""
        samples, inputs, degree = samples_of(batch), keyword_inputs(self.model, batch), strategy.pipelines[0].data_degree
        apart = degree if strategy.statistics == "replica" and not has_sync_norm(self.model) else 1
        counts = None if strategy.reduction in (MEAN, SUM) else strategy.reduction
        norms, total, counted = statistics_of([self.model]), 0.0, 0.0
        for replica in reversed(range(apart)):  # the first one last
            before = [value.clone() for value in norms]
            share = share_of(strategy, replica, samples, apart)
            share = share if counts is None else replace(share, weights=(1.0,) * len(share.sizes))
            for one in passes_of(inputs, share, inputs, (), self.device, counts):
                with self.autocast(), one.counting() as targets:
                    loss = self._loss_of(self.model, one.inputs)
                weight = 1.0 if strategy.reduction == SUM else float(one.counted(targets, self.device))
                (loss * weight).backward()  # type: ignore[no-untyped-call]
                total, counted = total + float(loss.detach()) * weight, counted + weight
            if replica:
                for value, old in zip(norms, before, strict=True):
                    value.copy_(old)
        if strategy.reduction == SUM:
            return total
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= counted
        return total / counted

    def _loss_of(self, model: nn.Module, batch: Any) -> torch.Tensor:
        args, kwargs = split_inputs(batch)
        cast = {} if self.dtype is None else {name: p.to(self.dtype) for name, p in model.named_parameters()}
        return loss_of(functional_call(model, cast, args, kwargs), self.loss).reshape(())

    def _compare_parts(self, model: nn.Module, batch: Any, whole: float, tolerance: float) -> None:
        """Notes the mean loss over the parts of a batch, and why it differs from the loss of the whole."""
        samples, total, first = samples_of(batch), 0.0, 0
        with torch.no_grad(), self.autocast(), contextlib.suppress(Exception):  # what cannot be divided raises
            for size in even_sizes(samples, min(samples, self.parts)):
                own = rows_of(batch, samples, slice(first, first + size))
                total += float(self._loss_of(copy.deepcopy(model, computed_values(model)), own)) * size / samples
                first += size
            self.mean_of_parts = total
        if self.mean_of_parts is None or abs(total - whole) > tolerance * abs(whole):
            self.why = rehearse(model, batch, self.loss).reason()

    def _note_slack(self, tolerance: float) -> None:
        """Adds up how far the next update may move a parameter because its gradient is known up to rounding only.

        Adam divides by the size of the gradient: an element whose gradient is nothing but rounding, such as the bias of keys
        in attention, moves by up to the learning rate in either direction.
        """
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        magnitudes = {name: p.grad.detach().to_dense().abs() for name, p in self.parameters.items() if p.grad is not None}
        largest = max(map(_largest, magnitudes.values()), default=0.0)
        for name, gradient in magnitudes.items():
            noise = tolerance * (_NOISE * largest + _OWN_NOISE * _largest(gradient))
            unsure = (noise / gradient.clamp_min(1e-38)).clamp_max(2.0) * rate
            unsure = torch.full_like(unsure, 2.0 * rate) if self.unsure else unsure
            self.slack[name] = self.slack[name] + unsure if name in self.slack else unsure


@contextlib.contextmanager
def alike_draws(device: torch.device) -> Iterator[AlikeDraws]:
    """Makes random numbers alike for all samples; the device's own stream continues afterwards where it was.

    What is compiled, as updates of torchao, runs op by op, because torch compiles nothing while draws are watched.
    """
    stream = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
    with stream, torch.compiler.set_stance("force_eager"), AlikeDraws() as draws:
        yield draws


@dataclass(eq=False)
class RunComparison:
    """Differences of the distributed model from the unplaced one; errors are in units of the accepted error."""

    tolerance: float  # see `TOLERANCE`
    device: torch.device
    reference: Reference | None  # on rank 0
    losses: list[float] = field(default_factory=list)  # per step the relative difference of the loss
    first: tuple[float, float] | None = None  # loss of the first step: distributed, and of the whole batch in one piece
    # name and error of the worst "gradient", after the first step, "parameter" and "buffer", after the last
    worst: dict[str, tuple[str, float]] = field(
        default_factory=lambda: {"gradient": ("", 0.0), "parameter": ("", 0.0), "buffer": ("", 0.0)}
    )
    random: bool = False  # the model draws random numbers, which were alike for all samples
    unlike: str | None = None  # a random op whose numbers could not be made alike; None without one

    @property
    def equal(self) -> bool:
        """True where everything is within the tolerance."""
        return max(self.losses, default=0.0) <= self.tolerance and all(error <= 1.0 for _, error in self.worst.values())

    def compare_step(self, loss: float, batch: Any) -> None:
        """Runs the reference on the batch of a step, and notes the losses."""
        if self.reference is None:
            return
        with alike_draws(self.device) as own:
            expected = self.reference.step(batch, self.tolerance)
        self.random, self.unlike = self.random or own.count > 0, self.unlike or own.unlike
        self.first = self.first or (loss, expected)
        difference = abs(loss - expected) / max(abs(expected), 1e-12)
        self.losses.append(difference if difference == difference else float("inf"))

    def compare_gradients(self, model: DistributedModel) -> None:
        """Notes gradients after the first step: later, the optimizer has enlarged rounding. Every rank calls it."""
        if model.releases:  # none is left
            self.worst.pop("gradient")
            return
        own = {name: (p, p.grad) for name, p in model.trained() if p.grad is not None}
        dense = {name: seen(p, grad.to_dense() if grad.is_sparse else grad) for name, (p, grad) in own.items()}
        gradients = gather_values(dense, self.device)
        if self.reference is None:
            return
        dense = {name: p.grad.to_dense() for name, p in self.reference.parameters.items() if p.grad is not None}
        largest = max(map(_largest, dense.values()), default=0.0)
        for name, expected in self.reference.parameters.items():
            grad = dense.get(name, torch.zeros_like(expected))
            found = gradients.get(name)
            accepted = self.tolerance * (_largest(grad) + _NOISE * largest) + 1e-30
            self._note("gradient", name, grad if found is None else found.to_dense().to(grad) - grad, accepted)

    def compare_state(self, model: DistributedModel) -> None:
        """Notes parameters and buffers after the last step; every rank calls it."""
        parameters = gather_values({name: seen(parameter).detach() for name, parameter in model.trained()}, self.device)
        buffers = gather_values({name: buffer.detach() for name, buffer in model.named_buffers()}, self.device)
        reference = self.reference
        if reference is None:
            return
        for name, parameter in reference.parameters.items():
            expected, slack = parameter.detach(), reference.slack.get(name, torch.zeros(()))
            allowed = self.tolerance * _largest(expected) + slack.to(expected.device) + 1e-30
            self._note("parameter", name, parameters[name].to(expected) - expected, allowed)
        for name, buffer in reference.model.named_buffers():
            if name in buffers and buffer.numel():
                found, own = (value.to(buffer.device, torch.complex128) for value in (buffers[name], buffer))
                difference = found - own if found.shape == own.shape else torch.full((1,), float("inf"))
                self._note("buffer", name, difference, self.tolerance * _largest(own) + 1e-30)

    def _note(self, kind: str, name: str, difference: torch.Tensor, accepted: Any) -> None:
        """Notes a tensor if it is the worst so far; not a number counts as infinitely far."""
        error = _largest(difference / accepted)
        error = error if error == error else float("inf")
        self.worst[kind] = max(self.worst[kind], (name, error), key=lambda pair: pair[1])

    def lines(self) -> list[str]:
        """Describes the comparison in sentences."""
        verdict = "equal" if self.equal else "NOT EQUAL"
        how = "on whole batches in one piece"
        if self.reference is not None and self.reference.in_parts:
            how = "on the plan's parts one by one, which BatchNorm normalizes by their own statistics,"
        made = [
            f"{verdict} to the unplaced model {how} within {self.tolerance:g}: losses of "
            f"{len(self.losses)} steps differ by up to {max(self.losses, default=0.0):.1e} of their size",
            "; ".join(
                f"worst {kind} {name}: {error:.2g} of what is accepted" if name else f"every {kind} equal bit for bit"
                for kind, (name, error) in self.worst.items()
            ),
        ]
        if self.random:
            made.append("random numbers were alike for all samples and ops in both, which training does not do")
        if self.unlike is not None and not self.equal:
            made.append(
                f"the model draws by {self.unlike}, whose numbers depend on the plan: what it reaches cannot be compared"
            )
        if self.reference is not None and self.reference.unsure:
            made.append(
                f"{self.reference.unsure} choices of routers hang on rounding, and updates on the choices: parameters count as "
                "equal where they differ by no more than updates"
            )
        parts = None if self.reference is None else self.reference.mean_of_parts
        if self.reference is not None and self.first is not None and parts is not None and not self.equal:
            (loss, whole), why = self.first, self.reference.why
            made.append(
                f"the first batch in one piece has loss {whole:.6g}, the mean over the plan's parts of it is {parts:.6g}, and "
                f"{loss:.6g} was trained{f': {why}' if why else ''}"
            )
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            "equal": self.equal,
            "tolerance": self.tolerance,
            "losses": self.losses,
            **{f"worst_{kind}": list(worst) for kind, worst in self.worst.items()},
            "first_loss": list(self.first or ()),
            "mean_of_parts": None if self.reference is None else self.reference.mean_of_parts,
            "why": (None if self.reference is None else self.reference.why) or None,
        }


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
