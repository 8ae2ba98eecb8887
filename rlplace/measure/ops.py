"""`measure_model`: times the ops and the whole training step of a model on a real device.

Ops are timed inside real training steps, not alone: an op alone finds its inputs in the cache and its output's memory at hand,
inside a step it finds what the ops before it left. On a processor the difference is up to a factor of three for element-wise
ops. Plain steps and marked steps alternate, so that both see the same machine. Plain steps during which the thread lost the
processor to another program are set aside.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from rlplace.captured import Recipe
from rlplace.cost.calls import op_directions, op_launches
from rlplace.cost.compute import op_dims_of, target_names
from rlplace.cost.curve import DIRECTIONS
from rlplace.cost.timings import ControlTiming, MeasuredModel, MeasuredOp, Measurement, StepTiming
from rlplace.errors import InputError
from rlplace.measure.walk import UPDATE as UPDATE_KEY
from rlplace.measure.walk import Marks, StepWalk, make_optimizer, trainable
from rlplace.model.graph.opgraph import UPDATE, OpGraph
from rlplace.model.torch_adapter import pytree
from rlplace.model.zoo import LoadedModel
from rlplace.records import plain
from rlplace.runtime.base.environment import (
    PeakMemory,
    clock_mhz,
    keep_freed_memory,
    own_clock,
    read_environment,
    time_control,
    time_run,
)
from rlplace.runtime.base.steps import train_step

WARMUP_STEPS = 3
MIN_REPEATS = 5
_LOST = 0.02  # of a step's time: more means that another program had the processor

Times = dict[Any, float]
Marked = tuple[Times, Times | None]
"""Of a step with marks the seconds by op name, and the host's likewise, None on a processor."""


@dataclass(frozen=True)
class PlainStep:
    """A step without marks.

    Attributes:
        seconds: Wall time.
        busy_s: Processor time of the thread; None where ops run elsewhere.
        page_faults: Pages that the process had to be given.
        peak_memory_bytes: None where the device does not tell.
    """

    seconds: float
    busy_s: float | None
    page_faults: int
    peak_memory_bytes: int | None

    @property
    def lost(self) -> bool:
        """True where another program had the processor."""
        return self.busy_s is not None and self.seconds - self.busy_s > _LOST * self.seconds


def measure_model(
    model: LoadedModel,
    graph: OpGraph,
    *,
    optimizer: str = "adam",
    device: str | torch.device = "cpu",
    ops: bool = True,
    step: bool = True,
    repeats: int = 25,
    time_limit_s: float = 120.0,
) -> Measurement:
    """Times a model on a device.

    On a processor the C library keeps freed memory instead of returning it and getting it again page by page: whether it does
    so by itself depends on the history of its heap and changes step times by up to a third.

    Args:
        model: With real weights, in training mode. It is moved to the device and trained for some steps.
        graph: Its captured step; `graph.source` says which model it is.
        optimizer: Name in `rlplace.model.capture.optimizers.OPTIMIZERS`.
        device: "cpu" or a CUDA device.
        ops: Whether to time single ops.
        step: Whether to time whole steps.
        repeats: Timed steps of each kind.
        time_limit_s: After this long no more steps are timed, but at least `MIN_REPEATS` of each kind are.

    Returns:
        The measurement. After an interrupt (Ctrl-C) it holds what was timed so far, and ``details["interrupted"]``.

    Raises:
        InputError: Nothing to measure.
        KeyboardInterrupt: Fewer than `MIN_REPEATS` steps of a kind were timed.
        CaptureError: Ops are wanted of a module that cannot be exported.
    """
    if not ops and not step:
        raise InputError("measure: nothing to measure; ask for ops, for the step or for both")
    if ops and graph.capture.get("method") != "export":
        raise InputError(
            f"measure: {graph.name} was captured by {graph.capture.get('method')}; ops are timed on exported graphs"
        )
    target = torch.device(device)
    allocator = keep_freed_memory() if target.type == "cpu" else "default"
    before = read_environment(target)
    shape, first = time_control(target)
    module, inputs = _on_device(model, target)
    walk = StepWalk(module, inputs, model.loss, optimizer, Marks(target)) if ops else None
    trained = walk.optimizer if walk is not None else make_optimizer(optimizer, trainable(module), module)[0]
    plain_step = partial(_plain_step, trained, module, inputs, model.loss, target)
    plain, marked, interrupted = _run_steps(walk, plain_step if step else None, repeats, time_limit_s)
    _, last = time_control(target)
    environment = msgspec.structs.replace(
        before,
        clock_end_mhz=clock_mhz(target),
        details={
            **before.details,
            "disturbed_steps": sum(step.lost for step in plain),
            "allocator": allocator,
            "page_faults_a_step": sum(step.page_faults for step in plain) // max(1, len(plain)),
            **({"interrupted": "yes"} if interrupted else {}),
        },
    )
    return Measurement(
        name=f"{graph.name} on {environment.device}",
        model=_model_of(graph, optimizer),
        environment=environment,
        cache="step",
        ops=() if walk is None else _measured_ops(graph, walk, marked),
        step=_step_timing(plain, marked) if step else None,
        control=ControlTiming(shape, first, last),
        host_s=statistics.median([times.get(None, 0.0) for times, _ in marked]) if ops else 0.0,
        launches=float(op_launches(graph).sum()) if target.type != "cpu" else 0.0,
    )


