"""The state of an optimizer by the names of parameters, which every plan of a model can save and load.

In a checkpoint it is the flat state dict of `torch.distributed.checkpoint.state_dict`, whose own functions find neither the
parameters that a process does not hold nor state that is no tensor. Gathered on one process it is ``optimizer.state_dict()`` of
the undistributed model, whose parameter groups list parameters in the order of the model, so that a run can continue from it on
one device or by another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError, show
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import gather_objects
from rlplace.runtime.state.untrusted import OptimizerFacts, check_setting
from rlplace.runtime.state.whole import gather_values, local_part, own_part, seen, tensors_of

Named = list[tuple[str, nn.Parameter]]


def optimizer_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state of this rank's optimizer for a checkpoint.

    Returns:
        The flat state dict of `torch.distributed.checkpoint.state_dict` with ``flatten_optimizer_state_dict``; and, as plain
        data, all of it that is no tensor: ``groups``, per group its settings and ``parameters``, the names in it, and
        ``numbers``, state by parameter and key.
    """
    flat: dict[str, Any] = {}
    groups, numbers = [], {}
    for group, named in _groups(model, optimizer):
        settings = {key: value for key, value in group.items() if key != "params"}
        plain = {key: _plain(value) for key, value in settings.items()}
        groups.append({"settings": plain, "parameters": [name for name, _ in named]})
        for name, parameter in named:
            state = {key: seen(parameter, value) for key, value in optimizer.state.get(parameter, {}).items()}
            flat |= {f"state.{name}.{key}": value for key, value in state.items()}
            flat |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
            if found := {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}:
                numbers[name] = found
    return flat, {"groups": groups, "numbers": numbers}


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: Mapping[str, Any],
    facts: Sequence[OptimizerFacts],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Loads the state of a checkpoint into an optimizer.

    Args:
        model: Its parameters are those of the optimizer.
        optimizer: Any that has the same kind of state.
        index: Metadata by name.
        facts: The plain data of `optimizer_parts` of all ranks that saved.
        load: Fills tensors by name, without ``optimizer.``; called once, on every rank.

    Raises:
        InputError: The checkpoint has no optimizer.
    """
    numbers = {name: values for rank in facts for name, values in rank.numbers.items()}
    settings = [(group.settings, set(group.parameters)) for rank in facts for group in rank.groups]
    if not settings:
        raise InputError("checkpoint: it was saved without an optimizer; leave the optimizer out")
    parameters = {name: parameter for _, named in _groups(model, optimizer) for name, parameter in named}
    state: dict[str, dict[str, Any]] = {name: dict(numbers.get(name, {})) for name in parameters}
    for key, item in index.items():
        name, _, field = key.removeprefix("optimizer.state.").rpartition(".")
        if key.startswith("optimizer.state.") and name in state and isinstance(item, TensorStorageMetadata):
            state[name][field] = _empty(seen(parameters[name]), item)
    load({f"state.{name}.{key}": value for name, found in state.items() for key, value in tensors_of(found).items()})
    _set(model, optimizer, state, settings)


def whole_optimizer_state(model: DistributedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state dict of an optimizer over the whole model; every process calls it.

    Args:
        model: The distributed model.
        optimizer: Over its parameters, with equal parameter groups on all processes.

    Returns:
        On rank 0 the state dict, on the CPU; an empty dict on the other ranks.
    """
    held = [pair for _, named in _groups(model, optimizer) for pair in named]
    own = {
        name: {key: seen(parameter, value) for key, value in state.items()}
        for name, parameter in held
        if (state := optimizer.state.get(parameter))
    }
    values, order = gather_values(own, model.ranks.device), _whole_order(model, optimizer)
    number = {name: index for index, name in enumerate(name for group in order for name in group)}
    state = {number[name]: value for name, value in values.items()}
    settings = optimizer.state_dict()["param_groups"]
    groups = [{**mine, "params": [number[name] for name in listed]} for mine, listed in zip(settings, order, strict=True)]
    return {"state": state, "param_groups": groups} if model.ranks.rank == 0 else {}


