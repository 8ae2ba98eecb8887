"""The `compiler` planner and its run-time assistants: what the combined objective, the cut and the assistants are worth.

Usage: python -m benchmarks.papers.compiler [--seeds 8] [--large]

Executor ``list``, simulated makespan of one step, generated graphs and captured models (batch 32, sequence 128, at most 120
groups) on four A100 with NVLink.

1. Step time relative to one device: least traffic under balance, least traffic alone, balance alone (longest first). Each may
   choose among the same bands and imbalances, on all devices; one micro-batch and eight.
2. Seconds of all cut edges and of all transfers, of METIS and of the partition, at the imbalance that METIS ends with (at least
   5 %); METIS with each of five seeds.
3. Every op takes up to 30 % more or less than planned: step times relative to the planned one of the stale plan, of the better
   of it and a new plan for the actual costs, and of the stale plan with assistants, that move weights too, or only groups
   without; means over seeds, and the share of the gap that assistants recover. "As planned" is the assisted step at planned
   times.

``--large``: seconds of the planner on about 5,000 ops, and of the assisted simulation.
"""

import argparse
import dataclasses
import time

import numpy as np
import torch

import rlplace
from benchmarks.papers.compiler.assist import simulate_assisted
from benchmarks.papers.compiler.movable import prepare_assistants
from benchmarks.papers.compiler.objectives import OBJECTIVES, edge_nets, partitions
from rlplace.model.zoo.load import load_model
from rlplace.placement import get_planner, run_planner
from rlplace.placement.common.groupgraph import group_graph, mean_link
from rlplace.placement.metis import metis_partition
from rlplace.placement.published.compiler import partition
from rlplace.placement.published.compiler.nets import problem_nets
from rlplace.problem.generate import random_problem
from rlplace.simulator import default_priority, simulate

MODELS = ("zoo:inception", "zoo:nasnet", "hf:gpt2,n_layer=4", "zoo:moe_toy", "zoo:dlrm", "zoo:lstm", "hf:clip")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    get_planner("compiler")(random_problem(0, 8, 2))  # compiles
    if options.large:
        large()
        return
    problems = [
        random_problem(1, 120, 4, shape="layered", width=8),
        random_problem(1, 120, 4, shape="branchy", width=8),
        *(_captured(spec) for spec in MODELS),
        random_problem(1, 60, 4, shape="chain"),
        random_problem(1, 200, 4, shape="branchy", width=8),
        random_problem(2, 120, 4, shape="branchy", width=8, training=False),
        random_problem(1, 300, 8, shape="layered", width=6, training=False),
    ]
    objectives(problems)
    cuts(problems)
    drift(problems, options.seeds)


def _captured(spec):
    model = load_model(spec, batch=32, seq=128)
    return rlplace.price(
        rlplace.capture(model.module, model.example_inputs, loss=model.loss), "a100-80g:4", groups=120, name=spec
    )


def objectives(problems) -> None:
    """Prints table 1."""
    print(f"\n{'step time / one device':26s}" + "".join(f"{o:>16s}" for o in OBJECTIVES))
    for problem in problems:
        alone = simulate(problem, np.zeros(problem.num_groups, dtype=int)).step_time_s
        step = [
            min(
                simulate(problem, devices).step_time_s for devices in partitions(problem, range(problem.num_devices), objective)
            )
            for objective in OBJECTIVES
        ]
        row = "".join(f"{s / alone:16.3f}" for s in step)
        print(f"{problem.name:26s}{row}{'  wins' if step[0] < min(step[1:]) else '  -'}")


def cuts(problems) -> None:
    """Prints table 2."""
    print(f"\n{'ms':26s}{'edges METIS':>14s}{'edges ours':>14s}{'sent METIS':>14s}{'sent ours':>14s}{'seeds won':>12s}")
    for problem in problems:
        graph, count = group_graph(problem), problem.num_devices
        edges, sent = edge_nets(problem, mean_link(problem)), problem_nets(problem)
        rows = []
        for seed in range(5):
            part = metis_partition(problem, graph.mean_time_s, np.ones(count) / count, 50, seed)
            load = np.bincount(part, weights=graph.mean_time_s, minlength=count)
            eps = max(0.05, float(load.max() / load.mean()) - 1.0 + 1e-9)
            ours = [partition(problem, eps=eps, nets=nets) for nets in (edges, sent)]
            assert all(found.imbalance <= eps + 1e-9 for found in ours)
            rows.append([_seconds(problem, edges, part), ours[0].cut_s, _seconds(problem, sent, part), ours[1].cut_s])
        data = 1e3 * np.array(rows)
        won = [int((data[:, k + 1] <= data[:, k] * (1 + 1e-9)).sum()) for k in (0, 2)]
        print(f"{problem.name:26s}" + "".join(f"{x:14.3f}" for x in data.mean(axis=0)) + f"{f'{won[0]}/5, {won[1]}/5':>12s}")