def load_and_measure(recipe: Recipe, **options: Any) -> Measurement:
    """Builds a model, captures its step and measures it; `options` go to `measure_model`."""
    model = recipe.load("cpu")
    graph = recipe.capture(model, source=plain(recipe))
    torch.manual_seed(0)
    return measure_model(model, graph, optimizer=recipe.optimizer, **options)


def _model_of(graph: OpGraph, optimizer: str) -> MeasuredModel:
    source = graph.source or {}
    return MeasuredModel(
        model=str(source.get("model", graph.name)),
        batch=int(source.get("batch", graph.samples)),
        seq=int(source.get("seq", 1)),
        dtype=str(source.get("dtype", graph.capture.get("dtype", "float32"))),
        optimizer=optimizer,
    )


def _on_device(model: LoadedModel, device: torch.device) -> tuple[nn.Module, Any]:
    """Returns the model and its inputs there, with no weight left at zero: zeros save power and raise clocks."""
    module = model.module.to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0.0, 0.01, generator=generator)
    return module, pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), model.example_inputs)


def _run_steps(
    walk: StepWalk | None, plain_step: Callable[[], PlainStep] | None, repeats: int, time_limit_s: float
) -> tuple[list[PlainStep], list[Marked], bool]:
    """Runs plain and marked steps in turn, or one of them; an interrupt ends them once there are enough.

    Returns:
        The steps without marks and those with marks, and whether a person stopped the timing early.
    """
    plain: list[PlainStep] = []
    marked: list[Marked] = []
    end = time.monotonic() + time_limit_s
    try:
        for index in range(WARMUP_STEPS + 4 * repeats):
            undisturbed = sum(not step.lost for step in plain) if plain_step is not None else repeats
            enough = min(undisturbed, len(marked) if walk is not None else repeats) >= repeats
            if enough or (time.monotonic() > end and index >= WARMUP_STEPS + MIN_REPEATS):
                break
            if plain_step is not None:
                plain.append(plain_step())
            if walk is not None and len(marked) < repeats:
                marked.append(walk.step())
            if index < WARMUP_STEPS:
                del plain[:], marked[:]
    except KeyboardInterrupt:
        if (plain_step and len(plain) < MIN_REPEATS) or (walk and len(marked) < MIN_REPEATS):
            raise
        return plain, marked, True
    return plain, marked, False