def load_whole_optimizer_state(model: DistributedModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Takes this process's part of an optimizer's state; every process calls it with the same state.

    Args:
        model: The distributed model.
        optimizer: Over its parameters.
        state: From `whole_optimizer_state` or an optimizer over the undistributed model.

    Raises:
        InputError: It has other groups, or was made over other parameters.
    """
    order, saved = _whole_order(model, optimizer), state["param_groups"]
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group) for group in order]:
        raise InputError(
            f"optimizer state: its groups have {sizes} parameters, those of this optimizer {[len(group) for group in order]}; "
            "make the optimizer with the groups of the run that saved it"
        )
    number = {
        name: index
        for listed, group in zip(order, saved, strict=True)
        for name, index in zip(listed, group["params"], strict=True)
    }
    own = {
        name: {
            # State of the parameter's shape is cut as the parameter is.
            key: own_part(value, like)
            if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape != ()
            else value
            for key, value in state["state"].get(number[name], {}).items()
        }
        for _, named in _groups(model, optimizer)
        for name, like in ((name, seen(parameter)) for name, parameter in named)
    }
    _set(model, optimizer, own, [(group, set(listed)) for group, listed in zip(saved, order, strict=True)])


def _set(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Any]],
    settings: Sequence[tuple[Mapping[str, Any], set[str]]],
) -> None:
    """Loads state by the names of an optimizer's parameters, and into each group the settings of the saved group of them."""
    numbered: dict[int, Mapping[str, Any]] = {}
    groups, taken = [], 0
    for group, named in _groups(model, optimizer):
        count = len(group["params"])
        if len({tuple(sorted(state[name])) for name, _ in named if state.get(name)}) > 1:
            raise InputError("checkpoint: a part of the optimizer state is missing; take an earlier checkpoint")
        saved = next((setting for setting, members in settings if not named or named[0][0] in members), None)
        if saved is None:
            raise InputError(f"checkpoint: its optimizer did not train {named[0][0]!r}")
        restored = {key: _restored(saved[key], value, key) for key, value in group.items() if key in saved and key != "params"}
        groups.append({**group, **restored, "params": list(range(taken, taken + count))})
        for at, (name, parameter) in enumerate(named):
            if found := state.get(name):
                plain = seen(parameter) is not parameter  # a part of an embedding table
                numbered[taken + at] = {key: local_part(value) if plain else value for key, value in found.items()}
        taken += count
    try:
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"checkpoint: its optimizer state does not fit this optimizer ({show(str(error))})") from None


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Named]]:
    """Returns an optimizer's groups, and the parameters of each with the first of their names in the undistributed model.

    The parameter without elements that a rank without parameters trains is the only one of its group, and left out.
    """
    trained, nothing = model.named_parameters(), None
    if isinstance(model, DistributedModel):
        trained, nothing = model.trained(), model.nothing
    known = {id(parameter): name for name, parameter in trained}
    groups: list[tuple[dict[str, Any], Named]] = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter is not nothing]
        if any(id(parameter) not in known for parameter in parameters):
            raise InputError("checkpoint: the optimizer trains a parameter that is not one of the model's parameters()")
        groups.append((group, [(known[id(parameter)], parameter) for parameter in parameters]))
    return groups


def _whole_order(model: DistributedModel, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Returns the names of all processes by group, each in the order of the model."""
    everyone = gather_objects([{name for name, _ in named} for _, named in _groups(model, optimizer)])
    listed = [set().union(*group) for group in zip(*everyone, strict=True)]
    return [[name for name, _ in model.meta_model.named_parameters() if name in group] for group in listed]


def _empty(parameter: torch.Tensor, item: TensorStorageMetadata) -> torch.Tensor:
    """Allocates a state tensor: like the parameter when it has its shape, else on the CPU, such as a step counter."""
    size, dtype = tuple(item.size), item.properties.dtype
    if size == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(size, dtype=dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _restored(saved: Any, present: Any, key: str) -> Any:
    saved = _plain(saved)
    check_setting(saved, present, f"its setting {key!r}")
    if isinstance(present, torch.Tensor):
        return torch.tensor(saved, dtype=present.dtype, device=present.device)
    return tuple(saved) if isinstance(present, tuple) else saved
