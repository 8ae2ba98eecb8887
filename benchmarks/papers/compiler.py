"""The compiler's partition on 36 graphs that no setting was chosen on, beside METIS, the cut alone and equal loads alone.

    python -m benchmarks.papers.compiler [--part 0/2]     plans all (or every second one), rows are added to compiler.jsonl
    python -m benchmarks.papers.compiler --table          the table of the docs

Twenty generated graphs, of shapes and seeds that the settings were not chosen with, and sixteen captured models at batch 32 and
128 positions, at most 120 groups, on four A100 with NVLink; as one pass, and as eight passes that add gradients up before one
update. Rivals choose among five METIS cuts of the group graph (edges in bytes, loads within 3 %), and among cuts without a
limit and equal loads alone of the planner's own bands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlplace
from benchmarks.harness import add_row, arguments, geometric, markdown, missing, one_thread, read_rows
from rlplace.model.zoo.load import load_model
from rlplace.placement import get_planner
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.metis import metis_partition
from rlplace.placement.published.compiler import LARGE_GROUPS, Partitioner, balances, family
from rlplace.problem import UPDATE, Problem
from rlplace.problem.build import tensor_fields
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.stats import wins_ties_losses

ROWS = Path(__file__).with_suffix(".jsonl")
PASSES = (1, 8)
MODELS = (
    "hf:bert,num_hidden_layers=4", "hf:t5,num_layers=3", "hf:vit,num_hidden_layers=4", "hf:resnet",
    "hf:bart,encoder_layers=3,decoder_layers=3", "hf:albert,num_hidden_layers=4", "hf:convnext", "hf:swin",
    "hf:opt,num_hidden_layers=4", "hf:mobilenet_v2", "hf:regnet", "hf:deberta,num_hidden_layers=3",
    "hf:mixtral,num_hidden_layers=2,hidden_size=256,intermediate_size=512,num_local_experts=4,vocab_size=2000",
    "hf:llama,num_hidden_layers=4,hidden_size=512,intermediate_size=1024,vocab_size=4000", "zoo:unet", "zoo:mlp",
)  # fmt: skip
GENERATED = [
    {"seed": seed, "num_groups": groups, "shape": shape, "width": width, "training": training}
    for shape, width in (("layered", 5), ("branchy", 12), ("towers", 6), ("wavefront", 6), ("chain", 4))
    for seed, groups, training in ((101, 100, True), (102, 180, True), (103, 260, False), (104, 140, False))
]


def graphs() -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Yields name and maker of every graph."""
    for setting in GENERATED:
        name = f"{setting['shape']} {setting['num_groups']} groups, {'training' if setting['training'] else 'inference'}"
        yield name, lambda setting=setting: random_problem(num_devices=4, **setting)
    for spec in MODELS:
        yield spec, lambda spec=spec: _captured(spec)


def _captured(spec: str) -> Problem:
    model = load_model(spec, batch=32, seq=128)
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss)
    return rlplace.price(graph, "a100-80g:4", groups=120, name=spec)


def repeated(problem: Problem, count: int) -> Problem:
    """Returns a step of so many passes over the forward and backward ops, and one update that waits for all their gradients."""
    once = problem.op_phase == UPDATE
    again = np.flatnonzero(~once)
    copies = [np.arange(problem.num_ops)] + [np.full(problem.num_ops, -1) for _ in range(count - 1)]
    for number, copy in enumerate(copies[1:]):
        copy[again] = problem.num_ops + number * len(again) + np.arange(len(again))
        copy[once] = np.flatnonzero(once)
    source = np.concatenate([np.arange(problem.num_ops), *([again] * (count - 1))])
    rows: list[tuple[int, int, int, Any]] = []
    for tensor in range(problem.num_tensors):
        readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
        producer, owner = int(problem.tensor_producer[tensor]), int(problem.tensor_owner[tensor])
        size = int(problem.tensor_bytes[tensor])
        if producer < 0 or once[producer]:
            rows.append((producer, owner, size, sorted({int(copy[reader]) for copy in copies for reader in readers})))
        else:
            rows += [(int(copy[producer]), owner, size, [int(copy[reader]) for reader in readers]) for copy in copies]
    return dataclasses.replace(
        problem,
        name=f"{problem.name}, {count} passes",
        op_names=tuple(f"{problem.op_names[op]}/{number // problem.num_ops}.{number}" for number, op in enumerate(source)),
        op_group=problem.op_group[source],
        op_phase=problem.op_phase[source],
        time_s=problem.time_s[source],
        temporary_bytes=problem.temporary_bytes[source],
        op_kind=None,
        op_dims={},
        source=None,
        group_ops=None,
        group_modules=None,
        **tensor_fields(rows),
    )


