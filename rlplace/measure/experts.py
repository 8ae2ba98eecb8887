"""Tokens that the routers of mixtures send to each expert, counted on inputs of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlplace.errors import InputError
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.torch_adapter import pytree
from rlplace.model.zoo import LoadedModel
from rlplace.runtime.strategy.lists import expert_lists
from rlplace.runtime.strategy.mixtures import COUNT, NO_EXPERTS, form_of

Counts = Mapping[str, NDArray[np.int64]]


def count_tokens(model: LoadedModel, device: torch.device) -> Counts:
    """Counts the tokens that experts get in one forward.

    Args:
        model: It is moved to the device.
        device: Where the forward runs.

    Returns:
        By path of every mixture int64 [experts]; a token counts once for each expert that it chooses.

    Raises:
        InputError: No module is a mixture of experts.
    """
    counts: dict[str, NDArray[np.int64]] = {}
    mixtures = {path: (module, form) for path, module in model.module.named_modules() if (form := form_of(module)) is not None}
    mixtures = {path: found for path, found in mixtures.items() if found[1].chosen}  # others send every token to every expert
    lists = {path: mixture._modules[name] for path, mixture, name in expert_lists(model.module)}
    if not mixtures and not lists:
        raise InputError(f"measure: {NO_EXPERTS}")

    def note(path: str, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        chosen = inspect.signature(module.forward).bind(*args, **kwargs).arguments[name]
        made = torch.bincount(chosen.flatten(), minlength=getattr(module, COUNT)).cpu().numpy()
        counts[path] = counts[path] + made if path in counts else made

    hooks = [
        module.register_forward_pre_hook(partial(note, path, form.chosen), with_kwargs=True)
        for path, (module, form) in mixtures.items()
    ]

    def count(path: str, number: int, module: nn.Module, args: Any) -> None:
        counts[path][number] += args[0].numel() // args[0].shape[-1]

    for path, held in lists.items():
        experts: Any = held
        counts[path] = np.zeros(len(experts), dtype=np.int64)
        hooks += [expert.register_forward_pre_hook(partial(count, path, number)) for number, expert in enumerate(experts)]
    args, kwargs = split_inputs(pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), model.example_inputs))
    try:
        with torch.no_grad():
            model.module.to(device)(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def imbalance(counts: Iterable[NDArray[np.int64]]) -> tuple[tuple[int, float], ...]:
    """Returns pairs of an expert degree and the tokens of its busiest device over the mean.

    A step waits for the busiest device of every mixture in turn, so the factor is the mean over mixtures.

    Args:
        counts: Of every mixture int64 [experts].
    """
    every = list(counts)
    most = gcd(*map(len, every))
    degrees = [degree for degree in range(2, most + 1) if most % degree == 0]

    def factor(degree: int) -> float:
        loads = [tokens.reshape(degree, -1).sum(1) for tokens in every]
        return float(np.mean([load.max() / load.mean() for load in loads]))

    return tuple((degree, factor(degree)) for degree in degrees)
