"""Optimizers by name (`rlplace.model.capture.optimizers`), over the parameters of a process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rlplace.errors import InputError, MissingError
from rlplace.model.capture.optimizers import OPTIMIZERS, matrices
from rlplace.runtime.base.model import DistributedModel


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    """Computes the loss anew, with gradients, where a step is given how."""
    with torch.enable_grad():
        return None if closure is None else closure()


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2).

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Shares of the momentum in the update, and in the next momentum.
        weight_decay: Decoupled.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            (now, later), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.mul_(1 - rate * group["weight_decay"])
                    parameter.add_(momentum.lerp(parameter.grad, 1 - now).sign_(), alpha=-rate)
                    momentum.lerp_(parameter.grad, 1 - later)
        return loss


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices, AdamW for all others, as one optimizer.

    Args:
        groups: Each with ``params`` and ``matrices``, which says whether its parameters are.
        lr: Learning rate of both; that of Muon is scaled to updates of the size of AdamW's.
        exact: Products are in the parameters' dtype, in place of bfloat16, which enlarges the least differences of gradients.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], lr: float, exact: bool = False) -> None:
        one = nn.Parameter(torch.zeros(1, 1))
        self._parts: dict[bool, torch.optim.Optimizer] = {
            True: torch.optim.Muon([one], lr=lr, adjust_lr_fn="match_rms_adamw"),
            False: torch.optim.AdamW([one], lr=lr),
        }
        self._exact = exact
        super().__init__([{**self._parts[group["matrices"]].defaults, **group} for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        loss = _loss_of(closure)
        dtype = mock.patch.object(Tensor, "bfloat16", Tensor.clone) if self._exact else contextlib.nullcontext()
        with dtype:
            for kind, part in self._parts.items():
                part.param_groups = [group for group in self.param_groups if group["matrices"] == kind]
                part.state = self.state
                part.step()
        return loss


def make_optimizer(name: str, model: nn.Module, lr: float, *, exact: bool = False) -> torch.optim.Optimizer:
    """Returns an optimizer of a model, or of this process's part of a distributed one.

    Args:
        name: Of `rlplace.model.capture.optimizers.OPTIMIZERS`.
        model: Its parameters that are trained get updates.
        lr: Learning rate.
        exact: See `Muon`.
    """
    whole = model.meta_model if isinstance(model, DistributedModel) else model
    known, named = matrices(whole), model.trained() if isinstance(model, DistributedModel) else model.named_parameters()
    chosen = {id(parameter) for path, parameter in named if path in known}
    groups = model.parameter_groups() if isinstance(model, DistributedModel) else [{"params": [*model.parameters()]}]
    optimizer = optimizer_of_groups(name, groups, chosen, lr, exact=exact)
    if isinstance(model, DistributedModel) and model.releases:
        model.release_gradients(optimizer)
    return optimizer


def optimizer_of_groups(
    name: str, groups: Sequence[Mapping[str, Any]], chosen: Collection[int], lr: float, *, exact: bool = False
) -> torch.optim.Optimizer:
    """Returns an optimizer of groups of parameters; `chosen` are ids of those that are matrices, which may be updated apart.

    Raises:
        MissingError: A package is not installed.
        InputError: The optimizer makes no sense for these weights.
    """
    rule = OPTIMIZERS[name]
    if (reason := rule.why_not({p.dtype for group in groups for p in group["params"]})) is not None:
        raise InputError(f"optimizer {name}: {reason}")
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    if rule.rest is not None:
        split = (
            (group, kind, [p for p in group["params"] if (id(p) in chosen) == kind])
            for group in groups
            for kind in (True, False)
        )
        return Muon([{**group, "params": own, "matrices": kind} for group, kind, own in split if own], lr, exact)
    module, _, own_name = rule.path.rpartition(".")
    modules: dict[str, Any] = {"torch.optim": torch.optim, __name__: sys.modules[__name__]}
    if module not in modules:
        try:
            import torchao.optim  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise MissingError(f"the optimizer {name} needs torchao; pip install torchao") from error
        modules["torchao.optim"] = torchao.optim
    made: torch.optim.Optimizer = getattr(modules[module], own_name)(groups, lr=lr, **rule.options)
    return made
