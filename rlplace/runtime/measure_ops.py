"""`measure_model`: times the ops and the whole training step of a model on a real device.

Ops are timed inside real training steps, not alone: an op alone finds its inputs in the cache and its output's memory at hand,
inside a step it finds what the ops before it left. On a processor the difference is up to a factor of three for element-wise
ops. Plain steps and marked steps alternate, so that both see the same machine. Plain steps during which the thread lost the
processor to another program are set aside.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from rlplace.cost.calls import op_directions
from rlplace.cost.measurement import ControlTiming, MeasuredModel, MeasuredOp, Measurement, StepTiming
from rlplace.cost.table import DIRECTIONS
from rlplace.cost.targets import op_dims_of, target_names
from rlplace.errors import InputError
from rlplace.graph.opgraph import UPDATE, OpGraph
from rlplace.runtime.environment import clock_mhz, read_environment, time_control
from rlplace.runtime.host_memory import keep_freed_memory, page_faults
from rlplace.runtime.marks import Marks
from rlplace.runtime.measure import time_step
from rlplace.runtime.step_walk import UPDATE as UPDATE_KEY
from rlplace.runtime.step_walk import StepWalk, make_optimizer, trainable
from rlplace.zoo import LoadedModel

WARMUP_STEPS = 3
MIN_REPEATS = 5
_LOST = 0.02  # of a step's time: more means that another program had the processor

Times = dict[Any, float]


@dataclass
class Samples:
    """Raw times.

    Attributes:
        plain: Wall seconds of steps without marks during which the thread kept the processor.
        lost: Wall seconds of the others.
        busy: Processor seconds of the thread in all of these steps; empty where ops run elsewhere.
        marked: Of each step with marks the seconds by op name, and the host's likewise, None on a processor.
        peak_memory_bytes: Peak of the steps without marks; None where the device does not tell.
        page_faults: Number of them in all steps without marks.
        interrupted: Whether a person stopped the timing early.
    """

    plain: list[float] = dataclasses.field(default_factory=list)
    lost: list[float] = dataclasses.field(default_factory=list)
    busy: list[float] = dataclasses.field(default_factory=list)
    marked: list[tuple[Times, Times | None]] = dataclasses.field(default_factory=list)
    peak_memory_bytes: int | None = None
    page_faults: int = 0
    interrupted: bool = False


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
    keep_memory: bool = True,
) -> Measurement:
    """Times a model on a device.

    Args:
        model: With real weights, in training mode. It is moved to the device and trained for some steps.
        graph: Its captured step; `graph.source` says which model it is.
        optimizer: "sgd", "momentum", "adam" or "adamw".
        device: "cpu" or a CUDA device.
        ops: Whether to time single ops.
        step: Whether to time whole steps.
        repeats: Timed steps of each kind.
        keep_memory: On a processor, tell the C library to keep freed memory instead of handing it back and getting it again
            page by page: whether it does so by itself depends on the history of its heap and changes step times by up to a
            third.
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
    allocator = keep_freed_memory() if target.type == "cpu" and keep_memory else "default"
    before = read_environment(target)
    shape, first = time_control(target)
    module, inputs = _on_device(model, target)
    walk = StepWalk(module, inputs, model.loss, optimizer, Marks(target)) if ops else None
    trained = walk.optimizer if walk is not None else make_optimizer(optimizer, trainable(module))[0]

    def plain(samples: Samples) -> None:
        _plain_step(samples, trained, module, inputs, model.loss, target)

    samples = _run_steps(walk, plain if step else None, repeats, time_limit_s)
    _, last = time_control(target)
    environment = msgspec.structs.replace(
        before,
        clock_end_mhz=clock_mhz(target),
        details={
            **before.details,
            "disturbed_steps": len(samples.lost),
            "allocator": allocator,
            "page_faults_a_step": samples.page_faults // max(1, len(samples.plain) + len(samples.lost)),
            **({"interrupted": "yes"} if samples.interrupted else {}),
        },
    )
    marked = [sum(times.values()) for times, _ in samples.marked]
    return Measurement(
        name=f"{graph.name} on {environment.device}",
        model=_model_of(graph, optimizer),
        environment=environment,
        cache="step",
        ops=() if walk is None else _measured_ops(graph, walk, samples),
        step=_step_timing(samples, marked) if step else None,
        control=ControlTiming(shape, first, last),
        host_s=statistics.median([times.get(None, 0.0) for times, _ in samples.marked]) if ops else 0.0,
    )


def load_and_measure(
    spec: str,
    *,
    batch: int = 8,
    seq: int = 512,
    dtype: str = "fp32",
    optimizer: str = "adam",
    device: str | torch.device = "cpu",
    **options: Any,
) -> Measurement:
    """Builds the model that a MODEL text names, captures its step and measures it; `options` go to `measure_model`."""
    from rlplace.graph.capture import capture
    from rlplace.zoo import load_model

    source = {"model": spec, "batch": batch, "seq": seq, "dtype": dtype, "optimizer": optimizer}
    torch.manual_seed(0)
    model = load_model(spec, batch=batch, seq=seq, dtype=dtype, device="cpu")
    graph = capture(model.module, model.example_inputs, loss=model.loss, optimizer=optimizer, name=model.name, source=source)
    return measure_model(model, graph, optimizer=optimizer, device=device, **options)


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
    """The model and its inputs there, with no weight left at zero: zeros save power and raise clocks."""
    module = model.module.to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0.0, 0.01, generator=generator)
    inputs = torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, model.example_inputs
    )
    return module, inputs


