"""Refuses what one process cannot run, with the reason, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlplace.errors import InputError, MissingError, show, unknown_name
from rlplace.plan.device_map import device_of_op, plan_groups
from rlplace.plan.plan import PlacementPlan, require_placement
from rlplace.runtime.distributed.joint.assign import planned_devices
from rlplace.runtime.held import tensors_in


def check_plan_runs_here(plan: PlacementPlan) -> None:
    """Refuses plans that need several processes, and plans that do not say what they place.

    Raises:
        InputError: With the reason.
    """
    if not isinstance(plan, PlacementPlan):
        raise InputError(f"apply: plan is a {type(plan).__name__}, not a PlacementPlan; rlplace.place makes one")
    instead = "one process for each of its devices runs it: rlplace.distribute, or 'rlplace run', under torchrun"
    require_placement(plan, "apply: plan", instead)
    planned_devices(plan)


def check_model(model: nn.Module) -> None:
    """Refuses modules without real weights, and modules that already run a plan.

    Raises:
        InputError: With the parameter and what to do.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"apply: model is a {type(model).__name__}, not a torch.nn.Module")
    if "report" in vars(model) and type(vars(model)["report"]).__name__ == "ApplyReport":
        raise InputError("apply: this module already runs a plan; build it again and apply the other plan to that")
    if "forward" in vars(model):
        raise InputError("apply: the module's forward was replaced on the instance, and a plan would replace it again")
    if hasattr(model, "report"):
        raise InputError("apply: the module has an attribute 'report', which apply wants to set; rename it")
    for name, tensor in tensors_in(model).items():
        if is_lazy(tensor):
            raise InputError(f"apply: {name!r} is not initialised yet; run the module once on a small batch first")
        if tensor.is_meta:
            raise InputError(
                f"apply: {name!r} is on the meta device and has no values; build or load the module with real weights"
            )


def check_module_names(model: nn.Module, plan: PlacementPlan) -> None:
    """Refuses a plan whose modules the model lacks.

    Raises:
        InputError: Naming the first one.
    """
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    named = [name.rpartition("/")[0] for name in device_of_op(plan)]
    for group, _ in plan_groups(plan):
        named += group.get("modules", ())
    for path in named:
        if path not in known:
            error = unknown_name("module", path, known)
            raise InputError(f"plan: it is for another model: {type(model).__name__} has no such module ({error})")


def check_devices(plan: PlacementPlan, devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """The devices as torch knows them, one per device of the plan.

    Raises:
        InputError: Too few, or not a device.
        MissingError: This machine does not have it.
    """
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise InputError("apply: devices must be a list, one entry per device of the plan")
    if plan.device_of_group.min(initial=0) < 0:
        raise InputError("plan: device_of_group holds a negative device")
    needed = int(plan.device_of_group.max(initial=0)) + 1
    if len(devices) < needed:
        raise InputError(f"apply: the plan uses {needed} devices, {len(devices)} given; name one per device of the plan")
    return tuple(torch_device(item) for item in devices)


def torch_device(item: Any) -> torch.device:
    """A device of this machine as torch knows it.

    Raises:
        InputError: Not a device.
        MissingError: This machine does not have it.
    """
    try:
        device = torch.device(item)
    except (RuntimeError, TypeError):
        raise InputError(f"apply: {show(item)} is not a device; for example 'cuda:0' or 'cpu'") from None
    try:
        return torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors say it
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise MissingError(f"apply: device {str(device)!r} is not usable on this machine: {reason}") from None
