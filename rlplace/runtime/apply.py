"""Runs a plan in one process over several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.device_map import ModuleRounding, device_of_loss, device_of_op, round_to_modules
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime import check, module_level
from rlplace.runtime.distributed.graph.inputs import call_arguments
from rlplace.runtime.distributed.joint.forward import JointForward
from rlplace.runtime.op_level import CannotRunError, OpLevelForward
from rlplace.runtime.report import ApplyReport
from rlplace.runtime.transfer import device_bytes, move_tensors, refuse_deepcopy

LEVELS = ("op", "module")


def apply(
    model: nn.Module,
    plan: PlacementPlan,
    devices: Sequence[torch.device | str],
    *,
    example_inputs: Any = None,
    level: str | None = None,
) -> nn.Module:
    """Makes `model` train over several devices as `plan` says.

    The module is changed in place and returned: its parameters and buffers move to their devices (the `Parameter` objects stay
    the same), and its forward is replaced. ``state_dict``, parameter names, ties, ``train()`` and ``eval()`` are as before.
    Inputs may be on any device; outputs, the loss among them, stay on the device that made them. ``.report`` of the result says
    what was done. Build the optimizer from the result.

    Args:
        model: A module with real weights.
        plan: A plan for it, with groups, for one process: one micro-batch, one replica.
        devices: One per device of the plan, for example ``["cuda:0", "cuda:1"]``.
        example_inputs: What one forward pass gets, a tuple of positional arguments or a dict of keyword arguments; needed for
            the op level.
        level: ``"op"`` runs every op on its own device, ``"module"`` rounds the plan to whole modules; None takes the op level
            where it can and says in the report why not.

    Returns:
        `model`.

    Raises:
        InputError: The plan cannot run here, with the reason; `model` is unchanged.
        MissingError: This machine lacks one of the devices.
    """
    if level not in (None, *LEVELS):
        raise InputError(f"apply: level is {level!r}; it must be 'op', 'module' or None")
    check.check_plan_runs_here(plan)
    check.check_model(model)
    check.check_module_names(model, plan)
    torch_devices = check.check_devices(plan, devices)
    why_not_op = "the module level was asked for"
    backward = check.backward_elsewhere(plan)
    if level != "module":
        try:
            vars(model)["report"] = _apply_ops(model, plan, torch_devices, example_inputs)
            return model
        except CannotRunError as error:
            why_not_op = str(error)
        if level == "op" and backward is None:
            raise InputError(f"apply: the model cannot run at op level: {why_not_op}; or use level='module'")
    if backward is not None:
        raise InputError(
            f"plan: {backward!r} runs elsewhere than its forward, which takes the op level, but {why_not_op}; "
            "or plan the problem that is not split"
        )
    vars(model)["report"] = _apply_modules(model, plan, torch_devices, why_not_op)
    return model


def _apply_ops(model: nn.Module, plan: PlacementPlan, devices: tuple[torch.device, ...], example_inputs: Any) -> ApplyReport:
    if example_inputs is None:
        raise CannotRunError("no example_inputs were given")
    if "forward" in vars(model):
        raise CannotRunError("the module's forward was replaced on the instance")
    planned = device_of_op(plan)
    if not planned:
        raise CannotRunError("the plan was made at module granularity and names no ops")
    rounding, device_of_module, canonical = _module_devices(model, plan, devices)
    if check.backward_elsewhere(plan) is None:
        forward = OpLevelForward(model, devices, planned, device_of_module, call_arguments(example_inputs))
    else:
        forward = JointForward(model, plan, devices, planned, device_of_module, call_arguments(example_inputs))
    device_of = _tensor_devices(model, device_of_module, canonical) | forward.device_of_held
    move_tensors(model, device_of)
    forward.fix_in_place(device_of)
    model.forward = forward  # type: ignore[method-assign]
    refuse_deepcopy(model)
    return ApplyReport(
        level="op",
        devices=tuple(str(device) for device in devices),
        why_not_op=None,
        device_of_module={path: devices.index(device_of_module[path]) for path in rounding.device_of_module},
        parameter_bytes=device_bytes(model, devices),
        ops=forward.ops,
        ops_moved=forward.ops_moved,
        copies_per_forward=forward.first.copies,
        loss_device=_loss_device(plan, devices),
        notes=tuple(_notes(plan, forward.ops_moved, 0)),
    )


def _module_devices(
    model: nn.Module, plan: PlacementPlan, devices: tuple[torch.device, ...]
) -> tuple[ModuleRounding, dict[str, torch.device], dict[str, str]]:
    """The rounded plan, the device of every module, and the first path of each module by any of its paths."""
    first_path = {module: path for path, module in model.named_modules()}
    canonical = {path: first_path[module] for path, module in model.named_modules(remove_duplicate=False)}
    rounding = round_to_modules(plan, canonical)
    device_of_module = module_level.spread(model, rounding.device_of_module, devices, int(plan.device_of_group[0]))
    return rounding, device_of_module, canonical


def _tensor_devices(
    model: nn.Module, device_of_module: Mapping[str, torch.device], canonical: Mapping[str, str]
) -> dict[str, torch.device]:
    """Every parameter and buffer with its module."""
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return {name: device_of_module[canonical[name.rpartition(".")[0]]] for name in names}


def _apply_modules(
    model: nn.Module, plan: PlacementPlan, devices: tuple[torch.device, ...], why_not_op: str | None
) -> ApplyReport:
    rounding, device_of_module, canonical = _module_devices(model, plan, devices)
    move_tensors(model, _tensor_devices(model, device_of_module, canonical))
    report = ApplyReport(
        level="module",
        devices=tuple(str(device) for device in devices),
        why_not_op=why_not_op,
        device_of_module={path: devices.index(device) for path, device in device_of_module.items()},
        parameter_bytes=device_bytes(model, devices),
        ops=rounding.ops,
        ops_moved=rounding.ops_moved,
        copies_per_forward=None,
        loss_device=_loss_device(plan, devices),
        notes=tuple(_notes(plan, 0, rounding.modules_split)),
    )
    module_level.install_moves(model, device_of_module, report)
    return report


def _loss_device(plan: PlacementPlan, devices: tuple[torch.device, ...]) -> str | None:
    index = device_of_loss(plan)
    return None if index is None else str(devices[index])


def _notes(plan: PlacementPlan, ops_moved: int, modules_split: int) -> list[str]:
    notes = []
    if ops_moved:
        notes.append(f"{ops_moved} ops run with the tensor that they are a view of or write to, not where the plan says")
    if modules_split:
        notes.append(f"{modules_split} modules whose ops the plan spreads over devices run whole, where most of their ops are")
    if plan.order is not None or plan.priority is not None:
        notes.append("the plan's order of ops is not followed: one process issues ops in program order")
    return notes
