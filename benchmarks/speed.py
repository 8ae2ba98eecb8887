"""The speed of rlplace itself, in parts.

    python -m benchmarks.speed commands       wall time of whole commands as a person waits for them, ten minutes
    python -m benchmarks.speed simulator      simulations a second, 8 devices
    python -m benchmarks.speed strategies     drafts a second of the block executor, packing included
    python -m benchmarks.speed environments   decisions a second of vector environments, two minutes
    python -m benchmarks.speed planners       one-shot planners on large steps, simulations a second of searches
    python -m benchmarks.speed capture        ops, seconds and memory of captures; `--models` names others

Two idle cores, one thread unless it says otherwise.

Commands: *first* runs have an empty cache of captures and no kernels compiled on the machine (those that came with the
installation are there); *again* is the same command once more; *prompt back* is the time from the last line to the end.
Strategies: random drafts of the tests' generator; *new*: places, micro-batches and schedule are hardly ever those of a draft
before, so that everything is made; *known*: the same drafts again, each after all others; *moves*: drafts that differ from a
known one in cuts or recomputation. Environments: actions are drawn among the legal ones; *bare* is `simulate_many` on two
threads, which a refinement step cannot beat, since each simulates once; *SB3* is the vector environment in `PlacerVecEnv`.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.harness import arguments, markdown, one_thread
from rlplace.problem.generate import random_problem

Rows = Iterator[list[Any]]
LLAMA = "hf:llama,vocab_size=128256,num_key_value_heads=8"
LLAMA_8B = f"{LLAMA},hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32"
LLAMA_70B = f"{LLAMA},hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,num_attention_heads=64"
COMMANDS = {
    "python -c 'import rlplace'": "",
    "place hf:gpt2": "place hf:gpt2 --cluster a100-80g:4",
    "place hf:gpt2 --planner best": "place hf:gpt2 --cluster a100-80g:4 --planner best",
    "place Llama-8B on 8": f"place {LLAMA_8B} --cluster h100:8 --batch 64 --seq 2048 --dtype bf16",
    "place Llama-70B on 64": f"place {LLAMA_70B} --cluster h100:8x8,ib=400g --batch 256 --seq 2048 --dtype bf16",
}
"""By the name in the table, arguments of `rlplace`."""


def waited(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Measures seconds to the first line, to the end, and from the last line to the end."""
    begin = time.perf_counter()
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    first = last = None
    for _ in job.stdout:
        last = time.perf_counter()
        first = first or last
    status, end = job.wait(), time.perf_counter()
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with {status}")
    return (first or end) - begin, end - begin, end - (last or end)


def commands(runs: int) -> Rows:
    """Times commands without and with what an earlier run of them kept."""
    for name, words in COMMANDS.items():
        script = str(Path(sys.executable).with_name("rlplace"))
        command = [script, *shlex.split(words)] if words else [sys.executable, "-c", "import rlplace"]
        found: tuple[list[tuple[float, float, float]], ...] = ([], [])
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                kept = {"RLPLACE_CACHE": f"{folder}/kept", "NUMBA_CACHE_DIR": f"{folder}/kernels", "OMP_NUM_THREADS": "1"}
                for times in found:
                    times.append(waited(command, {**os.environ, **kept}))
        whole = [statistics.median(each[1] for each in times) for times in found]
        line, back = (max(statistics.median(each[at] for each in times) for times in found) for at in (0, 2))
        shown = [f"{line:.1f}", f"{back:.2f}"] if words else ["-", "-"]
        yield [f"`{name}`", *(f"{seconds:.1f}" for seconds in whole), *shown]