def _seconds(problem, nets, part) -> float:
    """Returns all transfers one after another, at the mean link."""
    latency, inverse = mean_link(problem)
    total = 0.0
    for net, source in enumerate(nets.source):
        to = set(part[nets.pins[nets.pin_ptr[net] : nets.pin_ptr[net + 1]]].tolist()) - {int(part[source])}
        total += len(to) * (nets.tensors[net] * latency + nets.size_bytes[net] * inverse + nets.fixed_s[net])
    return float(total)


def drift(problems, seeds: int) -> None:
    """Prints table 3."""
    heads = ("stale", "anew", "assisted", "recovers", "as planned", "no weights", "recovers", "as planned")
    print(f"\n{'relative to planned':26s}" + "".join(f"{head:>12s}" for head in heads))
    for problem in problems:
        plan = get_planner("compiler")(problem)
        planned = plan.predicted.step_time_s
        ways = [prepare_assistants(problem, plan.device_of_group, move_weights=moves).options for moves in (True, False)]
        rows = []
        for seed in range(seeds):
            actual = problem.time_s * np.random.default_rng(seed).uniform(0.7, 1.3, problem.num_ops)[:, None]
            really = dataclasses.replace(problem, time_s=actual)
            stale = simulate(really, plan.device_of_group, priority=default_priority(problem)).step_time_s
            anew = min(stale, get_planner("compiler")(really).predicted.step_time_s)
            assisted = [simulate_assisted(problem, plan, actual_time_s=actual, **way).step_time_s for way in ways]
            rows.append([stale, anew, *assisted])
        stale, anew, *assisted = np.mean(rows, axis=0) / planned
        cells = [f"{stale:12.4f}", f"{anew:12.4f}"]
        for way, step in zip(ways, assisted, strict=True):
            share = f"{(stale - step) / (stale - anew):12.0%}" if stale - anew > 1e-6 else f"{'no gap':>12s}"
            calm = simulate_assisted(problem, plan, **way).step_time_s / planned
            cells += [f"{step:12.4f}", share, f"{calm:12.4f}"]
        print(f"{problem.name:26s}" + "".join(cells))


def large() -> None:
    """Prints seconds at about 5,000 ops."""
    run_planner("best", random_problem(0, 8))
    settings = (
        {"num_groups": 1700, "num_devices": 4}, {"num_groups": 1700, "num_devices": 8, "width": 40},
        {"num_groups": 1700, "num_devices": 8, "hosts": 2, "memory_factor": 1.3},
        {"num_groups": 5000, "num_devices": 8, "training": False},
        {"num_groups": 5000, "num_devices": 16, "training": False, "shape": "branchy"},
        {"num_groups": 333, "num_devices": 4, "width": 8},
    )  # fmt: skip
    print(f"{'problem':34s}{'ops':>6s}{'planner s':>11s}{'x best':>8s}{'rehearsal s':>13s}{'assisted s':>12s}{'moves':>7s}")
    for setting in settings:
        problem = random_problem(1, **setting)
        run, best = run_planner("compiler", problem), run_planner("best", problem)
        begin = time.perf_counter()
        options = prepare_assistants(problem, run.plan.device_of_group).options
        rehearsed = time.perf_counter() - begin
        actual = problem.time_s * np.random.default_rng(0).uniform(0.7, 1.3, problem.num_ops)[:, None]
        begin = time.perf_counter()
        found = simulate_assisted(problem, run.plan, actual_time_s=actual, **options)
        assisted = time.perf_counter() - begin
        ratio = run.plan.predicted.step_time_s / best.plan.predicted.step_time_s
        print(
            f"{problem.name:34s}{problem.num_ops:6d}{run.seconds:11.2f}{ratio:8.3f}{rehearsed:13.2f}{assisted:12.2f}"
            f"{len(found.steals):7d}"
        )


if __name__ == "__main__":
    main()
