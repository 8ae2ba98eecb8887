"""``rlplace place``: from a model and a cluster to a plan, the whole strategy or a placement."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlplace.cli.common import (
    GRANULARITY,
    add_model_options,
    check_agent,
    compile_first,
    given,
    load,
    model_options,
    natural,
    positive,
    print_json,
    print_table,
    say,
    seconds,
)
from rlplace.cli.memory import add_memory_options, check_memory_options, full_note, show_memory, warn_of_update, with_memory
from rlplace.cli.strategy import machine_of, place_strategy, show_strategy
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import uniform_words
from rlplace.problem import Problem
from rlplace.text import gb, ms

HELP = "plan how the devices of a cluster train a model"
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
    parser.add_argument("--agent", metavar="NAME", help="places groups: checkpoint name or folder (default)")
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="seconds for the planner (5, with --calls no limit)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed (0)")
    parser.add_argument("--microbatches", type=positive, metavar="M", help="micro-batches of a replica (chosen)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="how micro-batches take turns (chosen)")
    parser.add_argument("--batch-curve", metavar="FILE", help="epochs by batch: the batch is chosen, too, from --batch (8) up")
    parser.add_argument(
        "--space",
        metavar="S",
        help='what may be chosen: auto (default, all that can run), all, or "tensor=1,2 sharding=0"; placement: groups instead',
    )
    parser.add_argument(
        "--calls", type=positive, metavar="N", help="plans to simulate at most: the answer is then the same every time"
    )
    parser.add_argument(
        "--couple",
        choices=("replica", "gather"),
        default="replica",
        help="a loss that couples samples is computed over those of a replica (default), or of the whole batch",
    )
    parser.add_argument(
        "--buffers",
        choices=("whole", "replica"),
        default="whole",
        help="where a forward writes buffers by its samples: keep batches whole (default), or let every replica write its own",
    )
    add_memory_options(parser)
    parser.add_argument("--out", metavar="P.plan.json", help="write the plan")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output

    if options.time_limit is None and options.calls is None:
        options.time_limit = 5.0
    if options.out:
        check_output(options.out)
    reason = placement_reason(options)
    check_memory_options(options, reason is not None)
    if reason is None:
        plan, show = answer(options)
    else:
        plan, show = _place_groups(options, reason)
    if options.out:
        plan.save(options.out)
        say(f"wrote {options.out}")
    if options.json:
        print_json(plan.to_dict())
    else:
        show()
    return 0


def answer(options: argparse.Namespace) -> tuple[PlacementPlan, Callable[[], None]]:
    """Returns the best strategy, or a quicker placement, and a function that prints it."""
    result, machine = place_strategy(options), machine_of(options)
    best, placed = result.strategy, result.placed
    if placed is None:
        return best, functools.partial(show_strategy, best, machine)

    plan, footprints = with_memory(placed, options) if options.memory else (placed.plan, [])

    def show() -> None:
        _show(plan, placed.problem)
        assert best.strategy is not None
        words = uniform_words(best.strategy)
        print(f"branches side by side: the best strategy takes {ms(best.predicted.step_s)} ms ({words}); --space chooses one")
        show_memory(footprints)

    return plan, show


def placement_reason(options: argparse.Namespace) -> str | None:
    """Explains why placements are asked for; None where whole strategies are."""
    from rlplace.api import PLACEMENT, why_placement

    if options.model.endswith(".problem.json"):
        if options.space not in (None, PLACEMENT):
            raise InputError(f"{options.model} is placed group by group; leave --space out, or name the model instead")
        return why_placement(options.planner, PLACEMENT) and "a problem file has groups only"
    return why_placement(options.planner, options.space, given(options, _OF_PLACEMENTS))


_OF_PLACEMENTS: dict[str, Any] = {"agent": None, "granularity": GRANULARITY}
"""Options that belong to placements alone, with their defaults."""


def _place_groups(options: argparse.Namespace, reason: str) -> tuple[PlacementPlan, Callable[[], None]]:
    """Returns the best placement, and a function that prints it."""
    from rlplace.explanation.compare.measure import takes_calls
    from rlplace.placement.ask import place_priced

    for name in given(options, dict.fromkeys(("batch_curve", "microbatches", "schedule"))):
        raise InputError(f"{name} is for whole strategies, these are placements ({reason}); leave it out")
    agent = options.agent or "default"
    if options.planner == "agent":
        check_agent(agent)
        compile_first()
    extra: dict[str, Any] = {"agent": agent} if options.planner == "agent" else {}
    if options.calls is not None:
        if not takes_calls(options.planner):
            raise InputError(f"planner {options.planner} is no search, and simulates what it needs; leave --calls out")
        extra["calls"] = options.calls
    loaded = load(options.model, options.cluster, options, runs=True)
    say(f"planning with {options.planner}")
    try:
        placed = place_priced(loaded, planner=options.planner, seed=options.seed, time_limit_s=options.time_limit, **extra)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}; '{_explain_command(options)}' says what would make it fit",
            device=error.device,
            short_bytes=error.short_bytes,
        ) from None
    plan, footprints = with_memory(placed, options) if options.memory else (placed.plan, [])
    if not options.memory:
        warn_of_update(placed, options)
    notes = []
    if loaded.graph is not None:
        from rlplace.strategy.search.remarks import bf16_note, without_bf16

        kinds = without_bf16(loaded.graph, machine_of(options), np.unique(plan.device_of_group).tolist())
        notes = [bf16_note(loaded.graph, kinds)] if kinds else []
    question = f"question: which device each group of ops runs on ({reason})"
    if options.json:
        say(question)

    def show() -> None:
        _show(plan, placed.problem)
        print(question + ("" if loaded.graph is None else "; --space auto asks for the whole strategy"))
        for note in notes:
            print(f"note: {note}")
        show_memory(footprints)

    return plan, show


def _explain_command(options: argparse.Namespace) -> str:
    """Returns the command that looks for what would make the model fit."""
    from rlplace.api import PLACEMENT

    words = ["rlplace", "explain", options.model]
    words += ["--cluster", options.cluster] if options.cluster else []
    words += [] if options.model.endswith(".problem.json") else ["--space", PLACEMENT]
    return shlex.join([*words, *model_options(options)])


def _show(plan: PlacementPlan, problem: Problem) -> None:
    predicted = plan.predicted
    peaks = predicted.peak_memory_bytes
    counts = np.bincount(plan.device_of_group, minlength=problem.num_devices)
    rows = []
    for index, device in enumerate(problem.devices):
        limit = device.memory_bytes
        share = "-" if limit is None else f"{100 * peaks[index] / limit:.1f} %"
        rows.append([device.name, device.kind or "-", str(counts[index]), gb(peaks[index]), gb(limit), share])
    print_table(["device", "kind", "groups", "peak GB", "memory GB", "used"], rows)
    print()
    print(f"planner {plan.planner}, problem {problem.name}, executor {predicted.executor}, simulated")
    print(f"{problem.samples_per_microbatch} samples a step, in one pass")
    print(f"step time {ms(predicted.step_time_s)} ms, {predicted.samples_per_s:.2f} samples/s")
    if predicted.floor_step_time_s:
        print(f"best classical planner {ms(predicted.floor_step_time_s)} ms")
    _show_speedup(plan, problem)
    if predicted.proof:
        print(proof_line(predicted.proof))
    if predicted.held_back_bytes:
        kept = [f"{gb(n)} GB of {d.name}" for n, d in zip(predicted.held_back_bytes, problem.devices, strict=True) if n]
        print(f"held back so that the plan fits op by op, too: {', '.join(kept)}")
    if predicted.op_level is not None:
        print(op_level_line(predicted.op_level, problem))
    if note := full_note(peaks, problem.devices):
        print(f"note: {note}")


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
    from rlplace.placement.common.floor import device_classes
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
    print(line)
