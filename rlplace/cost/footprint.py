"""Peak memory of every device, part by part, with the allocator's segments around it; and whether a plan fits.

`footprint` replays two training steps as torch runs them: weights are there from the start; gradients appear in the backward
and go with ``zero_grad``; optimizer state appears with the first update; activations, temporaries and received copies come and
go as the simulator says. All of it goes through the caching allocator (`rlplace.cost.allocator`). The planners' rule is
coarser: it counts gradients and optimizer state for the whole step and knows neither updates nor segments. Both peaks are
reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.presets import find_kind
from rlplace.cost.allocator import AllocatorOptions, replay
from rlplace.cost.lifetimes import (
    ACTIVATION,
    GRADIENTS,
    OPTIMIZER,
    RECEIVED,
    WEIGHTS,
    Holding,
    StepAllocations,
    holdings,
    lifetimes,
)
from rlplace.errors import InputError, unknown_name
from rlplace.model.capture.optimizers import KERNELS, OPTIMIZERS
from rlplace.model.graph.opgraph import OpGraph
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

PARTS = (
    "weights", "gradients", "optimizer", "activations", "temporaries", "received", "workspace", "slack",
    "context", "communication",
)  # fmt: skip
"""Parts of a device's memory. Received: copies from other devices. Workspace: cuBLAS. Slack: reserved
bytes beyond the requests. The last two are outside of the allocator."""

WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
"""cuBLAS workspace per handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp); it comes from the caching allocator."""

WORKSPACE_BYTES_OF_KIND = {"h100": 32 << 20, "h200": 32 << 20, "mi300x": 128 << 20, "cpu": 0}
"""Where it differs: compute capability 9.0, gfx94x; a host processor has none."""


@dataclass(frozen=True)
class MemoryOptions:
    """Options of a training script that its memory depends on.

    Attributes:
        allocator: Settings of the caching allocator.
        optimizer_kernel: "foreach" (torch's choice on GPUs), "fused" or "single"; decides the temporaries of an update.
        workspace_bytes: Replaces the cuBLAS workspace.
        context_bytes: Replaces the bytes of the CUDA context.
        communication_bytes: Replaces the bytes of the collective library.
        steps: Training steps that are replayed; optimizer state exists from the second one's start.
    """

    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    optimizer_kernel: str = "foreach"
    workspace_bytes: int | None = None
    context_bytes: int | None = None
    communication_bytes: int | None = None
    steps: int = 2

    def __post_init__(self) -> None:
        if self.optimizer_kernel not in KERNELS:
            raise unknown_name("optimizer kernel", self.optimizer_kernel, KERNELS)
        if self.steps < 1:
            raise InputError(f"memory: steps must be 1 or more, found {self.steps}")


@dataclass(frozen=True)
class Footprint:
    """Memory of one device.

    Attributes:
        device: Name of the device.
        parts: Bytes by entry of `PARTS` at the allocated peak; they add up to `total_bytes`.
        allocated_peak_bytes: Most that tensors take, rounding included (``torch.cuda.max_memory_allocated``).
        reserved_peak_bytes: Most that the allocator holds (``torch.cuda.max_memory_reserved``).
        total_bytes: `reserved_peak_bytes`, context and communication, as a monitor of the device shows them.
        first_step_bytes: Peak of allocated bytes in the first step, before there is optimizer state.
        simulated_peak_bytes: Peak by the planners' rule.
        capacity_bytes: Capacity of the device; None: no limit.
        fits: Whether both steps run without running out of memory; giving back cached segments counts as fitting.
        retries: Number of times that cached segments were released for that.
    """

    device: str
    parts: dict[str, int]
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    total_bytes: int
    first_step_bytes: int
    simulated_peak_bytes: int
    capacity_bytes: int | None
    fits: bool
    retries: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(self).items()}


def footprint(
    problem: Problem,
    plan: PlacementPlan | Sequence[int] | NDArray[Any],
    *,
    graph: OpGraph | None = None,
    options: MemoryOptions | None = None,
) -> list[Footprint]:
    """Returns peak memory of every device, part by part.

    Args:
        problem: The priced problem, at any level.
        plan: A plan for it, or a device number per group, int [G].
        graph: The captured graph, if `problem` is its op level: allocations are then single parameters.
        options: How the training script runs.

    Returns:
        One entry per device of the problem.

    Raises:
        InputError: The step does not complete, or the problem does not divide its resident bytes into parts.
    """
    options = options or MemoryOptions()
    devices = np.asarray(plan.device_of_group if isinstance(plan, PlacementPlan) else plan, dtype=np.int32)
    life = lifetimes(problem, plan)
    held = holdings(problem, graph)
    temporaries = _update_temporaries(problem, graph, options)
    return [
        _on_device(problem, life, [item for item in held if devices[item.group] == index], index, options, temporaries)
        for index in range(problem.num_devices)
    ]


def _update_temporaries(problem: Problem, graph: OpGraph | None, options: MemoryOptions) -> float:
    """Returns temporary copies of an update, in multiples of the optimizer state of the same parameter."""
    capture = graph.capture if graph is not None else (problem.source or {}).get("capture") or {}
    known = OPTIMIZERS.get(str(capture.get("optimizer")))
    if known is None or not known.moments:
        return 0.0
    copies = known.moments + bool(capture.get("master_weights"))
    return known.temporaries(options.optimizer_kernel) / copies


Event = tuple[int, bool]
"""An allocation by its number, and whether it starts."""


def _on_device(
    problem: Problem, life: StepAllocations, held: list[Holding], index: int, options: MemoryOptions, temporaries: float
) -> Footprint:
    """Replays all steps of one device; `temporaries` are those of an update, in multiples of optimizer state."""
    device, allocations = problem.devices[index], list[tuple[str, int]]()
    events, first_step = _events(life, held, index, device.kind or "cpu", options, temporaries, allocations)
    ids = [number for number, _ in events]
    sizes = [allocations[number][1] if starts else -1 for number, starts in events]
    context, communication = _outside(device, options)
    capacity = None if device.memory_bytes is None else device.memory_bytes - context - communication
    result = replay(ids, sizes, options=options.allocator, capacity_bytes=capacity)
    fits = result.out_of_memory is None
    if not fits:  # what it would take without a limit
        result = replay(ids, sizes, options=options.allocator)
    reserved = result.reserved_peak_bytes
    parts = dict.fromkeys(PARTS, 0)
    live = dict(events[: int(result.allocated_bytes.argmax()) + 1]) if events else {}
    for number in (number for number, starts in live.items() if starts):
        part, size = allocations[number]
        parts[part] += size
    parts["slack"] = reserved - sum(parts.values())
    parts |= {"context": context, "communication": communication}
    return Footprint(
        device=device.name,
        parts=parts,
        allocated_peak_bytes=result.allocated_peak_bytes,
        reserved_peak_bytes=reserved,
        total_bytes=reserved + context + communication,
        first_step_bytes=int(result.allocated_bytes[:first_step].max(initial=0)),
        simulated_peak_bytes=int(life.peak_memory_bytes[index]),
        capacity_bytes=device.memory_bytes,
        fits=fits,
        retries=result.retries,
    )


def _events(
    life: StepAllocations,
    held: list[Holding],
    index: int,
    kind: str,
    options: MemoryOptions,
    temporaries: float,
    allocations: list[tuple[str, int]],
) -> tuple[list[Event], int]:
    """Returns the events of all steps and how many are in the first; appends part and bytes to `allocations`."""

    def new(part: str, size: int) -> int:
        allocations.append((part, size))
        return len(allocations) - 1

    def all_of(numbers: list[int], starts: bool) -> list[Event]:
        return [(number, starts) for number in numbers]

    mine = life.device == index
    fixed = [new("weights", item.bytes) for item in held if item.part == WEIGHTS]
    workspace = WORKSPACE_BYTES_OF_KIND.get(kind, WORKSPACE_BYTES)
    workspace = workspace if options.workspace_bytes is None else options.workspace_bytes
    if workspace and (held or mine.any()):
        fixed.append(new("workspace", workspace))
    own = {ACTIVATION: "activations", RECEIVED: "received"}
    number_of = {
        item: new(own.get(int(life.kind[item]), "temporaries"), int(life.bytes[item])) for item in np.flatnonzero(mine).tolist()
    }
    start = life.op_start.tolist()
    body: list[tuple[int, int, int, bool]] = []  # position, whether an event of the step, allocation, whether it starts
    for gradient in (item for item in held if item.part == GRADIENTS):
        at = min((start[op] for op in gradient.makers), default=len(life.item))
        body.append((at, 0, new("gradients", gradient.bytes), True))
    gradients = [number for _, _, number, _ in body]
    for event in np.flatnonzero(mine[life.item]).tolist():
        body.append((event, 1, number_of[int(life.item[event])], bool(life.starts[event])))
    passes = [(number, starts) for _, _, number, starts in sorted(body, key=lambda row: row[:2])]
    states = [new("optimizer", item.bytes) for item in held if item.part == OPTIMIZER]
    scratch = [new("temporaries", int(temporaries * allocations[number][1])) for number in states]
    update = all_of(scratch, True) + all_of(scratch, False)  # of `optimizer.step()`: for all parameters at once,
    if options.optimizer_kernel != "foreach":  # or one by one
        update = [(number, starts) for number in scratch for starts in (True, False)]
    first = all_of(fixed, True) + passes + all_of(states, True) + update
    later = all_of(gradients, False) + passes + update  # zero_grad(set_to_none=True)
    return first + later * (options.steps - 1), len(first)


def _outside(device: Any, options: MemoryOptions) -> tuple[int, int]:
    """Returns bytes of a device that the allocator never sees: context and communication buffers."""
    kind = find_kind(device.kind or "")
    context = device.reserved_bytes if kind is None else min(device.reserved_bytes, kind.reserved_bytes)
    communication = device.reserved_bytes - context
    if options.context_bytes is not None:
        context = options.context_bytes
    if options.communication_bytes is not None:
        communication = options.communication_bytes
    return context, communication
