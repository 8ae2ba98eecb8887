"""Step time of the pipeline engine beside the stage-graph engine on the same stages, over gloo processes of this machine.

python benchmarks/pipeline_engine.py [processes] [steps]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CASES = [("1f1b", 1), ("gpipe", 1), ("looped_bfs", 2), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2)]
BATCH, LENGTH, MICROBATCHES = 8, 128, 8


def _model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=8, n_embd=256, n_head=4, n_positions=LENGTH, vocab_size=1000, use_cache=False)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def _process(rank, world, path, steps, results):
    from rlplace.plan import PlacementPlan
    from rlplace.runtime.distributed.execution.batches import split_batch
    from rlplace.runtime.distributed.execution.engine import Setup
    from rlplace.runtime.distributed.execution.make import make as make_stage_graph
    from rlplace.runtime.distributed.graph.forward_graph import forward_graph
    from rlplace.runtime.distributed.pipeline.engine import make as make_pipeline
    from rlplace.runtime.distributed.ranks import ranks_of
    from rlplace.runtime.held import meta_copy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    model = _model()
    ids = torch.randint(0, 1000, (BATCH, LENGTH))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    split = split_batch((((), inputs),), 1, MICROBATCHES)
    part = {name: value[: BATCH // MICROBATCHES] for name, value in inputs.items()}
    graph = forward_graph(meta_copy(model), (), part)
    ops = list(graph.op_of_node.values())
    for schedule, laps in CASES:
        places = [*range(world)] * laps
        count = len(places)
        edges = [len(ops) * number // count for number in range(count + 1)]
        groups = [{"name": f"g{i}", "modules": [], "ops": ops[edges[i] : edges[i + 1]]} for i in range(count)]

        def plan(schedule, places=places, groups=groups, count=count):
            return PlacementPlan(
                "0" * 64, "benchmark", 0, np.array(places, dtype=np.int32), groups=groups, microbatches=MICROBATCHES,
                schedule=schedule, stage_of_group=np.arange(count, dtype=np.int32),
            )  # fmt: skip

        named = {
            "pipeline": (make_pipeline, schedule),
            "stage_graph": (make_stage_graph, "gpipe" if schedule == "gpipe" else "1f1b"),
        }
        engines = {}
        for name, (make, which) in named.items():
            made = make(Setup(model, plan(which), graph, ranks_of(plan(which), torch.device("cpu")), None))
            engines[name] = (made, made.engine_for(graph))
        times = {name: [] for name in engines}
        for step in range(steps + 2):
            for name, (made, engine) in engines.items():  # in turn, so that what else the machine does hits both
                for parameter in made.own.parameters.values():
                    parameter.grad = None
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                engine.train(split.parts, 0, step)
                cpu = torch.tensor(time.process_time() - busy)
                dist.barrier()
                seconds = time.perf_counter() - start
                dist.all_reduce(cpu)
                if step >= 2:
                    times[name].append((seconds, float(cpu)))
        if rank == 0:
            results.put(
                (
                    schedule,
                    laps,
                    {name: [*map(statistics.median, zip(*row, strict=True)), min(row)[0]] for name, row in times.items()},
                )
            )
    dist.destroy_process_group()


def main():
    world, steps = (int(value) for value in (*sys.argv[1:], *("2", "15")[len(sys.argv) - 1 :]))
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as path:
        processes = [context.Process(target=_process, args=(rank, world, path, steps, results)) for rank in range(world)]
        for process in processes:
            process.start()
        print(f"{world} processes, {MICROBATCHES} micro-batches, {steps} steps; milliseconds: median (fastest; processor time)")
        for _ in CASES:
            schedule, laps, row = results.get()
            text = ", ".join(
                f"{name} {1e3 * median:.0f} ({1e3 * least:.0f}; {1e3 * cpu:.0f})" for name, (median, cpu, least) in row.items()
            )
            print(f"{schedule}, {laps} stages a process: {text}", flush=True)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
