"""The state of an optimizer by the names of parameters: what every plan of a model can save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlplace.errors import InputError, show
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.state.training_facts import check_setting
from rlplace.runtime.native.run import NativeModel

_NOTHING = ""
"""Name of the parameter without elements that a rank without parameters trains."""


def optimizer_tensors(model: nn.Module | NativeModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The flat state dict of `torch.distributed.checkpoint.state_dict` with ``flatten_optimizer_state_dict``."""
    flat: dict[str, Any] = {}
    for name, parameter in _named(model, optimizer):
        if name == _NOTHING:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            flat[f"state.{name}.{key}"] = value
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def optimizer_facts(model: nn.Module | NativeModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What of this rank's optimizer is no tensor, as plain data.

    Returns:
        ``groups``: per group its settings and ``parameters``, the names in it; ``numbers``: state that is no tensor, by
        parameter and key.
    """
    name_of = {id(parameter): name for name, parameter in _named(model, optimizer)}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        names = [name_of[id(p)] for p in group["params"]]
        groups.append({"settings": settings, "parameters": [name for name in names if name != _NOTHING]})
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(model, optimizer):
        plain = {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
        if plain and name != _NOTHING:
            numbers[name] = plain
    return {"groups": groups, "numbers": numbers}


def load_optimizer(
    model: nn.Module | NativeModel,
    optimizer: torch.optim.Optimizer,
    index: Mapping[str, Any],
    facts: Sequence[Mapping[str, Any]],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Gives an optimizer the state of a checkpoint.

    Args:
        model: Whose parameters it updates.
        optimizer: Any that has the same kind of state.
        index: Metadata by name.
        facts: `optimizer_facts` of all ranks that saved.
        load: Fills tensors by name, without ``optimizer.``; called once, on every rank.

    Raises:
        InputError: The checkpoint has no optimizer.
    """
    numbers = {name: values for rank in facts for name, values in rank.get("numbers", {}).items()}
    settings = [(group["settings"], set(group["parameters"])) for rank in facts for group in rank.get("groups", ())]
    if not settings:
        raise InputError("checkpoint: it was saved without an optimizer; leave the optimizer out")
    names = _named(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    for number, (name, parameter) in enumerate(names):
        if name == _NOTHING:
            continue
        prefix = f"optimizer.state.{name}."
        entry: dict[str, Any] = dict(numbers.get(name, {}))
        for key, item in index.items():
            if key.startswith(prefix) and isinstance(item, TensorStorageMetadata) and "." not in key[len(prefix) :]:
                entry[key[len(prefix) :]] = _empty(parameter, item)
        tensors |= {f"state.{name}.{key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)}
        if entry:
            state[number] = entry
    load(tensors)
    groups, taken = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        if len({tuple(sorted(state[number])) for number in range(taken, taken + count) if number in state}) > 1:
            raise InputError("checkpoint: a part of the optimizer state is missing; take an earlier checkpoint")
        own = [name for name, _ in names[taken : taken + count] if name != _NOTHING]
        saved = next((setting for setting, members in settings if not own or own[0] in members), None)
        if saved is None:
            raise InputError(f"checkpoint: its optimizer did not train {own[0]!r}")
        restored = {key: _restored(saved[key], value, key) for key, value in group.items() if key in saved and key != "params"}
        groups.append({**group, **restored, "params": list(range(taken, taken + count))})
        taken += count
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"checkpoint: its optimizer state does not fit this optimizer ({show(str(error))})") from None


def _named(model: nn.Module | NativeModel, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters in its order, each with the first of its names in the undistributed model."""
    if isinstance(model, DistributedModel):
        known = {id(parameter): name for name, parameter in model.trained()}
        known[id(model.nothing)] = _NOTHING
    elif isinstance(model, NativeModel):
        known = {id(parameter): model.first_name(name) for name, parameter in model.named_parameters()}
    else:
        known = {id(parameter): name for name, parameter in model.named_parameters()}
    named = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise InputError("checkpoint: the optimizer trains a parameter that is not one of the model's parameters()")
            named.append((known[id(parameter)], parameter))
    return named


def _empty(parameter: nn.Parameter, item: TensorStorageMetadata) -> torch.Tensor:
    """Where a state tensor is loaded to: like the parameter when it has its shape, else on the CPU, such as a step counter."""
    size, dtype = tuple(item.size), item.properties.dtype
    if size == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(size, dtype=dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _restored(saved: Any, present: Any, key: str) -> Any:
    check_setting(saved, present, f"its setting {key!r}")
    if isinstance(present, torch.Tensor):
        return torch.tensor(saved, dtype=present.dtype, device=present.device)
    return tuple(saved) if isinstance(present, tuple) else saved
