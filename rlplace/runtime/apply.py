"""Runs a plan in one process over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlplace.plan.device_map import closest, device_of_loss, device_of_op, most_below, round_to_modules
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime import check
from rlplace.runtime.distributed.graph.inputs import micro_batch
from rlplace.runtime.distributed.joint.forward import PlacedForward
from rlplace.runtime.report import ApplyReport
from rlplace.runtime.transfer import device_bytes, move_tensors, refuse_deepcopy


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
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
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
