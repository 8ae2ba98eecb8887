"""Predicted against measured step time of whole strategies on emulated hosts: blocks sleep for their priced time.

    sudo python -m benchmarks.emulated                     all rows, about an hour; rows that stand there are not run again
    sudo python -m benchmarks.emulated --models llama --rates 200mbit
    python -m benchmarks.emulated --table                  the table of tools/hosts/README.md from the rows

Four hosts with a slow device each run torch's own parts as `rlplace run` does: real tensors cross the shaped links, schedules,
buckets and collectives are torch's; what a block computes is stretched to the time that the cost model gives it there, so the
load of the machine does not matter while it is far below those times. Predictions know the links and collectives that
`rlplace measure --links` finds between the hosts, and nothing of the steps. Needs root.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.emulated_worker import Lab, first_in_line
from benchmarks.harness import Row, add_row, arguments, markdown, read_rows
from rlplace.cluster.parse import Cluster
from rlplace.cluster.presets import DeviceKind, cpu_kind
from rlplace.cost.timings import rank_correlation
from rlplace.errors import InputError, RlplaceError
from rlplace.plan.schedule import SCHEDULES, V
from rlplace.plan.strategy import Strategy
from rlplace.strategy.costs import BlockCosts, Cut
from rlplace.strategy.drafts import Draft, Mesh, plain_draft
from rlplace.strategy.executor.meshes import expert_share_degree, share_degree
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tools.hosts import HostsSpec, emulated_hosts, measure_cluster
from tools.hosts.spec import parse_rate

PICK = "the planner's pick"
HOSTS, STEPS = 4, 2


class Model(NamedTuple):
    """A model to run.

    Attributes:
        text: MODEL, as the command line takes it.
        batch: Samples of a step.
        seq: Positions of a sample.
        flops: Of a device whose blocks take far longer than this machine takes for them.
        kind: Of its strategies: plain, experts or context.
    """

    text: str
    batch: int = 16
    seq: int = 16
    flops: float = 3e9
    kind: str = "plain"


_LLAMA = "hidden_size=256,intermediate_size=768,num_attention_heads=8,num_key_value_heads=8,num_hidden_layers=8,vocab_size=512"
_SMALL = "hidden_size=256,num_hidden_layers=8,num_attention_heads=8,vocab_size=512"
_QWEN3 = "hidden_size=256,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,vocab_size=512"
MODELS = {
    "llama": Model(f"hf:llama,{_LLAMA}"),
    "gpt2": Model(
        "hf:gpt2,n_layer=8,n_embd=256,n_head=8,vocab_size=512,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    ),
    "bert": Model(
        "hf:bert,num_hidden_layers=8,hidden_size=256,intermediate_size=1024,num_attention_heads=8,vocab_size=512,"
        "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    ),
    "opt": Model(
        f"hf:opt,{_SMALL},ffn_dim=1024,word_embed_proj_dim=256,max_position_embeddings=64,dropout=0,attention_dropout=0"
    ),
    "qwen2": Model(f"hf:qwen2,{_SMALL},intermediate_size=768,num_key_value_heads=4"),
    "mixture": Model(
        f"hf:qwen3_moe,{_QWEN3},moe_intermediate_size=128,num_experts=16,num_experts_per_tok=4", 16, 32, 1e9, "experts"
    ),
    "long": Model(f"hf:llama,{_LLAMA.replace('layers=8', 'layers=4')}", 4, 128, 1e9, "context"),
}  # fmt: skip
RATES = ("1gbit", "200mbit", "50mbit")
BYTES_PER_S = 1e9
"""Of the memory of a device."""
ROWS = Path(__file__).with_suffix(".jsonl")

Drafts = Iterator[tuple[str, Draft]]


class Shapes:
    """Strategies on the hosts, with names.

    Args:
        forward_s: Of each block; stages are cut where the forward has done its share.
        batch: Samples of a step.
    """

    def __init__(self, forward_s: Sequence[float], batch: int) -> None:
        self._done, self._blocks, self._batch = np.cumsum(forward_s) / sum(forward_s), len(forward_s), batch

    def flat(self, name: str, passes: int, recompute: int = 0, **mesh: int) -> tuple[str, Draft]:
        """Returns a strategy of one stage."""
        place = _mesh(0, mesh)
        draft = plain_draft((0, self._blocks), [place], microbatch=(self._size(place, passes),), microbatches=(passes,))
        again = bytes([recompute]) * self._blocks
        return f"{name} x{passes}{' full' * (recompute > 0)}", replace(draft, recompute=again)

    def chain(self, name: str, schedule: str, places: int, passes: int, **mesh: int) -> tuple[str, Draft]:
        """Returns a pipeline over so many places."""
        row = [_mesh(at, mesh) for at in range(places)]
        turn = list(range(places))
        order = turn
        if schedule in ("looped_bfs", "interleaved_1f1b", "zbv"):  # two chunks a device
            order = turn + (turn[::-1] if SCHEDULES[schedule].layout == V else turn)
        inner = [int(np.abs(self._done - part / len(order)).argmin()) + 1 for part in range(1, len(order))]
        draft = plain_draft(
            (0, *inner, self._blocks), row, order,
            microbatch=(self._size(row[0], passes),), microbatches=(passes,), schedule=schedule,
        )  # fmt: skip
        return f"{schedule} {places} x{passes}{name}", draft

    def _size(self, place: Mesh, passes: int) -> int:
        return self._batch // place.data_degree // passes


def _mesh(at: int, mesh: dict[str, int]) -> Mesh:
    """Returns the mesh of these sizes, the `at`-th along the hosts."""
    width = math.prod(mesh.get(axis, 1) for axis in ("replicate", "shard", "context", "tensor"))
    return Mesh(tuple(range(width * at, width * (at + 1))), **mesh)


def plain(shapes: Shapes) -> Drafts:
    """Yields strategies with the axes that every model has."""
    flat, chain = shapes.flat, shapes.chain
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
    for schedule in ("gpipe", "1f1b", "interleaved_zero_bubble", "looped_bfs", "interleaved_1f1b", "zbv"):
        for places, passes in ((4, 4), (4, 8), (2, 4)):
            yield chain("", schedule, places, passes)
        for axis, sizes in wide.items() if schedule in ("1f1b", "zbv") else ():
            yield chain(f" + {axis}", schedule, 2, 4, **sizes)


def experts(shapes: Shapes) -> Drafts:
    """Yields strategies of a mixture: experts spread over all hosts or over pairs, at every level, and not at all."""
    flat, chain = shapes.flat, shapes.chain
    yield flat("one device", 1)
    yield flat("replicate", 1, replicate=HOSTS)
    yield flat("tensor", 1, tensor=HOSTS)
    for level in (1, 3):
        yield flat(f"shard {level}", 1, shard=HOSTS, sharding=level)
    for degree in (2, 4):
        for level in (1, 2, 3):
            yield flat(f"shard {level} + expert {degree}", 1, shard=HOSTS, sharding=level, expert=degree)
        for level in (1, 3):
            yield flat(f"shard {level} + expert {degree}", 2, shard=HOSTS, sharding=level, expert=degree)
            yield flat(f"tensor + shard {level} + expert {degree}", 1, tensor=2, shard=2, sharding=level, expert=degree)
        yield flat(f"shard + expert {degree}", 1, 2, shard=HOSTS, sharding=3, expert=degree)
    yield flat("tensor + expert 4", 1, tensor=HOSTS, expert=4)
    yield flat("tensor + expert 4", 2, tensor=HOSTS, expert=4)
    yield flat("tensor + replicate + expert 2", 1, tensor=2, replicate=2, expert=2)
    for level in (1, 3):
        yield flat(f"hybrid {level} + expert 2", 1, replicate=2, shard=2, sharding=level, expert=2)
    yield flat("context + shard 1 + expert 4", 1, context=2, shard=2, sharding=1, expert=4)
    yield chain("", "1f1b", 4, 4)
    yield chain("", "zbv", 2, 4)
    for schedule in ("1f1b", "zbv"):
        yield chain(" + shard + expert 2", schedule, 2, 4, shard=2, sharding=1, expert=2)
        yield chain(" + tensor + expert 2", schedule, 2, 4, tensor=2, expert=2)


def context(shapes: Shapes) -> Drafts:
    """Yields strategies of long samples: positions divided by all hosts or by pairs, beside every axis, and not at all."""
    flat, chain = shapes.flat, shapes.chain
    yield flat("one device", 1)
    yield flat("replicate", 1, replicate=HOSTS)
    yield flat("tensor", 1, tensor=HOSTS)
    for level in (1, 3):
        yield flat(f"shard {level}", 1, shard=HOSTS, sharding=level)
    for passes in (1, 2, 4):
        yield flat("context 4", passes, context=4)
    for passes in (1, 2):
        yield flat("context 2 + replicate", passes, context=2, replicate=2)
        for level in (1, 2, 3):
            yield flat(f"context 2 + shard {level}", passes, context=2, shard=2, sharding=level)
        yield flat("context 2 + tensor", passes, context=2, tensor=2)
    yield flat("context 4", 1, 2, context=4)
    yield flat("context 2 + shard", 1, 2, context=2, shard=2, sharding=3)
    yield flat("context 2 + tensor", 1, 2, context=2, tensor=2)
    yield flat("context 2", 1, context=2)
    yield flat("tensor + replicate", 1, tensor=2, replicate=2)
    for schedule in ("1f1b", "zbv"):
        yield chain("", schedule, 4, 4)
        yield chain(" + tensor", schedule, 2, 4, tensor=2)


KINDS = {"plain": plain, "experts": experts, "context": context}


@cache
def captured(model: str) -> tuple[Any, ...]:
    """Returns a model at two batch sizes, and what of it the runtime runs."""
    import rlplace
    from rlplace.model.zoo import load_model
    from rlplace.runtime.strategy.facts import facts_of
    from rlplace.runtime.strategy.why_not import judge

    graphs = []
    text, whole, seq, *_ = MODELS[model]
    for batch in (whole, max(2, whole // 4)):
        loaded = load_model(text, batch=batch, seq=seq)
        source = {"model": text, "batch": batch, "seq": seq, "dtype": "fp32", "optimizer": "adam"}
        graphs.append(rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss, source=source))
    return (*graphs, *judge(facts_of(loaded.module, loaded.example_inputs)))


def device_of(model: str) -> DeviceKind:
    """Returns the slow device of a host."""
    speeds = {"peak_flops": {"float32": MODELS[model].flops}, "memory_bandwidth_bytes_per_s": BYTES_PER_S}
    return msgspec.structs.replace(cpu_kind(1, 1 << 40, "sleeper"), **speeds)


@cache
def hosts_of(model: str, rate: str) -> Cluster:
    """Returns the hosts with the links and collectives that are measured between them."""
    with emulated_hosts(HostsSpec(HOSTS, parse_rate(rate))) as hosts, first_in_line():
        return measure_cluster(hosts, kinds=[device_of(model)] * HOSTS)


def question_of(model: str, cluster: Cluster, refused: Callable[[Draft], str | None] | None = None) -> SearchProblem:
    """Returns what a planner is asked; `refused` says why it may not take a strategy that runs."""
    first, other, why_not, only = captured(model)

    def judged(draft: Draft) -> str | None:
        reason: str | None = None if refused is None else refused(draft)
        return reason or (None if why_not is None else why_not(draft))

    return ask(first, cluster, MODELS[model].batch, other=other, why_not=judged, only=only)


def cell_of(model: str, draft: Draft, costs: BlockCosts) -> Row:
    """Returns what workers need to run a strategy: the model, the strategy, and how long its blocks sleep."""
    sleeps = [sleeps_of(costs, draft, stage) for stage in range(draft.stages)]
    text, _, seq, *_ = MODELS[model]
    return {"model": text, "seq": seq, "steps": STEPS, "strategy": draft.strategy(costs.names).to_dict(), "sleeps": sleeps}


def cells(model: str, rate: str, known: Container[str]) -> Iterator[tuple[Row, Row]]:
    """Yields every strategy that runs and is not known: its row with what is predicted, and its cell."""
    question = question_of(model, hosts_of(model, rate))
    costs, finer = question.costs, OpLevel(question, float("inf"))
    found = dict(KINDS[MODELS[model].kind](Shapes(costs.passes(0, Cut(MODELS[model].batch)).forward_s, MODELS[model].batch)))
    if PICK not in known:
        found[PICK] = search(question, calls=400).ranked[0].draft
    for name, draft in found.items():
        if name in known:
            continue
        try:
            draft.strategy(costs.names)
            reason = None if question.why_not is None else question.why_not(draft)
            step_s = finer.evaluate(draft).step_time_s
        except InputError as error:
            reason = str(error)
        if reason is not None:
            print(f"{model} {rate} {name}: {reason}", file=sys.stderr)
            continue
        yield {"model": model, "rate": rate, "name": name, "predicted_s": step_s}, cell_of(model, draft, costs)


def sleeps_of(costs: BlockCosts, draft: Draft, stage: int) -> dict[str, Any]:
    """Returns seconds of a stage's blocks: forward, backward with what runs again, the weights' part of it, and the update."""
    place = draft.places[draft.place_of_stage[stage]]
    joined = draft.data_degree // place.data_degree  # replicas of a wider stage whose samples a pass here computes together
    one = costs.passes(0, place.cut(draft.microbatch[0] * joined))
    held = costs.held(place.tensor, place.expert)
    dense, spread = held.weight_bytes - held.expert_bytes[0], held.expert_bytes[0]
    own = dense / share_degree(place) + spread / expert_share_degree(place)
    update_s = costs.update_s(0, place.tensor, place.expert) * own / np.maximum(held.weight_bytes, 1)
    blocks = range(draft.bounds[stage], draft.bounds[stage + 1])
    backward_s = one.backward_s + one.again_s[np.frombuffer(draft.recompute, dtype=np.uint8), np.arange(len(costs.names))]
    by_block = {costs.names[b]: [one.forward_s[b], backward_s[b], one.weight_s[b]] for b in blocks}
    return {"blocks": by_block, "update_s": float(sum(update_s[b] for b in blocks))}


def width(cell: Row) -> int:
    """Counts the devices of a strategy, which are its processes."""
    return len(Strategy.from_dict(cell["strategy"]).devices)


def measure(left: Sequence[tuple[Row, Row]], rate: str) -> None:
    """Runs cells on as many hosts as they need, and adds their rows."""
    for count in sorted({width(cell) for _, cell in left}, reverse=True):
        lab = Lab(HostsSpec(count, parse_rate(rate)))
        for row, cell in left:
            if width(cell) == count:
                try:
                    told = lab(cell)
                    add_row(ROWS, {**row, "step_s": told["step_s"], "late_s": told["late_s"]})
                except RlplaceError as error:
                    print(f"left out: {row['model']} {rate} {row['name']}: {error}", file=sys.stderr)
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
    )
    for model, rate in () if options.table else product(options.models, options.rates):
        known = {row["name"] for row in by_cell(ROWS).get((model, rate), ())}
        measure([*cells(model, rate, known)], rate)
    print(table())
