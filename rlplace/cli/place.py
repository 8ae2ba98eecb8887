"""``rlplace place``: from a model and a cluster to a plan."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlplace.cli.common import (
    add_model_options,
    check_agent,
    compile_first,
    load,
    model_options,
    natural,
    positive,
    print_json,
    print_table,
    say,
    seconds,
)
from rlplace.cli.memory import add_memory_options, check_memory_options, show_memory, warn_of_update, with_memory
from rlplace.cli.strategies import count, show_strategies
from rlplace.cli.strategy import PLACEMENT, place_strategy, show_strategy
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem
from rlplace.schedule import FREE_SCHEDULES
from rlplace.text import gb, ms

HELP = "plan where every part of a model runs"
EXAMPLE = "example: rlplace place hf:gpt2 --cluster a100-80g:4 --out gpt2.plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="hf:TYPE, zoo:NAME, package.module:function or file.py:function (runs that code), *.problem.json",
    )
    parser.add_argument("--cluster", metavar="C", help="KIND:COUNT, KIND:HOSTSxCOUNT, joined by +; host (default); *.toml")
    parser.add_argument("--planner", default="agent", metavar="NAME", help="planner (agent); 'rlplace info' lists them")
    parser.add_argument("--agent", default="default", metavar="NAME", help="checkpoint name or folder (default)")
    parser.add_argument("--time-limit", type=seconds, default=5.0, metavar="S", help="seconds for the planner (5)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed (0)")
    parser.add_argument("--microbatches", type=positive, default=1, metavar="M", help="micro-batches of --batch samples (1)")
    parser.add_argument(
        "--schedule", choices=FREE_SCHEDULES, help="how micro-batches take turns (the planner's own way, mostly list)"
    )
    parser.add_argument(
        "--batch-curve",
        metavar="FILE",
        help="epochs by global batch: --batch is then of a replica, the number of replicas is chosen",
    )
    parser.add_argument(
        "--space",
        metavar="S",
        help='choose the whole strategy of --global-batch samples: auto, all, or "tensor=1,2 sharding=0"; placement (default)',
    )
    parser.add_argument("--calls", type=positive, metavar="N", help="with --space: strategies to evaluate at most")
    add_memory_options(parser)
    parser.add_argument("--out", metavar="P.plan.json", help="write the plan")
    parser.add_argument("--json", action="store_true", help="print what the plan file holds")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output
    from rlplace.placing import place_priced
    from rlplace.planners import get_planner
    from rlplace.planners.strategy.efficiency import BatchCurve

    if options.out:
        check_output(options.out)
    if options.space not in (None, PLACEMENT):
        return _run_strategy(options)
    if options.calls is not None:
        raise InputError("--calls counts strategies; give --space as well, or leave it out")
    check_memory_options(options)
    chooser = "--batch-curve" if options.batch_curve else "--global-batch" if options.global_batch is not None else None
    if chooser and (options.microbatches > 1 or options.schedule):
        raise InputError(
            f"{chooser} chooses micro-batches and schedule itself; leave it out, or leave out --microbatches and --schedule"
        )
    if options.batch_curve and options.global_batch is not None:
        raise InputError("--batch-curve chooses the global batch, --batch samples a replica; leave --global-batch out")
    curve = BatchCurve.load(options.batch_curve) if options.batch_curve else None
    get_planner(options.planner)
    if options.planner == "agent":
        check_agent(options.agent)
        compile_first()
    loaded = load(options.model, options.cluster, options)
    extra: dict[str, Any] = {"agent": options.agent} if options.planner == "agent" else {}
    if options.microbatches > 1:
        extra["microbatches"] = options.microbatches
    if options.schedule:
        extra["schedule"] = options.schedule
    say(f"planning with {options.planner}")
    try:
        placed = place_priced(
            loaded.priced,
            planner=options.planner,
            seed=options.seed,
            time_limit_s=options.time_limit,
            global_batch=options.global_batch,
            batch_curve=curve,
            **extra,
        )
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}; '{_explain_command(options)}' says what would make it fit",
            device=error.device,
            short_bytes=error.short_bytes,
        ) from None
    plan, footprints = placed.plan, None
    if options.memory:
        plan, footprints = with_memory(placed, options)
    else:
        warn_of_update(placed, options)
    if options.out:
        plan.save(options.out)
        say(f"wrote {options.out}")
    if options.json:
        print_json(plan.to_dict())
    else:
        _show(plan, placed.problem)
        if footprints is not None:
            print()
            show_memory(footprints)
    return 0


def _run_strategy(options: argparse.Namespace) -> int:
    """The verb with a space of strategies."""
    from rlplace.cluster.parse import parse

    plan = place_strategy(options)
    if options.out:
        plan.save(options.out)
        say(f"wrote {options.out}")
    if options.json:
        print_json(plan.to_dict())
    else:
        show_strategy(plan, parse(options.cluster or "host"))
    return 0


def _explain_command(options: argparse.Namespace) -> str:
    """The command that looks for what would make the model fit."""
    words = ["rlplace", "explain", options.model]
    words += ["--cluster", options.cluster] if options.cluster else []
    words += [f"--microbatches={options.microbatches}"] if options.microbatches > 1 else []
    return shlex.join([*words, *model_options(options)])


def _show(plan: PlacementPlan, problem: Problem) -> None:
    predicted = plan.predicted
    peaks = predicted.peak_memory_bytes
    rows_of = plan.replicas or [list(range(problem.num_devices))]
    counts = np.zeros(problem.num_devices, dtype=np.int64)
    for row in rows_of:
        counts += np.bincount(np.asarray(row)[plan.device_of_group], minlength=problem.num_devices)
    rows = []
    for index, device in enumerate(problem.devices):
        limit = device.memory_bytes
        share = "-" if limit is None else f"{100 * peaks[index] / limit:.1f} %"
        groups = "-" if plan.shards else str(counts[index])
        rows.append([device.name, device.kind or "-", groups, gb(peaks[index]), gb(limit), share])
    print_table(["device", "kind", "groups", "peak GB", "memory GB", "used"], rows)
    print()
    if predicted.strategies:
        show_strategies(predicted.strategies)
    if plan.shards:
        cut = [math.prod(dims.values()) for dims in plan.shards.values()]
        print(f"{sum(parts > 1 for parts in cut)} of {problem.num_ops} ops are cut, into up to {max(cut)} parts")
    print(f"planner {plan.planner}, problem {problem.name}, executor {predicted.executor}, simulated")
    samples = problem.samples_per_microbatch
    print(
        f"{samples * plan.microbatches * len(rows_of)} samples a step: {count(len(rows_of), 'replica')} x "
        f"{count(plan.microbatches, 'micro-batch', 'es')} of {samples}, schedule {plan.schedule}"
    )
    print(f"step time {ms(predicted.step_time_s)} ms, {predicted.samples_per_s:.2f} samples/s")
    if predicted.floor_step_time_s and len(rows_of) == 1:
        print(f"best classical planner {ms(predicted.floor_step_time_s)} ms")
    if len(rows_of) == 1 and plan.microbatches == 1:
        _show_speedup(plan, problem)
    if predicted.proof:
        print(proof_line(predicted.proof))
    if predicted.held_back_bytes:
        kept = [f"{gb(n)} GB of {d.name}" for n, d in zip(predicted.held_back_bytes, problem.devices, strict=True) if n]
        print(f"held back so that the plan fits op by op, too: {', '.join(kept)}")
    if predicted.op_level is not None:
        print(op_level_line(predicted.op_level, problem))


def op_level_line(op_level: Prediction, problem: Problem) -> str:
    """What the finer simulation says, with the devices that it finds too small."""
    line = f"simulated op by op {ms(op_level.step_time_s)} ms, feasible {op_level.feasible}"
    over = [
        f"{device.name} needs {gb(peak)} GB of {gb(device.memory_bytes)}"
        for device, peak in zip(problem.devices, op_level.peak_memory_bytes, strict=True)
        if device.memory_bytes is not None and peak > device.memory_bytes
    ]
    if not over:
        return line
    return f"{line}: {', '.join(over)}; the plan may run out of memory: leave room with a smaller batch or larger devices"


def proof_line(proof: Mapping[str, Any]) -> str:
    """What an exact planner knows about its plan, or about the coarse program that it solved."""
    bound, gap = proof.get("lower_bound_s"), proof.get("gap")
    of = f" (coarse program of {proof['nodes']} nodes)" if proof.get("program") == "coarse" else ""
    known = "" if bound is None or gap is None else f", lower bound {ms(bound)} ms, gap {100 * gap:.2f} %"
    return f"proof: {proof['status']}{of}{known}"


def _show_speedup(plan: PlacementPlan, problem: Problem) -> None:
    """What several devices bring to a single batch: often no more than room."""
    from rlplace.planners.common.subsets import device_classes
    from rlplace.simulator import simulate

    used = len(np.unique(plan.device_of_group))
    if used == 1 or (problem.group_device >= 0).any():
        return
    alone = [simulate(problem, np.full(problem.num_groups, like[0])).step_time_s for like in device_classes(problem)]
    quickest = min((step for step in alone if step is not None), default=None)
    if quickest is None:
        return
    ratio = quickest / plan.predicted.step_s
    line = f"one device with room for all would take {ms(quickest)} ms: {used} devices are {ratio:.2f} times as fast"
    if ratio < 0.75 * used and not plan.predicted.strategies:
        line += "; with --global-batch the batch is split over replicas and micro-batches where that is quicker"
    print(line)
