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

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.emulated_lab import Lab
from benchmarks.emulated_plans import HOSTS, KINDS, MODELS, Shapes
from benchmarks.emulated_worker import first_in_line
from benchmarks.harness import Row, add_row, arguments, markdown, read_rows
from rlplace.cluster.links import Links
from rlplace.cluster.parse import Cluster
from rlplace.cluster.presets import DeviceKind, cpu_kind
from rlplace.cost.timings import rank_correlation
from rlplace.errors import InputError, RlplaceError
from rlplace.plan.strategy import Strategy
from rlplace.strategy.costs import BlockCosts, Cut
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.meshes import expert_share_degree, share_degree
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tools.hosts import HostsSpec, cluster_of, emulated_hosts, measure_cluster
from tools.hosts.spec import parse_rate

PICK = "the planner's pick"
STEPS = 2

RATES = ("1gbit", "200mbit", "50mbit")
BYTES_PER_S = 1e9
"""Of the memory of a device."""
ROWS = Path(__file__).with_suffix(".jsonl")


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


def devices_of(model: str) -> list[DeviceKind]:
    """Returns the slow device of each host."""

    def device(times: float) -> DeviceKind:
        speeds = {"peak_flops": {"float32": MODELS[model].flops / times}, "memory_bandwidth_bytes_per_s": BYTES_PER_S / times}
        return msgspec.structs.replace(cpu_kind(1, 1 << 40, f"sleeper-{times:g}"), **speeds)

    return [device(times) for times in MODELS[model].slower]


@cache
def links_of(rate: str) -> Links:
    """Returns the links and collectives that are measured between the hosts."""
    with emulated_hosts(HostsSpec(HOSTS, parse_rate(rate))) as hosts, first_in_line():
        return measure_cluster(hosts).links


def hosts_of(model: str, rate: str) -> Cluster:
    """Returns the hosts of a model with measured links."""
    return replace(cluster_of(HostsSpec(HOSTS, parse_rate(rate)), kinds=devices_of(model)), links=links_of(rate))


def question_of(model: str, cluster: Cluster, refused: Callable[[Draft], str | None] | None = None) -> SearchProblem:
    """Returns what a planner is asked; `refused` says why it may not take a strategy that runs."""
    first, other, why_not, only = captured(model)

    def judged(draft: Draft) -> str | None:
        reason: str | None = None if refused is None else refused(draft)
        return reason or (None if why_not is None else why_not(draft))

    return ask(first, cluster, MODELS[model].batch, other=other, why_not=judged, only=only)


def cell_of(model: str, draft: Draft, costs: BlockCosts) -> Row:
    """Returns what workers need to run a strategy: the model, the strategy, and how long its blocks sleep."""
    kinds = [costs.kinds.index(kind.name) for kind in devices_of(model)]
    sleeps = [sleeps_of(costs, one, stage, kinds) for one in draft.pipelines for stage in range(one.stages)]
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


def sleeps_of(costs: BlockCosts, draft: Draft, stage: int, kinds: Sequence[int]) -> dict[str, Any]:
    """Returns seconds of a stage's blocks: forward, backward with what runs again, the weights' part of it, and the update.

    `kinds` are those of all devices; the slowest of a stage's devices counts.
    """
    place = draft.places[draft.place_of_stage[stage]]
    together = draft.data_degree // place.data_degree  # replicas of a wider stage whose samples a pass here computes together
    cut = place.cut(draft.microbatch[0] * together)
    own = max({kinds[device] for device in place.devices}, key=lambda kind: float(costs.passes(kind, cut).forward_s.sum()))
    one = costs.passes(own, cut)
    held = costs.held(place.tensor, place.expert)
    dense, spread = held.weight_bytes - held.expert_bytes[0], held.expert_bytes[0]
    part = (dense / share_degree(place) + spread / expert_share_degree(place)) / np.maximum(held.weight_bytes, 1)
    update_s = costs.update_s(own, place.tensor, place.expert) * part
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
        names=((), "of strategies; default: all"),
        table="only the table",
    )
    for model, rate in () if options.table else product(options.models, options.rates):
        known = {row["name"] for row in by_cell(ROWS).get((model, rate), ())}
        measure([cell for cell in cells(model, rate, known) if cell[0]["name"] in (options.names or [cell[0]["name"]])], rate)
    print(table())
