"""``rlplace place``: from a model and a cluster to a plan."""

from __future__ import annotations

import argparse

import numpy as np

from rlplace.cli.common import (
    add_model_options,
    check_agent,
    gigabytes,
    load,
    milliseconds,
    natural,
    print_json,
    print_table,
    say,
    seconds,
)
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem

HELP = "plan where every part of a model runs"
EXAMPLE = "example: rlplace place hf:gpt2 --cluster a100-80g:4 --out gpt2.plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model", metavar="MODEL", help="hf:TYPE, zoo:NAME, package.module:function, file.py:function, *.problem.json"
    )
    parser.add_argument("--cluster", metavar="C", help="KIND:COUNT, KIND:HOSTSxCOUNT, joined by +; host (default); *.toml")
    parser.add_argument("--planner", default="agent", metavar="NAME", help="planner (agent); 'rlplace info' lists them")
    parser.add_argument("--agent", default="default", metavar="NAME", help="checkpoint name or folder (default)")
    parser.add_argument("--time-limit", type=seconds, default=5.0, metavar="S", help="seconds for the planner (5)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed (0)")
    parser.add_argument("--memory", action="store_true", help="show what fills the memory of every device")
    parser.add_argument("--out", metavar="P.plan.json", help="write the plan")
    parser.add_argument("--json", action="store_true", help="print what the plan file holds")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output
    from rlplace.placing import with_op_level
    from rlplace.planners import get_planner

    if options.out:
        check_output(options.out)
    planner = get_planner(options.planner)
    if options.planner == "agent":
        check_agent(options.agent)
    loaded = load(options.model, options.cluster, options, op_level=True)
    extra = {"agent": options.agent} if options.planner == "agent" else {}
    say(f"planning with {options.planner}")
    plan = planner(loaded.problem, seed=options.seed, time_limit_s=options.time_limit, **extra)
    if loaded.op_problem is not None:
        plan = with_op_level(plan, loaded.problem, loaded.op_problem)
    if options.out:
        plan.save(options.out)
        say(f"wrote {options.out}")
    if options.json:
        print_json(plan.to_dict())
    else:
        _show(plan, loaded.problem, options.memory)
    return 0


def _show(plan: PlacementPlan, problem: Problem, memory: bool) -> None:
    predicted = plan.predicted
    peaks = predicted["peak_memory_bytes"]
    counts = np.bincount(plan.device_of_group, minlength=problem.num_devices)
    rows = []
    for index, device in enumerate(problem.devices):
        limit = device.memory_bytes
        share = "-" if limit is None else f"{100 * peaks[index] / limit:.1f} %"
        rows.append(
            [device.name, device.kind or "-", str(int(counts[index])), gigabytes(peaks[index]), gigabytes(limit), share]
        )
    print_table(["device", "kind", "groups", "peak GB", "memory GB", "used"], rows)
    print()
    if memory:
        _show_memory(plan, problem)
    print(f"planner {plan.planner}, problem {problem.name}, executor {predicted['executor']}, one micro-batch, simulated")
    print(f"step time {milliseconds(predicted['step_time_s'])} ms, {predicted['samples_per_s']:.2f} samples/s")
    if predicted.get("floor_step_time_s"):
        print(f"best classical planner {milliseconds(predicted['floor_step_time_s'])} ms")
    if "op_level" in predicted:
        op_level = predicted["op_level"]
        print(f"simulated op by op {milliseconds(op_level['step_time_s'])} ms, feasible {op_level['feasible']}")


def _show_memory(plan: PlacementPlan, problem: Problem) -> None:
    """Weights, gradients and optimizer state are exact; activations are what the simulated peak holds beside them."""
    held = (problem.weight_bytes, problem.gradient_bytes, problem.optimizer_bytes)
    rows = []
    for index, device in enumerate(problem.devices):
        here = plan.device_of_group == index
        parts = [int(np.maximum(part[here], 0).sum()) for part in held]
        resident = int(problem.resident_bytes[here].sum())
        peak = plan.predicted["peak_memory_bytes"][index]
        live = peak - resident - device.reserved_bytes
        cells = [*parts, resident - sum(parts), live, device.reserved_bytes, peak]
        rows.append([device.name, *(gigabytes(cell) for cell in cells)])
    print_table(["GB", "weights", "gradients", "optimizer", "other resident", "activations", "reserved", "peak"], rows)
    print()
