"""Optimizers by name (`rlplace.model.capture.optimizers`), over the parameters of a process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rlplace.errors import InputError, MissingError
from rlplace.model.capture.optimizers import OPTIMIZERS, apart
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.turns import in_turns


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


class LazyAdam(torch.optim.Optimizer):
    """torch's SparseAdam for tables with sparse gradients, Adam for all others, as one optimizer.

    Args:
        groups: Each with ``params`` and ``apart``, which says whether its parameters are such tables.
        lr: Learning rate of both.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], lr: float) -> None:
        one = nn.Parameter(torch.zeros(1, 1))
        self._both = {True: torch.optim.SparseAdam([one], lr=lr), False: torch.optim.Adam([one], lr=lr)}
        super().__init__([{**self._both[group["apart"]].defaults, **group} for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        loss = _loss_of(closure)
        for kind, optimizer in self._both.items():
            optimizer.param_groups = [group for group in self.param_groups if group["apart"] == kind]
            optimizer.state = self.state
            optimizer.step()
        return loss


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices, AdamW for all others, as one optimizer.

    Of a matrix that is cut over processes, one of them gathers the update and makes it orthogonal, each in turn
    (`rlplace.runtime.base.turns`).

    Args:
        groups: Each with ``params`` and ``apart``, which says whether its parameters are matrices.
        lr: Learning rate of both; that of Muon is scaled to updates of the size of AdamW's.
        exact: Products are in the parameters' dtype, in place of bfloat16, which enlarges the least differences of gradients.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], lr: float, exact: bool = False) -> None:
        one = nn.Parameter(torch.zeros(1, 1))
        self._rest, self._exact = torch.optim.AdamW([one], lr=lr), exact
        defaults = {True: torch.optim.Muon([one], lr=lr).defaults, False: self._rest.defaults}
        super().__init__([{**defaults[group["apart"]], **group} for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            if group["apart"]:
                self._update(group)
        self._rest.param_groups = [group for group in self.param_groups if not group["apart"]]
        self._rest.state = self.state
        self._rest.step()
        return loss

    def _update(self, group: Mapping[str, Any]) -> None:
        """Updates matrices as torch/optim/_muon.py does, by updates of the size of AdamW's."""
        given, updates = [p for p in group["params"] if p.grad is not None], []
        for parameter in given:
            moment = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
            moment.lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(moment, group["momentum"]) if group["nesterov"] else moment
            updates.append(update.clone() if self._exact else update.bfloat16())
        for parameter, update in zip(given, in_turns(updates, partial(_orthogonal, group, self._exact)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def _orthogonal(group: Mapping[str, Any], exact: bool, update: Tensor) -> Tensor:
    """Returns what torch's Muon subtracts from a matrix at a rate of 1."""
    tall = update.size(0) > update.size(1)
    made = nn.Parameter(torch.zeros_like(update.T if tall else update, memory_format=torch.contiguous_format))
    made.grad = update.T if tall else update  # of a wide matrix torch takes the rate as it is
    settings = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
    with mock.patch.object(Tensor, "bfloat16", Tensor.clone) if exact else contextlib.nullcontext():
        torch.optim.Muon([made], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    update = made.detach().neg_()
    return update.T if tall else update


def make_optimizer(name: str, model: nn.Module, lr: float, *, exact: bool = False) -> torch.optim.Optimizer:
    """Returns an optimizer of a model, or of this process's part of a distributed one.

    Args:
        name: Of `rlplace.model.capture.optimizers.OPTIMIZERS`.
        model: Its parameters that are trained get updates.
        lr: Learning rate.
        exact: See `Muon`.
    """
    whole = model.meta_model if isinstance(model, DistributedModel) else model
    known, named = apart(whole, name), model.trained() if isinstance(model, DistributedModel) else model.named_parameters()
    chosen = {id(parameter) for path, parameter in named if path in known}
    groups = model.parameter_groups() if isinstance(model, DistributedModel) else [{"params": [*model.parameters()]}]
    optimizer = optimizer_of_groups(name, groups, chosen, lr, exact=exact)
    if isinstance(model, DistributedModel) and model.releases:
        model.release_gradients(optimizer)
    return optimizer


def optimizer_of_groups(
    name: str, groups: Sequence[Mapping[str, Any]], chosen: Collection[int], lr: float, *, exact: bool = False
) -> torch.optim.Optimizer:
    """Returns an optimizer of groups of parameters; `chosen` are ids of those of `apart`.

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
        groups = [{**group, "params": own, "apart": kind} for group, kind, own in split if own]
        return LazyAdam(groups, lr) if rule.sparse else Muon(groups, lr, exact)
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
