"""Predicted against measured step time of whole strategies on emulated hosts: blocks sleep for their priced time.

    sudo python -m benchmarks.emulated                     all rows, about an hour; rows that stand there are not run again
    sudo python -m benchmarks.emulated --models llama --rates 200mbit
    python -m benchmarks.emulated --table                  the table of tools/hosts/README.md from the rows

Four hosts with a slow device each run torch's own parts as `rlplace run` does: real tensors cross the shaped links, schedules,
buckets and collectives are torch's; what a block computes is stretched to the time that the cost model gives it there, so the
load of the machine does not matter while it is far below those times. Predictions know the links and collectives that
`rlplace measure --links` finds between the hosts, and nothing of the steps. Two things are as on a GPU, other than torch does
them on a processor: `fully_shard` gathers the next block's parameters and reduces gradients while a block computes. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import Row, add_row, arguments, markdown, read_rows
from rlplace.cluster.presets import cpu_kind
from rlplace.cost.timings import rank_correlation
from rlplace.errors import InputError, RlplaceError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.schedule import SCHEDULES, V
from rlplace.strategy.drafts import Draft, Mesh, plain_draft
from tools.hosts import HostsSpec, emulated_hosts, launch, measure_cluster
from tools.hosts.spec import parse_rate

HOSTS, BATCH, SEQ, STEPS = 4, 16, 16, 3
_LLAMA = "hidden_size=256,intermediate_size=768,num_attention_heads=8,num_key_value_heads=8,num_hidden_layers=8,vocab_size=512"
_SMALL = "hidden_size=256,num_hidden_layers=8,num_attention_heads=8,vocab_size=512"
MODELS = {
    "llama": f"hf:llama,{_LLAMA}",
    "gpt2": "hf:gpt2,n_layer=8,n_embd=256,n_head=8,vocab_size=512,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "bert": "hf:bert,num_hidden_layers=8,hidden_size=256,intermediate_size=1024,num_attention_heads=8,vocab_size=512,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "opt": f"hf:opt,{_SMALL},ffn_dim=1024,word_embed_proj_dim=256,max_position_embeddings=64,dropout=0,attention_dropout=0",
    "qwen2": f"hf:qwen2,{_SMALL},intermediate_size=768,num_key_value_heads=4",
}  # fmt: skip
RATES = ("1gbit", "200mbit", "50mbit")
FLOPS, BYTES_PER_S = 3e9, 1e9
"""Of a device whose blocks take far longer than this machine takes for them."""
ROWS = Path(__file__).with_suffix(".jsonl")
LIMIT_S = 900


def drafts(forward_s: Sequence[float]) -> Iterator[tuple[str, Draft]]:
    """Strategies of every kind on the hosts; stages are cut where the forward has done its share."""
    blocks, every = len(forward_s), tuple(range(HOSTS))
    done = np.cumsum(forward_s) / sum(forward_s)

    def bounds(stages: int) -> tuple[int, ...]:
        inner = [int(np.abs(done - part / stages).argmin()) + 1 for part in range(1, stages)]
        return (0, *inner, blocks)

    def flat(name: str, passes: int, recompute: int = 0, **mesh: int) -> tuple[str, Draft]:
        place = Mesh(every[: int(np.prod([mesh.get(axis, 1) for axis in ("replicate", "shard", "tensor")]))], **mesh)
        size = BATCH // place.data_degree // passes
        draft = plain_draft((0, blocks), [place], microbatch=(size,), microbatches=(passes,))
        again = bytes([recompute]) * blocks
        return f"{name} x{passes}{' full' * (recompute > 0)}", Draft(**{**vars(draft), "recompute": again})

    for passes in (1, 4):
        yield flat("one device", passes)
        yield flat("replicate", passes, replicate=HOSTS)
        for level in (1, 2, 3):
            yield flat(f"shard {level}", passes, shard=HOSTS, sharding=level)
        yield flat("tensor", passes, tensor=HOSTS)
        yield flat("hybrid 3", passes, replicate=2, shard=2, sharding=3)
        yield flat("tensor + replicate", passes, tensor=2, replicate=2)
        yield flat("tensor + shard", passes, tensor=2, shard=2, sharding=3)
        yield flat("two devices", passes, replicate=2)
    for mesh in ({"replicate": HOSTS}, {"shard": HOSTS, "sharding": 3}, {"tensor": HOSTS}):
        yield flat(next(iter(mesh)), 1, 2, **mesh)
    wide = {"replicate": {"replicate": 2}, "shard": {"shard": 2, "sharding": 1}, "tensor": {"tensor": 2}}
    for schedule, chunks in (
        ("gpipe", 1), ("1f1b", 1), ("interleaved_zero_bubble", 1), ("looped_bfs", 2), ("interleaved_1f1b", 2), ("zbv", 2),
    ):  # fmt: skip
        for places, passes, name, mesh in (
            (4, 4, "", {}), (4, 8, "", {}), (2, 4, "", {}), *((2, 4, f" + {axis}", sizes) for axis, sizes in wide.items()),
        ):  # fmt: skip
            if name and schedule not in ("1f1b", "zbv"):
                continue
            width = int(np.prod([size for axis, size in mesh.items() if axis != "sharding"]))
            row = [Mesh(every[width * at : width * (at + 1)], **mesh) for at in range(places)]
            turn = list(range(places))
            order = turn + (turn[::-1] if SCHEDULES[schedule].layout == V else turn) if chunks == 2 else turn
            size = BATCH // row[0].data_degree // passes
            draft = plain_draft(
                bounds(len(order)), row, order, microbatch=(size,), microbatches=(passes,), schedule=schedule
            )  # fmt: skip
            yield f"{schedule} {places} x{passes}{name}", draft


@cache
def captured(model: str) -> tuple[Any, ...]:
    """Returns a model at two batch sizes, and what of it the runtime runs."""
    import rlplace
    from rlplace.model.zoo import load_model
    from rlplace.runtime.strategy.facts import facts_of
    from rlplace.runtime.strategy.why_not import judge

    graphs = []
    for batch in (BATCH, BATCH // 4):
        loaded = load_model(MODELS[model], batch=batch, seq=SEQ)
        source = {"model": MODELS[model], "batch": batch, "seq": SEQ, "dtype": "fp32", "optimizer": "adam"}
        graphs.append(rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss, source=source))
    return (*graphs, *judge(facts_of(loaded.module, loaded.example_inputs)))


@cache
def links_of(rate: str) -> Any:
    """Returns the hosts with the links and collectives that are measured between them."""
    speeds = {"peak_flops": {"float32": FLOPS}, "memory_bandwidth_bytes_per_s": BYTES_PER_S}
    kind = msgspec.structs.replace(cpu_kind(1, 1 << 40, "sleeper"), **speeds)
    with emulated_hosts(HostsSpec(HOSTS, parse_rate(rate))) as hosts:
        return measure_cluster(hosts, kinds=[kind] * HOSTS)


def cells(model: str, rate: str) -> list[Row]:
    """Makes every strategy that runs, with what is predicted and how long its blocks sleep."""
    from rlplace.strategy.costs import Cut
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.plan import ask
    from rlplace.strategy.search.search import search

    first, other, why_not, only = captured(model)
    question = ask(first, links_of(rate), BATCH, other=other, why_not=why_not, only=only)
    costs, finer = question.costs, OpLevel(question, float("inf"))
    forward_s = costs.passes(0, Cut(BATCH)).forward_s
    found = dict(drafts(forward_s))
    found["the planner's pick"] = search(question, calls=1000).ranked[0].draft
    asked_for = []
    for name, draft in found.items():
        try:
            strategy = draft.strategy(costs.names)
            reason = None if question.why_not is None else question.why_not(draft)
            op_level_s = finer.evaluate(draft).step_time_s
        except InputError as error:
            reason = str(error)
        if reason is not None:
            print(f"{model} {rate} {name}: {reason}", file=sys.stderr)
            continue
        sleeps = [_sleeps(costs, draft, stage) for stage in range(draft.stages)]
        row = {"model": model, "rate": rate, "name": name, "predicted_s": op_level_s}
        asked_for.append({**row, "steps": STEPS, "strategy": strategy.to_dict(), "sleeps": sleeps})
    return asked_for


def _sleeps(costs: Any, draft: Draft, stage: int) -> dict[str, Any]:
    """Returns seconds of a stage's blocks: forward, backward with what runs again, the weights' part of it, and the update."""
    place = draft.places[draft.place_of_stage[stage]]
    joined = draft.data_degree // place.data_degree  # replicas of a wider stage whose samples a pass here computes together
    one = costs.passes(0, place.cut(draft.microbatch[0] * joined))
    update_s = costs.update_s(0, place.tensor) / (place.shard if place.sharding else 1)
    blocks = range(draft.bounds[stage], draft.bounds[stage + 1])
    backward_s = one.backward_s + one.again_s[np.frombuffer(draft.recompute, dtype=np.uint8), np.arange(len(costs.names))]
    by_block = {costs.names[b]: [one.forward_s[b], backward_s[b], one.weight_s[b]] for b in blocks}
    return {"blocks": by_block, "update_s": float(sum(update_s[b] for b in blocks))}


LATE_S = 0.01


class Sleeper:
    """Stretches what blocks do to their priced times; what took too long is taken from the next sleep, `LATE_S` at most.

    Seconds in which a block waits for collectives of its tensor group are not the block's: `waited_s` counts them.
    """

    def __init__(self) -> None:
        self.on, self.halves, self.owed_s, self.waited_s = False, False, 0.0, 0.0

    def clock(self) -> float:
        """Returns seconds without those waited for collectives inside blocks."""
        return time.perf_counter() - self.waited_s

    def pay(self, seconds: float, since: float) -> None:
        """Sleeps the rest of a time, of which this has passed."""
        self.owed_s = max(self.owed_s + seconds - (self.clock() - since), -LATE_S)
        if self.owed_s > 0:
            begin = time.perf_counter()
            time.sleep(self.owed_s)
            self.owed_s -= time.perf_counter() - begin

    def stretch(self, block: Any, forward_s: float, backward_s: float, weight_s: float) -> None:
        """Hooks of a block: its forward, and its backward from the gradient of its output to that of its input."""
        import torch
        from torch.utils import _pytree as pytree

        begins: list[float] = []

        def first(values: Any) -> Any:
            return next((v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad), None)

        def backward_s_now() -> float:
            return backward_s - (weight_s if self.halves else 0.0)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            begins.append(self.clock())

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            since = begins.pop()
            if not self.on:
                return
            self.pay(forward_s, since)
            taken, made = first((args, kwargs)), first(output)
            if made is None:
                return
            if taken is None:
                made.register_hook(lambda gradient: self.pay(backward_s_now(), self.clock()))
            else:
                entered: list[float] = []  # after the hooks of the tensor, in one of which the next block sleeps
                made.grad_fn.register_prehook(lambda gradients: entered.append(self.clock()))
                hooks: list[Any] = []  # removed when called: stages keep what they receive into from step to step

                def leaves(gradient: Any) -> None:
                    hooks.pop().remove()
                    self.pay(backward_s_now(), entered.pop() if entered else self.clock())

                hooks.append(taken.register_hook(leaves))

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, with_kwargs=True)


def run(cell: dict[str, Any]) -> list[float]:
    """Returns seconds of some steps of a strategy, the slowest process of each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from rlplace.model.zoo import load_model
    from rlplace.plan.strategy import Strategy
    from rlplace.runtime.base import activity
    from rlplace.runtime.base.steps import train_step
    from rlplace.runtime.job.distribute import distribute

    strategy, rank = Strategy.from_dict(cell["strategy"]), dist.get_rank()
    mine = [sleeps for stage, sleeps in zip(strategy.stages, cell["sleeps"], strict=True) if rank in stage.devices]
    torch.manual_seed(0)
    size = strategy.pipelines[0].microbatch[0]
    loaded = load_model(MODELS[cell["model"]], batch=size, seq=SEQ, device="cpu")
    sleeper = Sleeper()
    modules = dict(loaded.module.named_modules())
    for sleeps in mine:
        for path, seconds in sleeps["blocks"].items():
            sleeper.stretch(modules[path], *seconds)
    plan = PlacementPlan("0" * 64, "emulated", 0, np.zeros(0, dtype=np.int32), strategy=strategy)
    model = distribute(loaded.module, plan, loaded.example_inputs, loss=loaded.loss, device="cpu")
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.0)
    shared = [modules[path] for sleeps in mine for path in sleeps["blocks"] if isinstance(modules[path], FSDPModule)]
    for block, following in pairwise(shared):
        block.set_modules_to_forward_prefetch([following])
    for block in shared:
        block._set_unshard_async_op(True)
    weights = [sum(seconds[2] for seconds in sleeps["blocks"].values()) for sleeps in mine]
    batch = load_model(MODELS[cell["model"]], batch=BATCH, seq=SEQ, device="cpu").example_inputs
    update = optimizer.step

    def slow_update() -> None:
        for work in PENDING:
            work.wait()
        PENDING.clear()
        begin = sleeper.clock()
        update()
        sleeper.pay(sum(sleeps["update_s"] for sleeps in mine), begin)

    optimizer.step = slow_update
    CHUNKS.update(sleeper=sleeper, weights=weights)
    seconds = []
    for step in range(cell["steps"] + 1):
        sleeper.on, sleeper.owed_s = True, 0.0
        dist.barrier()
        activity.record(torch.device("cpu"))
        begin = time.perf_counter()
        train_step(model, optimizer, batch)
        CHUNKS["spent_s"] = activity.recorded()
        took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if step:
            seconds.append(took.item())
    return seconds


