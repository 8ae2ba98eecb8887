"""Reasons why no plan exists or was found: the device, the missing bytes, and what would make it fit."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.placement.common.bounds import largest_op_bytes, live_bytes
from rlplace.problem import Problem
from rlplace.simulator.timeline import Timeline
from rlplace.text import bytes_text

_SEARCH = "planner 'annealing', finer groups, more or larger devices, or a smaller batch"
_HARDER = "a longer search, finer groups, more or larger devices, or a smaller batch"
_ADVICE = {"single": "planner 'best', which splits the model", "annealing": _HARDER, "local_search": _HARDER}


def check_possible(problem: Problem) -> None:
    """Raises when a bound proves that the problem has no feasible plan.

    Raises:
        InfeasibleError: A group is allowed nowhere, a group alone exceeds every allowed device, the groups fixed to a device
            exceed it, or everything together exceeds all devices.
    """
    for check in (_check_nowhere, _check_largest, _check_fixed, _check_total):
        check(problem)


def raise_infeasible(problem: Problem, line: Timeline | None, *, planner: str) -> NoReturn:
    """Raises the error of a planner that found no feasible plan.

    Args:
        problem: The problem; when its bounds prove that no plan exists, that is the message.
        line: Simulation of the closest assignment, if any.
        planner: Name for the message.

    Raises:
        InfeasibleError: Always.
    """
    check_possible(problem)
    if line is None:
        raise InfeasibleError(
            f"{planner} has no plan to offer: none that it can build respects null times and memory, or its time was "
            "too short; try planner 'annealing', finer groups, or more time"
        )
    if line.step_time_s is None:
        raise InfeasibleError(
            f"{planner} found no plan that avoids null times and missing links ({line.violations[0]}); "
            "add the link, give the ops a time on another device, or try planner 'single'"
        )
    limits = problem.capacity_bytes
    over = np.maximum(line.peak_memory_bytes - limits, 0.0)
    device, short = int(over.argmax()), int(over.max())
    spare = float(np.maximum(limits - line.peak_memory_bytes, 0.0).sum())
    others = f" ({bytes_text(spare)} are free on other devices)" if math.isfinite(spare) and spare > 0 else ""
    raise InfeasibleError(
        f"{planner} found no plan that fits: its closest one needs {bytes_text(line.peak_memory_bytes[device])} on "
        f"{problem.devices[device].name}, which has {bytes_text(limits[device])}: {short} bytes short{others}; "
        f"try {_ADVICE.get(planner, _SEARCH)}",
        device=problem.devices[device].name,
        short_bytes=short,
    )


def _check_nowhere(problem: Problem) -> None:
    nowhere = ~problem.group_allowed.any(axis=1)
    if not nowhere.any():
        return
    group = int(np.flatnonzero(nowhere)[0])
    fixed = int(problem.group_device[group])
    ops = np.flatnonzero(problem.op_group == group)
    allowed = problem.op_allowed[ops]
    if fixed >= 0:
        op = problem.op_names[ops[int(np.flatnonzero(~allowed[:, fixed])[0])]]
        device = problem.devices[fixed].name
        raise InfeasibleError(
            f"group {problem.group_names[group]!r} is fixed to {device}, where its op {op!r} cannot run; "
            "fix it elsewhere or give the op a time there",
            device=device,
        )
    raise InfeasibleError(
        f"group {problem.group_names[group]!r} may sit nowhere: no device runs all of its {len(ops)} ops; "
        "give them a time on a common device or split the group"
    )


def _check_largest(problem: Problem) -> None:
    """Checks that a group's resident bytes, and its largest op's temporaries, outputs and inputs, fit on one device."""
    needed = problem.resident_bytes + largest_op_bytes(problem)
    limit = np.where(problem.group_allowed, problem.memory_limit_bytes[None, :], -np.inf).max(axis=1)
    short = needed - limit
    if not (short > 0).any():
        return
    group = int(short.argmax())
    device = int(np.where(problem.group_allowed[group], problem.memory_limit_bytes, -np.inf).argmax())
    relax = _relaxations(problem, float(short[group]), batch=bool(problem.resident_bytes[group] <= limit[group]))
    raise InfeasibleError(
        f"group {problem.group_names[group]!r} alone needs {bytes_text(needed[group])}, the largest device it may sit on, "
        f"{problem.devices[device].name}, offers {bytes_text(limit[group])}: {int(short[group])} bytes short; "
        f"use finer groups, a device with at least {bytes_text(needed[group])}, or {relax}",
        device=problem.devices[device].name,
        short_bytes=int(short[group]),
    )


def _check_fixed(problem: Problem) -> None:
    for device, item in enumerate(problem.devices):
        mine = problem.group_device == device
        needed = int(problem.resident_bytes[mine].sum())
        if needed > problem.memory_limit_bytes[device]:
            short = needed - int(problem.memory_limit_bytes[device])
            raise InfeasibleError(
                f"the {int(mine.sum())} groups fixed to {item.name} need {bytes_text(needed)} resident, it offers "
                f"{bytes_text(problem.memory_limit_bytes[device])}: {short} bytes short; unfix some of them",
                device=item.name,
                short_bytes=short,
            )


def _check_total(problem: Problem) -> None:
    capacity = float(problem.memory_limit_bytes.sum())
    if not math.isfinite(capacity):
        return
    resident = int(problem.resident_bytes.sum())
    live = live_bytes(problem)
    if resident + live <= capacity:
        return
    short = resident + live - int(capacity)
    what = f"groups need {bytes_text(resident)} resident"
    if resident <= capacity:
        what += f" and {bytes_text(live)} of activations when the backward pass starts"
    else:
        short = resident - int(capacity)
    count = len(problem.devices)
    offer = f"{count} devices together offer" if count > 1 else f"{problem.devices[0].name} offers"
    raise InfeasibleError(
        f"the model does not fit: {what}, {offer} {bytes_text(capacity)}: {bytes_text(short)} ({short} bytes) short; "
        f"try {_more_devices(problem, resident + live)}, or {_relaxations(problem, short, batch=resident <= capacity)}",
        short_bytes=short,
    )


def _more_devices(problem: Problem, needed: float) -> str:
    limits = problem.memory_limit_bytes
    kinds = {device.kind for device in problem.devices}
    largest = float(limits.max())
    if largest <= 0:
        return "devices with free memory"
    if (limits == limits[0]).all():
        kind = next(iter(kinds)) if len(kinds) == 1 and None not in kinds else "this kind"
        return f"at least {math.ceil(needed / largest)} devices of {kind} ({problem.num_devices} given)"
    device = problem.devices[int(limits.argmax())]
    more = math.ceil((needed - float(limits.sum())) / largest)
    return f"at least {more} more {'device' if more == 1 else 'devices'} like {device.name}"


def _relaxations(problem: Problem, short: float, *, batch: bool) -> str:
    """Changes that a user can make, with the bytes that they free where the problem has them.

    Args:
        problem: The problem.
        short: Bytes missing.
        batch: Whether a smaller batch can help, which it cannot where resident bytes alone are too many.
    """
    known = problem.optimizer_bytes >= 0
    optimizer = int(problem.optimizer_bytes[known].sum())
    sgd = "sgd instead of adam"
    if optimizer > 0:
        enough = "enough" if optimizer >= short else "not enough alone"
        sgd = f"plain sgd (frees {bytes_text(optimizer)} of optimizer state, {enough})"
    return f"{'a smaller batch, ' if batch else ''}{sgd}, or bf16"