def _plain_step(optimizer: torch.optim.Optimizer, module: nn.Module, inputs: Any, loss: Any, device: torch.device) -> PlainStep:
    memory = PeakMemory(device)
    faults, begin = _page_faults(), time.thread_time()
    seconds = time_run(lambda: train_step(module, optimizer, inputs, loss=loss), device)
    busy_s = time.thread_time() - begin if own_clock(device) is time.thread_time else None
    return PlainStep(seconds, busy_s, _page_faults() - faults, memory.read_bytes())


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _step_timing(plain: Sequence[PlainStep], marked: Sequence[Marked]) -> StepTiming:
    lost = sorted(step.seconds for step in plain if step.lost)
    kept = [step.seconds for step in plain if not step.lost]
    used = kept + lost[: max(0, MIN_REPEATS - len(kept))]  # the least disturbed ones, while there are too few others
    low, middle, high = np.percentile(used, (10, 50, 90)).tolist()
    busy = [step.busy_s for step in plain if step.busy_s is not None]
    return StepTiming(
        seconds=middle,
        min_s=min(used),
        p10_s=low,
        p90_s=high,
        repeats=len(used),
        undisturbed=len(kept),
        busy_s=statistics.median(busy) if busy else None,
        instrumented_s=statistics.median([sum(times.values()) for times, _ in marked]) if marked else None,
        peak_memory_bytes=max((step.peak_memory_bytes for step in plain if step.peak_memory_bytes is not None), default=None),
    )


def _measured_ops(graph: OpGraph, walk: StepWalk, steps: Sequence[Marked]) -> tuple[MeasuredOp, ...]:
    """Returns one record per distinct op."""
    cost, shares = walk.mark_cost_s, _update_shares(graph, walk.group_of)
    counted = [{key: max(0.0, seconds - cost) for key, seconds in times.items()} for times, _ in steps]
    marked = [_with_updates(times, shares) for times in counted]
    issue = [_with_updates(times, shares) for _, times in steps if times is not None]
    names_of: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    described = describe_ops(graph)
    for name, key in zip(graph.op_names, described, strict=True):
        if name in marked[0]:
            names_of[key].append(name)
    named = set(graph.op_names)
    for index, (target, _, dtype, direction, *_) in enumerate(described):
        # Autograd of a view is no op of the graph, but the host walks through it.
        name = f"{graph.op_names[index]}.backward"
        if direction == "forward" and name in marked[0] and name not in named:
            names_of[(target, "view", dtype, "backward", 0.0, 0, ())].append(name)
    return tuple(_record(key, names, marked, issue) for key, names in names_of.items())


def describe_ops(graph: OpGraph) -> list[tuple[Any, ...]]:
    """Returns the identity of each op: target, kind, dtype, direction, FLOPs, bytes and dims."""
    directions = [DIRECTIONS[number] for number in op_directions(graph).tolist()]
    dims = [tuple(sorted(item.items())) for item in op_dims_of(graph)]
    flops, size = graph.op_flops.tolist(), graph.op_bytes.tolist()
    return list(zip(target_names(graph), graph.op_kind, graph.op_dtype, directions, flops, size, dims, strict=True))


def _update_shares(graph: OpGraph, group_of: Mapping[str, int]) -> dict[str, tuple[int, float]]:
    """Returns the optimizer group of each update op, and its share of the group's time, by bytes."""
    ops = zip(graph.op_names, graph.op_phase, graph.op_bytes.tolist(), strict=True)
    size = {name: size for name, phase, size in ops if phase == UPDATE and name in group_of}
    total: dict[int, int] = defaultdict(int)
    for name, own in size.items():
        total[group_of[name]] += own
    return {name: (group_of[name], own / max(total[group_of[name]], 1)) for name, own in size.items()}


def _with_updates(times: Times, shares: Mapping[str, tuple[int, float]]) -> Times:
    """Adds to each update op its share of its optimizer group."""
    empty = times.get((UPDATE_KEY, None), 0.0)
    return times | {
        name: times.get(name, 0.0) + share * max(0.0, times.get((UPDATE_KEY, group), 0.0) - empty)
        for name, (group, share) in shares.items()
    }


def _record(key: tuple[Any, ...], names: list[str], marked: list[Times], issue: list[Times]) -> MeasuredOp:
    target, kind, dtype, direction, flops, size, dims = key
    each, host = (np.array([[times.get(name, 0.0) for times in steps] for name in names]) for steps in (marked, issue))
    low, high = np.percentile(each, (10, 90)).tolist()
    return MeasuredOp(
        target=target,
        kind=kind,
        dtype=dtype,
        direction=direction,
        flops=flops,
        size_bytes=size,
        dims=dict(dims),
        count=len(names),
        seconds=float(np.median(each, axis=1).mean()),
        p10_s=low,
        p90_s=high,
        repeats=each.shape[1],
        issue_s=None if not issue else float(np.median(host, axis=1).mean()),
    )