PENDING: list[Any] = []
CHUNKS: dict[str, Any] = {}


def as_a_gpu() -> None:
    """Reductions of `fully_shard` run beside what is computed; halves of a backward sleep for their own part."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as inside
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.pipelining import PipelineStage

    def scatter(output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        PENDING.append(dist.reduce_scatter_tensor(output, input, group=group, async_op=True))

    def reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        PENDING.append(dist.all_reduce(tensor, group=group, async_op=True))

    beside = {"reduce_scatter_single": scatter, "reduce_scatter_tensor": scatter, "all_reduce": reduce}
    collectives.dist = SimpleNamespace(**{**vars(dist), **beside})
    wait = inside.wait_tensor

    def waited(tensor: Any) -> Any:
        begin = time.perf_counter()
        try:
            return wait(tensor)
        finally:
            CHUNKS["sleeper"].waited_s += time.perf_counter() - begin

    inside.wait_tensor = waited
    first, second = PipelineStage.backward_one_chunk, PipelineStage.backward_weight_one_chunk

    def backward(self: Any, number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
        CHUNKS["sleeper"].halves = not full_backward
        return first(self, number, loss, full_backward, last_backward)

    def weights(self: Any, number: int, last_backward: bool = False) -> Any:
        sleeper, begin = CHUNKS["sleeper"], CHUNKS["sleeper"].clock()
        sleeper.halves = True
        result = second(self, number, last_backward)
        sleeper.pay(CHUNKS["weights"][sorted(CHUNKS["stages"]).index(self.stage_index)], begin)
        return result

    PipelineStage.backward_one_chunk, PipelineStage.backward_weight_one_chunk = backward, weights


def worker(folder: str) -> None:
    """Runs, in one process, strategies as their files appear."""
    import torch
    import torch.distributed as dist

    from rlplace.runtime.base.ranks import gather_objects, start_group

    torch.set_num_threads(1)
    start_group("gloo", LIMIT_S)
    as_a_gpu()
    rank, number = dist.get_rank(), 0
    while True:
        path = Path(folder, f"{number}.json")
        if not path.exists():
            time.sleep(0.02)
            continue
        cell = json.loads(path.read_text())
        stages, factor = cell["strategy"]["stages"], cell.get("factors", [1.0] * HOSTS)[rank]
        for sleeps in cell["sleeps"]:
            sleeps["blocks"] = {name: [factor * s for s in seconds] for name, seconds in sleeps["blocks"].items()}
            sleeps["update_s"] *= factor
        CHUNKS["stages"] = [index for index, stage in enumerate(stages) if rank in stage["devices"]]
        seconds, said = run(cell), gather_objects(CHUNKS["spent_s"])
        busy_s = [max(one.get(f"stage {n}", 0.0) for one in said) for n in range(len(stages))] if len(stages) > 1 else []
        if rank == 0:
            print(json.dumps({"step_s": seconds, "stage_busy_s": busy_s}), flush=True)
        number += 1


class Lab:
    """Emulated hosts whose processes run one strategy after the other; after one that failed the next ones start anew."""

    def __init__(self, spec: HostsSpec, limit_s: float = LIMIT_S) -> None:
        self._spec, self._limit_s = spec, limit_s
        self._stack, self._count, self._ending = contextlib.ExitStack(), 0, False
        self._job: Any = None
        self._said: list[Row] = []

    def __call__(self, cell: Row) -> Row:
        """Runs a strategy: seconds of its steps, and of each stage.

        Raises:
            RlplaceError: It failed, or took too long.
        """
        if self._job is None:
            self._start()
        self._said.clear()
        target = self._folder / f"{self._count}.json"
        target.with_suffix(".part").write_text(json.dumps(cell))
        target.with_suffix(".part").rename(target)
        self._count += 1
        end = time.monotonic() + self._limit_s
        try:
            while not self._said:
                self._job.check()
                if time.monotonic() > end:
                    raise RlplaceError(f"it took more than {self._limit_s:g} s")
                time.sleep(0.05)
        except RlplaceError:
            self.close()
            raise
        return self._said[0]

    def _start(self) -> None:
        self._count, self._ending = 0, False
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = self._stack.enter_context(emulated_hosts(self._spec))
        command = [sys.executable, "-m", "benchmarks.emulated", "--worker", str(self._folder)]
        self._job = self._stack.enter_context(launch(hosts, command, env={"OMP_NUM_THREADS": "1"}, sink=self._hear))

    def _hear(self, rank: int, host: int, stream: int, line: str) -> None:
        if stream == 1 and line.startswith("{"):
            self._said.append(json.loads(line))
        elif stream == 2 and "Error" in line and not self._ending:
            print(f"[{rank}] {line}", file=sys.stderr)

    def close(self) -> None:
        """Ends the processes and removes the hosts."""
        self._ending = True  # what ranks say when others end first
        self._stack.close()
        self._job = None


def width(cell: Row) -> int:
    """Counts the devices of a strategy, which are its processes."""
    return len({device for stage in cell["strategy"]["stages"] for device in stage["devices"]})


def measure(left: list[Row], rate: str) -> None:
    """Runs cells on as many hosts as they need, and adds their rows."""
    for count in sorted({width(cell) for cell in left}, reverse=True):
        lab = Lab(HostsSpec(count, parse_rate(rate)))
        for cell in (cell for cell in left if width(cell) == count):
            try:
                row = {key: cell[key] for key in ("model", "rate", "name", "predicted_s")}
                add_row(ROWS, {**row, "step_s": lab(cell)["step_s"]})
            except RlplaceError as error:
                print(f"left out: {cell['model']} {rate} {cell['name']}: {error}", file=sys.stderr)
        lab.close()


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> list[str]:
    """Compares predicted and measured steps: rank correlation, mean error, and the pick above the fastest."""
    error = np.mean([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)])
    pick = measured[int(np.argmin(predicted))] / min(measured) - 1
    return [f"{rank_correlation(predicted, measured):.3f}", f"{100 * error:.1f} %", f"{100 * pick:.1f} %"]


def by_cell(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Groups rows by model and rate."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(path):
        groups.setdefault((row["model"], row["rate"]), []).append(row)
    return groups


def table() -> str:
    """Makes the table by model and rate."""
    lines = []
    for (model, rate), found in by_cell(ROWS).items():
        measured = [float(np.median(row["step_s"])) for row in found]
        lines.append([f"{model}, {rate}", len(found), *accuracy([row["predicted_s"] for row in found], measured)])
    return markdown(["model, links", "plans", "rank correlation", "mean error", "pick above the fastest"], lines)


if __name__ == "__main__":
    options = arguments(
        __doc__,
        models=(("llama", "gpt2", "bert"), "names", MODELS),
        rates=(tuple(RATES), "of the links"),
        table="only the table",
        worker=("", "used inside"),
    )
    if options.worker:
        worker(options.worker)
        sys.exit()
    for model, rate in () if options.table else product(options.models, options.rates):
        known = {row["name"] for row in by_cell(ROWS).get((model, rate), ())}
        measure([cell for cell in cells(model, rate) if cell["name"] not in known], rate)
    print(table())
