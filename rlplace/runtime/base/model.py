"""The module that a training loop sees: one process's part of a distributed model."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rlplace.errors import InputError
from rlplace.model.capture.fake import first_names
from rlplace.runtime.base import activity
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.base.steps import has_target


@dataclass(frozen=True)
class Batching:
    """Options of how a batch becomes micro-batches; see `rlplace.distribute`."""

    share: str
    whole: Collection[str]
    reduction: str
    items: bool = False  # whether samples are items of lists, and not rows of tensors


class Stash:
    """Gradients of a step that wait for ``loss.backward()``, while those of earlier steps are set aside.

    As a context it clears the gradients that engines add to, takes those that they made, and restores the earlier ones.

    Args:
        parameters: Trained parameters, by name.
        copy: Copy the gradients of earlier steps, whose memory the step overwrites.
        after: Called with every parameter that has got its gradient, and its name.
        released: Updates have run; what waits belongs to parameters that torch's wrappers leave out.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        copy: bool = False,
        after: Callable[[str, nn.Parameter], None] | None = None,
        released: bool = False,
    ) -> None:
        self._parameters, self._copy, self._after, self._released = parameters, copy, after, released
        self._before: dict[str, torch.Tensor | None] = {}
        self._gradients: dict[str, torch.Tensor] | None = {}

    def __enter__(self) -> Stash:
        for name, parameter in self._parameters.items():
            before = parameter.grad
            self._before[name] = before.clone() if self._copy and before is not None else before
            parameter.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self._gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, parameter in self._parameters.items():
            parameter.grad = self._before[name]
        self._before.clear()

    def keep(self) -> None:
        """Copies the waiting gradients into memory of their own."""
        if self._gradients is not None:
            self._gradients = {name: gradient.clone() for name, gradient in self._gradients.items()}

    def deliver(self, scale: torch.Tensor) -> None:
        """Adds the gradients, times `scale`, to those of the parameters; once."""
        if self._gradients is None:
            raise RuntimeError("rlplace: backward through the loss of one step a second time")
        factor = float(scale)
        if self._released and factor != 1.0:
            raise InputError(
                f"the plan releases gradients, whose updates have run, and the loss is scaled by {factor:g} only now; call "
                "backward() of the loss as it is, or plan without --release-gradients"
            )
        for name, gradient in self._gradients.items():
            if factor != 1.0:
                gradient.mul_(factor)
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            if self._after is not None:
                self._after(name, parameter)
        self._gradients = None