def _run_steps(walk: StepWalk | None, plain: Callable[[Samples], None] | None, repeats: int, time_limit_s: float) -> Samples:
    """Plain and marked steps in turn, or one of them; an interrupt ends them once there are enough to tell something."""
    samples = Samples()
    end = time.monotonic() + time_limit_s
    try:
        for index in range(WARMUP_STEPS + 4 * repeats):
            warm = index >= WARMUP_STEPS
            enough = min(len(samples.plain) if plain else repeats, len(samples.marked) if walk else repeats)
            if enough >= repeats or (time.monotonic() > end and index >= WARMUP_STEPS + MIN_REPEATS):
                break
            if plain is not None:
                plain(samples if warm else Samples())
            if walk is not None and len(samples.marked) < repeats:
                marked = walk.run()
                if warm:
                    samples.marked.append(marked)
    except KeyboardInterrupt:
        plain_steps = len(samples.plain) + len(samples.lost)
        if (plain and plain_steps < MIN_REPEATS) or (walk and len(samples.marked) < MIN_REPEATS):
            raise
        samples.interrupted = True
    return samples


def _plain_step(
    samples: Samples, optimizer: torch.optim.Optimizer, module: nn.Module, inputs: Any, loss: Any, device: torch.device
) -> None:
    """One step without marks."""
    cuda = device.type == "cuda"
    own = not cuda and torch.get_num_threads() == 1  # the thread that calls does all the work
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    faults, begin = page_faults(), time.thread_time()
    seconds = time_step(module, optimizer, inputs, loss=loss, devices=[device])
    busy = time.thread_time() - begin
    if cuda:
        samples.peak_memory_bytes = max(samples.peak_memory_bytes or 0, int(torch.cuda.max_memory_allocated(device)))
    samples.page_faults += page_faults() - faults
    (samples.lost if own and seconds - busy > _LOST * seconds else samples.plain).append(seconds)
    if own:
        samples.busy.append(busy)


def _step_timing(samples: Samples, marked: Sequence[float]) -> StepTiming:
    missing = max(0, MIN_REPEATS - len(samples.plain))
    plain = samples.plain + sorted(samples.lost)[:missing]  # the least disturbed ones, while there are too few others
    low, middle, high = np.percentile(plain, (10, 50, 90)).tolist()
    return StepTiming(
        seconds=middle,
        min_s=min(plain),
        p10_s=low,
        p90_s=high,
        repeats=len(plain),
        undisturbed=len(samples.plain),
        busy_s=statistics.median(samples.busy) if samples.busy else None,
        instrumented_s=statistics.median(marked) if marked else None,
        peak_memory_bytes=samples.peak_memory_bytes,
    )


def _measured_ops(graph: OpGraph, walk: StepWalk, samples: Samples) -> tuple[MeasuredOp, ...]:
    """One record per distinct op."""
    cost = walk.mark_cost_s
    counted = [{key: max(0.0, seconds - cost) for key, seconds in times.items()} for times, _ in samples.marked]
    marked = [_with_updates(times, graph, walk) for times in counted]
    issue = [_with_updates(times, graph, walk) for _, times in samples.marked if times is not None]
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
    """What tells each op from others: target, kind, dtype, direction, FLOPs, bytes and dims."""
    directions = [DIRECTIONS[number] for number in op_directions(graph).tolist()]
    dims = [tuple(sorted(item.items())) for item in op_dims_of(graph)]
    flops, size = graph.op_flops.tolist(), graph.op_bytes.tolist()
    return list(zip(target_names(graph), graph.op_kind, graph.op_dtype, directions, flops, size, dims, strict=True))


def _with_updates(times: Times, graph: OpGraph, walk: StepWalk) -> Times:
    """Adds to each update op its share of its optimizer group: an equal one, or by bytes where shapes are mixed."""
    result = dict(times)
    members: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(graph.op_names):
        if graph.op_phase[index] == UPDATE and name in walk.group_of:
            members[walk.group_of[name]].append(index)
    empty = times.get((UPDATE_KEY, None), 0.0)
    for group, indices in members.items():
        total = max(0.0, times.get((UPDATE_KEY, group), 0.0) - empty)
        weights = graph.op_bytes[indices].astype(np.float64)
        for index, share in zip(indices, (weights / max(weights.sum(), 1.0)).tolist(), strict=True):
            name = graph.op_names[index]
            result[name] = result.get(name, 0.0) + total * share
    return result


def _record(key: tuple[Any, ...], names: list[str], marked: list[Times], issue: list[Times]) -> MeasuredOp:
    target, kind, dtype, direction, flops, size, dims = key
    each = np.array([[times.get(name, 0.0) for times in marked] for name in names])
    low, high = np.percentile(each, (10, 90)).tolist()
    host = np.array([[times.get(name, 0.0) for times in issue] for name in names]) if issue else None
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
        issue_s=None if host is None else float(np.median(host, axis=1).mean()),
    )