def plan(problem: Problem) -> dict[str, float]:
    """Returns step times of the partition and its rivals."""
    one_s = simulate(problem, np.zeros(problem.num_groups, dtype=int)).step_time_s
    weight, count = group_graph(problem).mean_time_s, problem.num_devices
    cuts = [metis_partition(problem, weight, np.ones(count) / count, 30, seed) for seed in range(5)]
    everywhere = range(count)
    tried = {name: partitions(problem, everywhere, name) for name in ("combined", "cut", "balance")} | {"metis": iter(cuts)}
    found = {name: min(simulate(problem, devices).step_time_s for devices in each) for name, each in tried.items()}
    planned = get_planner("compiler")(problem).predicted.step_time_s
    return {"one_s": one_s, "compiler_s": planned, **{f"{name}_s": step_s for name, step_s in found.items()}}


OBJECTIVES = ("combined", "cut", "balance")
"""Least traffic under balance; least traffic whatever the loads; equal loads whatever the traffic."""


def partitions(problem: Problem, devices: Sequence[int], objective: str) -> Iterator[Assignment]:
    """Yields the planner's partitions on given devices, or those of another objective with the same bands and imbalances."""
    if objective == "combined":
        yield from (found for found in family(problem, devices) if found is not None)
        return
    starts = 0 if problem.num_groups > LARGE_GROUPS else 2
    for bands, eps in balances(problem.num_groups, len(devices)):
        partitioner = Partitioner(problem, list(devices), eps, bands, grown=starts)
        if objective == "balance":
            yield partitioner.partition_of(partitioner.legal(longest_first(partitioner))).device_of_group
        else:
            partitioner.limit[:] = np.inf
            yield partitioner.best(np.random.default_rng(0)).device_of_group


def longest_first(partitioner: Partitioner) -> NDArray[np.int32]:
    """Places longest first, each on the device with memory for it that then has the least load in its band: int32 [G]."""
    level = partitioner.level
    load, used = np.zeros(partitioner.limit.shape), np.zeros(len(partitioner.row))
    part = np.zeros(len(level.band), dtype=np.int32)
    total = np.where(np.isfinite(level.time_s), level.time_s, 0.0).sum(axis=1)
    for vertex in np.argsort(-total, kind="stable"):
        after = load[:, level.band[vertex]] + level.time_s[vertex]
        full = used + level.footprint_bytes[vertex] > partitioner.room
        device = part[vertex] = np.lexsort((after, full, np.isinf(after)))[0]
        load[device, level.band[vertex]] = after[device]
        used[device] += level.footprint_bytes[vertex]
    return part


RIVALS = {"one_s": "one device", "metis_s": "METIS", "cut_s": "cut", "balance_s": "balance"}


def table() -> str:
    """Makes the table of the docs: combined over each rival."""
    lines = []
    for passes, (key, name) in product(PASSES, RIVALS.items()):
        ratio = np.array([row["combined_s"] / row[key] for row in read_rows(ROWS) if row["passes"] == passes])
        lines.append([passes, name, f"{geometric(ratio):.3f}", *wins_ties_losses(ratio.tolist()), f"{ratio.max():.3f}"])
    return markdown(["passes", "rival", "mean", "better", "equal", "worse", "worst"], lines)


def chosen(part: str) -> list[tuple[str, Callable[[], Problem]]]:
    """Lists every N-th graph from the I-th on, by I/N."""
    first, step = map(int, part.split("/"))
    return list(graphs())[first::step]


if __name__ == "__main__":
    one_thread()
    options = arguments(__doc__, table="only the table", part=("0/1", "I/N: every N-th graph from the I-th on"))
    for name, make in () if options.table else chosen(options.part):
        problem = make()
        for _, passes in missing(ROWS, [(name, passes) for passes in PASSES], "graph", "passes"):
            planned = plan(repeated(problem, passes) if passes > 1 else problem)
            add_row(ROWS, {"graph": name, "passes": passes, "groups": problem.num_groups, **planned})
    print(table())
