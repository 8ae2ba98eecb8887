"""`rlplace.apply`: a module that runs a plan in one process over several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlplace.errors import InputError, MissingError, show, unknown_name
from rlplace.model.capture.fake import tensors_in
from rlplace.plan.device_map import closest, device_of_loss, device_of_op, most_below, plan_groups, round_to_modules
from rlplace.plan.plan import PlacementPlan, require_placement
from rlplace.runtime.base.steps import micro_batch
from rlplace.runtime.placement.assign import planned_devices
from rlplace.runtime.placement.forward import PlacedForward


@dataclass
class ApplyReport:
    """The devices on which a module runs its plan.

    Attributes:
        devices: The devices, by the plan's device index.
        device_of_module: Device index by path, where most ops of a module run.
        parameter_bytes: Bytes of parameters and buffers on each device.
        ops: Ops that the plan places.
        copies_per_forward: Copies between devices in one forward pass.
        loss_device: Where the plan puts the loss function it was captured with; None when the module computes its own loss.
        notes: Approximations, in sentences.
    """

    devices: tuple[str, ...]
    device_of_module: Mapping[str, int]
    parameter_bytes: tuple[int, ...]
    ops: int
    copies_per_forward: int
    loss_device: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        copies = f"{self.copies_per_forward} copies between devices per forward pass"
        return "\n".join([f"{self.ops} ops on {', '.join(self.devices)}, {copies}", *self.notes])


def apply(
    model: nn.Module, plan: PlacementPlan, devices: Sequence[torch.device | str], *, example_inputs: Any = None
) -> nn.Module:
    """Makes `model` train over several devices as `plan` says.

    The module is changed in place and returned: its parameters and buffers move to their devices (the `Parameter` objects stay
    the same), and its forward is replaced. ``state_dict``, parameter names, ties, ``train()`` and ``eval()`` are as before.
    Inputs may be on any device; outputs, the loss among them, stay on the device that made them. ``.report`` of the result is
    an `ApplyReport`. Build the optimizer from the result.

    Args:
        model: A module with real weights.
        plan: A plan for it, with groups of ops, for one process: one micro-batch.
        devices: One per device of the plan, for example ``["cuda:0", "cuda:1"]``.
        example_inputs: Inputs of one forward pass, as it was captured: a tuple of positional arguments or a dict of keyword
            arguments. Default: inputs like those in the plan's `source`.

    Returns:
        `model`.

    Raises:
        InputError: The plan cannot run here, with the reason; `model` is unchanged.
        MissingError: This machine lacks one of the devices.
    """
    if not isinstance(plan, PlacementPlan):
        raise InputError(f"apply: plan is a {type(plan).__name__}, not a PlacementPlan; rlplace.place makes one")
    instead = "one process for each of its devices runs it: rlplace.distribute, or 'rlplace run', under torchrun"
    require_placement(plan, "apply: plan", instead)
    planned_devices(plan)
    _check_model(model)
    _check_module_names(model, plan)
    on = _check_devices(plan, devices)
    forward = PlacedForward(model, plan, on, *micro_batch(plan, example_inputs))
    planned = device_of_op(plan)
    below = most_below((op.rpartition("/")[0], device) for op, device in planned.items())
    for name in tensors_in(model):
        forward.owners.setdefault(name, closest(below, name.rpartition(".")[0]) or 0)
    _move_tensors(model, {name: on[device] for name, device in forward.owners.items()})
    model.forward = forward  # type: ignore[method-assign]
    _refuse_deepcopy(model)
    first_path = {module: path for path, module in model.named_modules()}
    rounding = round_to_modules(plan, {path: first_path[m] for path, m in model.named_modules(remove_duplicate=False)})
    loss, tensors = device_of_loss(plan), tensors_in(model).values()
    followed = plan.order is None and plan.priority is None
    vars(model)["report"] = ApplyReport(
        devices=tuple(str(device) for device in on),
        device_of_module=rounding.device_of_module,
        parameter_bytes=tuple(sum(tensor.nbytes for tensor in tensors if tensor.device == device) for device in on),
        ops=len(planned),
        copies_per_forward=forward.copies,
        loss_device=None if loss is None else str(on[loss]),
        notes=() if followed else ("the plan's order of ops is not followed: one process issues ops in program order",),
    )
    return model


def _check_model(model: nn.Module) -> None:
    """Refuses modules without real weights, and modules that already run a plan."""
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


def _check_module_names(model: nn.Module, plan: PlacementPlan) -> None:
    """Refuses a plan whose modules the model lacks."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    named = [name.rpartition("/")[0] for name in device_of_op(plan)]
    for group, _ in plan_groups(plan):
        named += group.get("modules", ())
    for path in named:
        if path not in known:
            error = unknown_name("module", path, known)
            raise InputError(f"plan: it is for another model: {type(model).__name__} has no such module ({error})")


def _check_devices(plan: PlacementPlan, devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """Returns the devices as tensors name them, one per device of the plan."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise InputError("apply: devices must be a list, one entry per device of the plan")
    if plan.device_of_group.min(initial=0) < 0:
        raise InputError("plan: device_of_group holds a negative device")
    needed = int(plan.device_of_group.max(initial=0)) + 1
    if len(devices) < needed:
        raise InputError(f"apply: the plan uses {needed} devices, {len(devices)} given; name one per device of the plan")
    found = []
    for item in devices:
        try:
            device = torch.device(item)
        except (RuntimeError, TypeError):
            raise InputError(f"apply: {show(item)} is not a device; for example 'cuda:0' or 'cpu'") from None
        try:
            found.append(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise MissingError(f"apply: device {str(device)!r} is not usable on this machine: {reason}") from None
    return tuple(found)


def _move_tensors(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Moves parameters and buffers in place, by their first names.

    A `Parameter` stays the same object, so ties and existing references (an optimizer, ``nn.LSTM``'s weight list) survive.
    """
    held = tensors_in(model)
    gradients = [(name, tensor.grad) for name, tensor in held.items() if isinstance(tensor, nn.Parameter)]
    there = {id(tensor): device_of[name] for name, tensor in (*held.items(), *gradients)}
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        device = there.get(id(tensor))
        if device is None:  # a gradient that was moved with another name of its parameter
            return tensor
        return tensor.to(device) if isinstance(tensor, nn.Parameter) else moved.setdefault(id(tensor), tensor.to(device))

    for module in model.modules():
        module._apply(move, recurse=False)


def _refuse_deepcopy(module: nn.Module) -> None:
    """Makes ``copy.deepcopy(module)`` an error: the copy would share the original's forward, and run its weights."""

    def refuse(memo: Any) -> Any:
        raise InputError(f"deepcopy: this {type(module).__name__} runs a plan and cannot be copied; copy it before apply")

    vars(module)["__deepcopy__"] = refuse