def simulator() -> Rows:
    """Times evaluations of a plan of contiguous pieces, and beside them the reference in plain Python."""
    from rlplace.simulator import Simulator
    from rlplace.simulator.reference import simulate_reference

    for count in (500, 5_000, 100_000):
        problem = random_problem(0, count // 3, 8, memory_factor=2.0)
        plan = np.sort(np.random.default_rng(0).integers(0, 8, problem.num_groups)).astype(np.int32)
        compiled = Simulator(problem)
        seconds = min(taken(partial(compiled.evaluate, plan)) for _ in range(max(8, 100_000 // count)))
        plain = taken(partial(simulate_reference, problem, plan)) if count < 10_000 else float("nan")
        yield [problem.num_ops, f"{1 / seconds:,.0f}", f"{1e9 * seconds / problem.num_ops:.1f}", f"{plain / seconds:,.0f}"]


def taken(work: Callable[[], object]) -> float:
    """Takes the seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def strategies() -> Rows:
    """Counts scored drafts a second of processor time, by cluster."""
    from rlplace.cluster import Cluster
    from rlplace.strategy.drafts import Draft, Mesh
    from rlplace.strategy.executor.evaluate import DraftEvaluator
    from tests.strategy.random_costs import random_costs, random_draft

    def rate(drafts: Sequence[Draft]) -> str:
        start = time.process_time()
        for draft in drafts:
            evaluator.score(draft)
        return f"{len(drafts) / (time.process_time() - start):,.0f}"

    for name in ("a100-80g:8", "h100:2x4,ib=400g", "a100-80g:4+t4:4", "h100:128x8,ib=8x400g"):
        cluster, rng = Cluster.preset(name), np.random.default_rng(0)
        large = cluster.num_devices > 100
        blocks, count = (100, 300) if large else (40, 3000)
        evaluator = DraftEvaluator(random_costs(rng, cluster, blocks, tied=True), cluster)
        make = large_draft if large else random_draft
        drafts = [make(rng, cluster, blocks) for _ in range(count)]
        evaluator.score(Draft((0, blocks), (Mesh((0,)),), (0,), bytes(blocks), bytes(blocks), (1,), (1,)))  # compiles
        moves = [moved(rng, draft) for draft in drafts]
        yield [name, blocks, rate(drafts), rate(drafts), rate(moves)]


def large_draft(rng: Generator, cluster: Any, blocks: int) -> Any:
    """Draws up to 32 places of hosts that are whole, two stages on each or one."""
    from rlplace.strategy.drafts import Draft, Mesh

    places, tensor = int(rng.choice([1, 2, 4, 8, 16, 32])), int(rng.choice([1, 2, 4, 8]))
    width = cluster.num_devices // places
    shard = min(int(rng.choice([1, 2, 8, width // tensor])), width // tensor)
    level = 0 if shard == 1 else 1 if places > 1 else int(rng.integers(1, 4))
    chunks = int(rng.integers(1, 3)) if places > 1 else 1
    cuts = sorted(rng.choice(np.arange(1, blocks), places * chunks - 1, replace=False).tolist())
    schedule = None if places == 1 else "interleaved_1f1b" if chunks > 1 else str(rng.choice(["1f1b", "gpipe"]))
    sizes = {"replicate": width // tensor // shard, "shard": shard, "tensor": tensor, "sharding": level}
    return Draft(
        bounds=(0, *cuts, blocks),
        places=tuple(
            Mesh(tuple(range(width * i, width * (i + 1))), **sizes, sequence_parallel=tensor > 1) for i in range(places)
        ),
        place_of_stage=tuple(range(places)) * chunks,
        recompute=bytes(rng.integers(0, 3, blocks).tolist()),
        offload=bytes(blocks),
        microbatch=(1,),
        microbatches=(places * int(rng.choice([2, 4, 8])),),
        schedule=schedule,
    )


def moved(rng: Generator, draft: Any) -> Any:
    """Makes another choice for one block, or another cut."""
    if draft.stages > 1 and rng.random() < 0.5:
        inner = rng.choice(np.arange(1, draft.bounds[-1]), draft.stages - 1, replace=False)
        return dataclasses.replace(draft, bounds=(0, *sorted(inner.tolist()), draft.bounds[-1]))
    recompute = bytearray(draft.recompute)
    recompute[int(rng.integers(len(recompute)))] = int(rng.integers(3))
    return dataclasses.replace(draft, recompute=bytes(recompute))


def environments(seconds: float) -> Rows:
    """Counts decisions a second, 256 environments on eight problems of 100, 300 and 1,000 ops."""
    import gymnasium as gym

    from rlplace.agents.policy import PlacerVecEnv
    from rlplace.envs import PlacementEnv, RefinementEnv, make_instance
    from rlplace.simulator import simulate_many

    def legal(masks: NDArray[np.bool_], rng: Generator, first: int) -> NDArray[np.int64]:
        """Draws a legal action of each row, from number `first` on where there is one."""
        weights = rng.random(masks.shape) * masks
        weights[:, :first] *= 1e-9
        return np.argmax(weights, axis=1)

    def rate(envs: Any, masks: Callable[[], Any], first: int) -> float:
        rng, done = np.random.default_rng(0), 0
        envs.reset()
        for _ in range(3):
            envs.step(legal(masks(), rng, first))
        begin = time.perf_counter()
        while time.perf_counter() < begin + seconds:
            for _ in range(5):
                envs.step(legal(masks(), rng, first))
            done += 5
        return done * envs.num_envs / (time.perf_counter() - begin)

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "Placement": (PlacementEnv, {}),
        "Refinement": (RefinementEnv, {}),
        "Refinement, keep=better": (RefinementEnv, {"keep": "better"}),
    }
    shapes = [(shape, devices) for shape in ("layered", "towers") for devices in (2, 4, 4, 8)]
    for (name, (kind, options)), ops in ((item, ops) for item in kinds.items() for ops in (100, 300, 1000)):
        bank = [
            make_instance(random_problem(seed, num_groups=max(8, ops // 3), num_devices=devices, shape=shape))
            for seed, (shape, devices) in enumerate(shapes)
        ]
        first, words = int(kind is RefinementEnv), {"num_envs": 256, "problems": bank, "autoreset_mode": "SameStep", **options}
        vector: Any = gym.make_vec(f"rlplace/{name.partition(',')[0]}-v0", **words)
        figures = [rate(vector, vector.action_masks, first)]
        wrapped = PlacerVecEnv(vector)
        figures.append(rate(wrapped, lambda envs=wrapped: np.stack(envs.env_method("action_masks")), first))
        for vectorised, count in ((gym.vector.SyncVectorEnv, 16), (gym.vector.AsyncVectorEnv, 2)):
            rivals = vectorised([partial(kind, bank, **options)] * count)
            figures.append(rate(rivals, lambda envs=rivals: np.stack(envs.call("action_masks")), first))
            rivals.close()
        rng, calls, begin = np.random.default_rng(0), 0, time.perf_counter()
        plans = [rng.integers(0, one.problem.num_devices, (256, one.problem.num_groups)) for one in bank]
        while time.perf_counter() < begin + seconds:
            for one, rows in zip(bank, plans, strict=True):
                simulate_many(one.problem, rows, threads=2)
                calls += len(rows)
        figures.append(calls / (time.perf_counter() - begin))
        yield [name, f"{np.mean([one.problem.num_ops for one in bank]):.0f}", *(f"{figure:,.0f}" for figure in figures)]


def planners() -> Rows:
    """Times one-shot planners on 5,000 ops and `best` on up to 100,000; counts simulations a second of searches."""
    from rlplace.errors import InfeasibleError
    from rlplace.placement import ONE_SHOT, run_planner

    run_planner("best", random_problem(0, 8))  # compiles
    sizes: list[tuple[str, int, float | None, float | None]] = [(name, 1_667, 1.6, None) for name in (*ONE_SHOT, "best")]
    sizes += [("best", groups, factor, limit) for groups, limit in ((5_000, None), (33_400, 20.0)) for factor in (None, 1.3)]
    for name, groups, factor, limit in sizes:
        problem = random_problem(1, groups, 8, memory_factor=factor)
        try:
            run = run_planner(name, problem, time_limit_s=limit)
            yield [name, problem.num_ops, f"{run.seconds:.3f}", f"{run.simulator_calls:,}", ""]
        except InfeasibleError:
            yield [name, problem.num_ops, "infeasible", "", ""]
    problem = random_problem(0, 67, 4)
    start = run_planner("best", problem).plan
    for name, calls in (("annealing", 20_000), ("local_search", 4_000)):
        run_planner(name, problem, calls=8, start=start)  # compiles
        run = run_planner(name, problem, calls=calls, start=start)
        yield [name, problem.num_ops, f"{run.seconds:.3f}", f"{run.simulator_calls:,}", f"{calls / run.seconds:,.0f}"]


TYPES = ("gpt2", "bert", "llama", "mixtral", "t5", "whisper", "vit", "swin", "convnext", "resnet", "mamba", "deberta-v2")
ZOO = ("lstm", "transformer", "inception", "dlrm", "moe_toy", "mlp", "nasnet", "unet")


def capture(models: Sequence[str]) -> Rows:
    """Captures every model in a process of its own, so that time and peak memory are those of one, imports included."""
    for spec in models or (*(f"hf:{t}" for t in TYPES), *(f"zoo:{n}" for n in ZOO), LLAMA_8B, LLAMA_70B):
        words = [sys.executable, "-m", "benchmarks.speed", "--one", spec]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        yield [spec[:40], *(done.stdout.split() if done.returncode == 0 else ["failed"] * 6)]


def capture_one(spec: str) -> None:
    """Captures in this process; method, ops, tensors, seconds of the capture and of the process, and its peak of memory."""
    from rlplace.model.capture.capture import capture
    from rlplace.model.zoo import load_model

    model = load_model(spec, batch=8, seq=512)
    loaded = time.process_time()
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    done, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(graph.capture["method"], graph.num_ops, graph.num_tensors, f"{done - loaded:.1f} {done:.1f} {peak:.2f}")


HEADS = {
    "commands": ["command", "first s", "again s", "first line s", "prompt back s"],
    "simulator": ["ops", "simulations a second", "ns an op", "times the plain one"],
    "strategies": ["cluster", "blocks", "new a second", "known", "moves"],
    "environments": ["environment", "ops", "vector", "SB3", "sync", "async", "bare simulations"],
    "planners": ["planner", "ops", "s", "simulations", "a second"],
    "capture": ["model", "method", "ops", "tensors", "capture s", "process s", "GB"],
}

if __name__ == "__main__":
    options = arguments(
        __doc__,
        "parts",
        runs=(5, "of each command, whose median is shown (5)"),
        seconds=(4.0, "of every figure of environments"),
        models=((), "MODEL texts to capture"),
        one=("", "used inside: the model to capture"),
    )
    one_thread()
    if options.one:
        sys.exit(capture_one(options.one))
    makers: dict[str, Callable[[], Rows]] = {
        "commands": lambda: commands(options.runs), "simulator": simulator, "strategies": strategies,
        "environments": lambda: environments(options.seconds), "planners": planners,
        "capture": lambda: capture(options.models),
    }  # fmt: skip
    for part in options.parts or makers:
        print(markdown(HEADS[part], []), flush=True)
        for row in makers[part]():
            print(f"| {' | '.join(map(str, row))} |", flush=True)