class DistributedModel(nn.Module):
    """A model whose steps run over several processes, used like the model itself.

    Called in training mode with grad enabled, it runs the whole step, forward and backward of all micro-batches, and returns
    the loss where the model would; ``loss.backward()`` then only puts the gradients in place, scaled by the gradient that
    arrives there. In eval mode or without grad it runs the forward and returns all outputs. Every rank makes the same calls
    with the same batches.

    Parameters and buffers are those that this rank owns, under the names that they have in the model.

    Attributes:
        batching: How a batch becomes micro-batches from the next call on.
        random_state: Seed of the random ops, and number of the next training step, on which their streams depend.
        report: Name of the engine that runs the plan.
        nothing: A parameter without elements.
        ranks: The processes that run the model.
        meta_model: The whole model without its values: names, shapes, modes, code.
    """

    nothing: nn.Parameter
    meta_model: nn.Module

    def __init__(self, meta: nn.Module, ranks: Ranks, batching: Batching, seed: int, report: str) -> None:
        super().__init__()
        vars(self)["meta_model"] = meta  # not a child: its tensors are not this rank's
        self.ranks, self.batching, self.report = ranks, batching, report
        self.random_state = seed, 0
        vars(self)["nothing"] = nn.Parameter(torch.zeros(0, device=ranks.device))  # not one of the model's
        taken = {name.partition(".")[0] for name in first_names(meta)} & {*dir(self)}
        if taken:
            raise InputError(
                f"distribute: the model has an attribute {min(taken)!r}, a name that distributed models use; rename it"
            )

        @functools.wraps(meta.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with activity.inside(activity.MODEL):
                target = None if has_target(meta) else kwargs.pop("target", None)
                if not (torch.is_grad_enabled() and self.training):
                    return self._evaluate(args, kwargs, target)
                output, loss, stash = self._train(args, kwargs, target)
                seed, step = self.random_state
                self.random_state = seed, step + 1
                loss = loss.detach().requires_grad_()  # its step has run already: backward adds the gradients
                loss.register_hook(stash.deliver)  # type: ignore[no-untyped-call]
                return output(loss.clone())

        self.forward = forward  # its signature is the model's, which trainers look at

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["meta_model"], name)  # such as a transformers model's config
            if isinstance(value, (nn.Module, torch.Tensor)):
                raise AttributeError(
                    f"{name!r} of the model is not on this rank; state_dict() and named_parameters() have what is"
                ) from None
            return value

    @abstractmethod
    def _train(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, torch.Tensor, Stash]:
        """Runs a step; returns a function from the loss to the model's output, the loss, and the gradients."""

    @abstractmethod
    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        """Runs the forward only; returns the model's output."""

    @abstractmethod
    def _holders(self, name: str, parameter: nn.Parameter) -> int:
        """Counts the processes that hold a parameter of this rank, or a part of it."""

    @property
    def writes(self) -> bool:
        """True where this process has a part in checkpoints."""
        return True

    @property
    def releases(self) -> bool:
        """True where a parameter is updated in the backward, and has no gradient after it."""
        return False

    def release_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates in the backward, where the plan says so."""
        raise InputError("release_gradients: the plan holds gradients until the update; plan with --release-gradients")

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank trains, each with the first of its names in the model."""
        yield from self.named_parameters()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters that this rank trains; `nothing` where it has none, since optimizers refuse an empty list."""
        yield from [parameter for _, parameter in self.named_parameters(recurse=recurse)] or [self.nothing]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns groups for an optimizer: plain tensors and those of every mesh, which no foreach or fused operation mixes."""
        groups: dict[Any, list[nn.Parameter]] = {None: []}
        for parameter in self.parameters():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": group} for group in groups.values() if group]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients of the model so that their common norm is at most `max_norm`; every rank calls it.

        `torch.nn.utils.clip_grad_norm_` would see the gradients of this rank only. Every element counts once, wherever its
        copies are.

        Args:
            max_norm: Upper limit.
            norm_type: 2 for the Euclidean norm, ``float("inf")`` for the largest element.
            error_if_nonfinite: Whether a norm that is not finite is an error.

        Returns:
            The norm before, the same on every rank.

        Raises:
            RuntimeError: The norm is not finite, and that is an error.
            InputError: The plan releases gradients.
        """
        if self.releases:
            raise InputError(
                "clip_grad_norm_: the norm of all gradients is known when the backward ends, and the plan releases them in it; "
                "do not clip, or plan without --release-gradients"
            )
        infinite, device = norm_type == float("inf"), self.ranks.device
        total = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for name, parameter in self.named_parameters():
            if (gradient := parameter.grad) is not None and gradient.numel():
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local = local.coalesce().values() if local.is_sparse else local
                norm = torch.linalg.vector_norm(local.to(total), norm_type)
                copies = self._holders(name, parameter) // _parts(gradient)
                total = torch.maximum(total, norm) if infinite else total + norm**norm_type / copies
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
        norm = total if infinite else total ** (1.0 / norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {float(norm)}; they cannot be scaled to {max_norm}"
            )
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, norm, foreach=False)  # which takes one mesh
        return norm


def _parts(gradient: torch.Tensor) -> int:
    """Counts the processes that a gradient is cut over; others hold copies."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = (gradient.device_mesh.size(dim) for dim in range(gradient.device_mesh.ndim))
    return prod(size for size, cut in zip(sizes, gradient.placements, strict=True) if not isinstance(cut, Replicate))
