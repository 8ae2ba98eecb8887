"""Runs a plan in one process over several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.device_map import closest, device_of_loss, device_of_op, most_below, round_to_modules
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime import check
from rlplace.runtime.distributed.execution.batches import micro_batch
from rlplace.runtime.distributed.joint.forward import PlacedForward
from rlplace.runtime.held import tensors_in


@dataclass
class ApplyReport:
    """Where a module runs its plan.

    Attributes:
        devices: The devices, by the plan's device index.
        device_of_module: Device index by path, where most ops of a module run.
        parameter_bytes: Bytes of parameters and buffers on each device.
        ops: Ops that the plan places.
        copies_per_forward: Copies between devices in one forward pass.
        loss_device: Where the plan puts the loss function it was captured with; None when the module computes its own loss.
        notes: What was approximated, in sentences.
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
    model: nn.Module,
    plan: PlacementPlan,
    devices: Sequence[torch.device | str],
    *,
    example_inputs: Any = None,
) -> nn.Module:
    """Makes `model` train over several devices as `plan` says.

    The module is changed in place and returned: its parameters and buffers move to their devices (the `Parameter` objects stay
    the same), and its forward is replaced. ``state_dict``, parameter names, ties, ``train()`` and ``eval()`` are as before.
    Inputs may be on any device; outputs, the loss among them, stay on the device that made them. ``.report`` of the result says
    what was done. Build the optimizer from the result.

    Args:
        model: A module with real weights.
        plan: A plan for it, with groups of ops, for one process: one micro-batch.
        devices: One per device of the plan, for example ``["cuda:0", "cuda:1"]``.
        example_inputs: What one forward pass gets, as it was captured: a tuple of positional arguments or a dict of keyword
            arguments. Default: what the plan's `source` says the model was captured with.

    Returns:
        `model`.

    Raises:
        InputError: The plan cannot run here, with the reason; `model` is unchanged.
        MissingError: This machine lacks one of the devices.
    """
    check.check_plan_runs_here(plan)
    check.check_model(model)
    check.check_module_names(model, plan)
    on = check.check_devices(plan, devices)
    forward = PlacedForward(model, plan, on, *micro_batch(plan, example_inputs))
    planned = device_of_op(plan)
    below = most_below((op.rpartition("/")[0], device) for op, device in planned.items())
    for name in tensors_in(model):
        forward.owners.setdefault(name, closest(below, name.rpartition(".")[0]) or 0)
    move_tensors(model, {name: on[device] for name, device in forward.owners.items()})
    model.forward = forward  # type: ignore[method-assign]
    refuse_deepcopy(model)
    first_path = {module: path for path, module in model.named_modules()}
    rounding = round_to_modules(plan, {path: first_path[m] for path, m in model.named_modules(remove_duplicate=False)})
    loss = device_of_loss(plan)
    followed = plan.order is None and plan.priority is None
    vars(model)["report"] = ApplyReport(
        devices=tuple(str(device) for device in on),
        device_of_module=rounding.device_of_module,
        parameter_bytes=device_bytes(model, on),
        ops=len(planned),
        copies_per_forward=forward.copies,
        loss_device=None if loss is None else str(on[loss]),
        notes=() if followed else ("the plan's order of ops is not followed: one process issues ops in program order",),
    )
    return model


def move_tensors(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Moves parameters and buffers in place.

    A `Parameter` stays the same object, so ties and existing references (an optimizer, ``nn.LSTM``'s weight list) survive.

    Args:
        model: The module to change.
        device_of: Device by qualified name, for the first name of every parameter and buffer.
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


def device_bytes(model: nn.Module, devices: tuple[torch.device, ...]) -> tuple[int, ...]:
    """Bytes of parameters and buffers on each device; tied ones count once."""
    total = dict.fromkeys(devices, 0)
    for tensor in tensors_in(model).values():
        total[tensor.device] = total.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return tuple(total[device] for device in devices)


def refuse_deepcopy(module: nn.Module) -> None:
    """Makes ``copy.deepcopy(module)`` an error: the copy would share the original's forward, and run its weights."""

    def refuse(memo: Any) -> Any:
        raise InputError(f"deepcopy: this {type(module).__name__} runs a plan and cannot be copied; copy it before apply")

    vars(module)["__deepcopy__"] = refuse
