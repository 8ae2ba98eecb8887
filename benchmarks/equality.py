"""Twelve kinds of models under strategies of every kind on eight processes, compared with the plain model.

    python -m benchmarks.equality                          all cells, several hours of one core
    python -m benchmarks.equality --kinds gpt2 llama       cells of some models; rows of others stay
    python -m benchmarks.equality --few                    the cells of the tests, in one launch; ends with how many do not hold
    python -m benchmarks.equality --table                  the table of the docs from the rows

A cell is a model and a strategy in double precision, with AdamW: the loss and every gradient of the first step, parameters and
buffers after three, and the norm that clipping finds in the third, whose batch is run twice so that gradients add up. Its
figures are largest differences, relative to the largest element of the tensor; gradients that are nothing but rounding (the
bias of keys) are compared with 1e-8 of the largest, and what they train with the learning rate. One launch of eight gloo
processes runs all cells of a model; where a cell fails or hangs, the rest run in another launch.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.equality_models import BATCH, KINDS, LABELLED, batch_of, build, kind_of
from benchmarks.groups import run_jobs
from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, one_thread, read_rows, replaced, write_rows
from rlplace.errors import InputError
from rlplace.plan.strategy import HEADS, RING, TARGETS, Strategy
from rlplace.runtime.state.whole import own_part, seen
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.context_facts import context_facts
from rlplace.runtime.strategy.fact_records import Conduct
from rlplace.runtime.strategy.run import prepare

PROCESSES, RATE, LARGEST_NORM = 8, 1e-2, 0.1
TIMES = (1, 1, 2)
"""How often each step runs the batch before its optimizer's step."""

ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = ROOT / "benchmarks/EQUALITY.md"
MOST = {"loss": 1e-12, "gradient": 1e-9, "norm": 1e-9, "trained": 1e-8}
"""Differences that count as equal."""

FEW = (
    ("llama", "PP zbv+TP+SP|"), ("gpt2", "PP+TP+FSDP|full"), ("bert", "PP+FSDP|selective"), ("t5", "PP zbv+FSDP|"),
    ("vit", "FSDP 2|"), ("mixtral", "FSDP 3|"), ("resnet", "PP interleaved|"), ("gpt_neox", "TP+SP|selective"),
    ("qwen2", "FSDP 3|offload"), ("distilbert", "hybrid|"),
)  # fmt: skip
"""Cells of the tests; strategies of four processes that `test_native_equality` and `test_strategy_loop` run are left out."""

Plan = Callable[[Sequence[str]], dict[str, Any]]
HOW = ("", "full", "selective")
SPREAD, MIXTURES = "experts", ("mixtral", "qwen3_moe", "gpt_oss")
DIVIDED, RECOMMENDER = "tables", "recommender"
PARTS, NO_SEQUENCES = "context", ("vit", "mlp", "resnet")
BESIDE, UNLIKE_MIXTURES = "unlike", ("mixtral", "qwen3_moe")
UNLIKE_KINDS = ("gpt2", "llama", *UNLIKE_MIXTURES)


def _layers(blocks: Sequence[str]) -> list[str]:
    """Returns the repeated blocks."""
    return [block for block in blocks if block.rpartition(".")[2].isdigit()]


def _flat(mesh: Mapping[str, int], sharding: int, **options: Any) -> Plan:
    """Returns one stage on as many processes as the mesh has."""

    def plan(blocks: Sequence[str]) -> dict[str, Any]:
        return _strategy([_stage(blocks, range(prod(mesh.values())), mesh, sharding, options)], mesh, 1, None)

    return plan


def _chain(places: int, chunks: int, schedule: str, mesh: Mapping[str, int], sharding: int, **options: Any) -> Plan:
    """Returns a pipeline; each place holds so many stages, in a v where the schedule wants it."""

    def plan(blocks: Sequence[str]) -> dict[str, Any]:
        wide = PROCESSES // places
        devices = [range(wide * place, wide * (place + 1)) for place in range(places)]
        turns = [devices, devices[::-1] if schedule in ("zbv", "dualpipev") else devices]
        order = [device for turn in turns[:chunks] for device in turn]
        starts = [blocks.index(block) for block in _layers(blocks)]
        bounds = [starts[round(n * len(starts) / len(order))] for n in range(1, len(order))]
        parts = [blocks[a:b] for a, b in pairwise([0, *bounds, len(blocks)])]
        stages = [_stage(part, own, mesh, sharding, options) for part, own in zip(parts, order, strict=True)]
        return _strategy(stages, mesh, 1, schedule)

    return plan


def _stage(blocks: Sequence[str], devices: Any, mesh: Any, sharding: int, options: Mapping[str, Any]) -> dict[str, Any]:
    by_block = {key: dict.fromkeys(_layers(blocks), options[key]) for key in ("recompute", "offload") if options.get(key)}
    kept = {key: value for key, value in options.items() if key not in ("recompute", "offload")}
    stage = {"blocks": list(blocks), "devices": list(devices), "mesh": dict(mesh), "sharding": sharding}
    return stage | by_block | kept


def _strategy(
    stages: list[Any], mesh: Mapping[str, int], microbatch: int, schedule: str | None, samples: int = BATCH
) -> dict[str, Any]:
    replicas = mesh.get("replicate", 1) * mesh.get("shard", 1)
    counts: dict[str, Any] = {"batch": samples, "microbatch": [microbatch], "microbatches": [samples // replicas // microbatch]}
    counts |= {"reduction": TARGETS} if mesh.get("context", 1) > 1 else {}
    return counts | ({} if schedule is None else {"schedule": schedule}) | {"stages": stages}


def plans() -> Iterator[tuple[str, str, Plan]]:
    """Yields column of the table, recomputation or offload, and what makes the strategy from a model's blocks."""
    pair, both = {"shard": 2}, {"shard": 2, "tensor": 2}
    copies, four = {"replicate": 2}, {"replicate": 2, "shard": 4}
    for how in HOW:
        yield "replicate", how, _flat({"replicate": 8}, 0, recompute=how)
        yield "FSDP 3", how, _flat({"shard": 8}, 3, recompute=how)
        yield "hybrid", how, _flat(four, 3 if how else 1, recompute=how)
        yield "TP", how, _flat({"replicate": 2, "tensor": 4}, 0, recompute=how)
        yield "TP+SP", how, _flat({"replicate": 4, "tensor": 2}, 0, recompute=how, sequence_parallel=True)
        yield "TP+SP+FSDP", how, _flat({"shard": 4, "tensor": 2}, 3, recompute=how, sequence_parallel=True)
        yield "PP 1f1b", how, _chain(4, 1, "1f1b", copies, 0, recompute=how)
        yield "PP zbv", how, _chain(2, 2, "zbv", {"replicate": 4}, 0, recompute=how)
        yield "PP+FSDP", how, _chain(4, 1, "1f1b", pair, 1, recompute=how)
        yield "PP+TP+FSDP", how, _chain(2, 1, "1f1b", both, 1, recompute=how)
    yield "FSDP 1", "", _flat({"shard": 8}, 1)
    yield "FSDP 2", "", _flat({"shard": 8}, 2)
    yield "FSDP 3", "offload", _flat({"shard": 8}, 3, offload="all")
    yield "hybrid", "offload", _flat(four, 3, offload="all", recompute="full")
    yield "PP gpipe", "", _chain(4, 1, "gpipe", copies, 0)
    yield "PP interleaved", "", _chain(2, 2, "interleaved_1f1b", {"replicate": 4}, 0)
    yield "PP zbv+FSDP", "", _chain(2, 2, "zbv", {"shard": 4}, 1)
    yield "PP zbv+TP+SP", "", _chain(2, 2, "zbv", {"replicate": 2, "tensor": 2}, 0, sequence_parallel=True)


def spread_plans() -> Iterator[tuple[str, str, Plan]]:
    """Yields the same of strategies that spread experts."""
    pair, four, both = {"shard": 2, "tensor": 2}, {"shard": 4}, {"replicate": 2, "shard": 4}
    yield "PP+EP 4-2+FSDP", SPREAD, _unlike(_chain(2, 1, "1f1b", four, 1), (4, 2))
    yield "PP zbv+EP 4-1-2-2+FSDP", SPREAD, _unlike(_chain(2, 2, "zbv", four, 1), (4, 1, 2, 2))
    for how in HOW:
        more = f" {how}" if how else ""
        yield f"EP 4+FSDP 3{more}", SPREAD, _flat({"shard": 8}, 3, recompute=how, expert=4)
        yield f"EP 2+FSDP 1{more}", SPREAD, _flat({"shard": 8}, 1, recompute=how, expert=2)
        yield f"EP 4+hybrid{more}", SPREAD, _flat(both, 2, recompute=how, expert=4)
        yield f"EP 2+TP{more}", SPREAD, _flat({"replicate": 4, "tensor": 2}, 0, recompute=how, expert=2)
        yield f"EP 4+TP+FSDP{more}", SPREAD, _flat({"shard": 4, "tensor": 2}, 3, recompute=how, expert=4)
        yield f"PP+EP 4+FSDP{more}", SPREAD, _chain(2, 1, "1f1b", four, 1, recompute=how, expert=4)
        yield f"PP zbv+EP 2+FSDP{more}", SPREAD, _chain(2, 2, "zbv", four, 1, recompute=how, expert=2)
        yield f"PP+EP 4+TP+FSDP{more}", SPREAD, _chain(2, 1, "1f1b", pair, 1, recompute=how, expert=4)


def table_plans() -> Iterator[tuple[str, str, Plan]]:
    """Yields strategies that divide the four embedding tables of a recommender."""
    ways = {
        "rows": ("rows",) * 4,
        "columns": ("columns",) * 4,
        "whole": ("table 7", "table 0", "table 3", "table 0"),
        "mixed": ("columns", "rows", "table 5", None),
    }
    for way, words in ways.items():
        tables = {f"tables.{number}": word for number, word in enumerate(words) if word is not None}
        yield f"{way} replicate", DIVIDED, _flat({"replicate": 8}, 0, tables=tables)
        yield f"{way} FSDP 1", DIVIDED, _flat({"shard": 8}, 1, tables=tables)
        yield f"{way} hybrid", DIVIDED, _flat({"replicate": 2, "shard": 4}, 2, tables=tables)
        yield f"{way} FSDP 3", DIVIDED, _flat({"shard": 8}, 3, tables=tables)
        yield f"{way} FSDP 3 full", DIVIDED, _flat({"shard": 8}, 3, tables=tables, recompute="full")


def context_plans(mixture: bool) -> Iterator[tuple[str, str, Plan]]:
    """Yields the same of strategies that divide positions, on two, four and eight processes."""
    pair, both = {"shard": 2, "context": 2}, {"shard": 2, "context": 2, "tensor": 2}
    copies, cross = {"replicate": 2, "context": 4}, {"replicate": 2, "context": 2, "tensor": 2}
    yield "2: CP 2", PARTS, _flat({"context": 2}, 0)
    yield "4: CP 4 full", PARTS, _flat({"context": 4}, 0, recompute="full")
    yield "4: CP 2+FSDP 1", PARTS, _flat(pair, 1)
    yield "8: CP 4+replicate", PARTS, _flat(copies, 0)
    yield "8: CP 4+FSDP 3 selective", PARTS, _flat({"shard": 2, "context": 4}, 3, recompute="selective")
    yield "8: CP 2+hybrid", PARTS, _flat({"replicate": 2} | pair, 2)
    yield "8: CP 2+FSDP 3 offload", PARTS, _flat({"shard": 4, "context": 2}, 3, offload="all", recompute="full")
    yield "8: CP 2+TP", PARTS, _flat(cross, 0)
    yield "8: CP 2+TP+FSDP full", PARTS, _flat(both, 3, recompute="full")
    yield "4: CP 4 of FSDP 3", PARTS, _flat({"context": 4}, 3, recompute="full")
    yield "8: PP+CP 2+FSDP 1", PARTS, _chain(2, 1, "1f1b", pair, 1)
    yield "8: PP zbv+CP 2+TP", PARTS, _chain(2, 2, "zbv", {"context": 2, "tensor": 2}, 0)
    yield "8: PP+CP 4 of FSDP 1 full", PARTS, _chain(2, 1, "gpipe", {"context": 4}, 1, recompute="full")
    if mixture:
        yield "8: PP+CP 2+EP 4+FSDP 1", PARTS, _chain(2, 1, "1f1b", pair, 1, expert=4)
    for way in (HEADS, RING):
        yield f"2: CP 2 {way}", PARTS, _flat({"context": 2}, 0, context_method=way)
        yield f"4: CP 4 {way} full", PARTS, _flat({"context": 4}, 0, recompute="full", context_method=way)
        yield (
            f"8: CP 4+FSDP 3 {way} selective",
            PARTS,
            _flat({"shard": 2, "context": 4}, 3, recompute="selective", context_method=way),
        )
        yield f"8: CP 2+TP+FSDP 1 {way}", PARTS, _flat(both, 1, context_method=way)
    for level in (1, 3) if mixture else ():
        yield f"8: CP 2+EP 4+TP+FSDP {level}", PARTS, _flat(both, level, recompute="selective", expert=4)
        yield f"8: CP 4+EP 4+FSDP {level}", PARTS, _flat({"shard": 2, "context": 4}, level, recompute="full", expert=4)


def _unlike(plan: Plan, degrees: Sequence[int]) -> Plan:
    """Gives every stage an expert degree of its own."""

    def changed(blocks: Sequence[str]) -> dict[str, Any]:
        data = plan(blocks)
        stages = [stage | {"expert": degree} for stage, degree in zip(data["stages"], degrees, strict=True)]
        return data | {"stages": stages}

    return changed


def _alone(
    devices: range,
    samples: int,
    mesh: Mapping[str, int],
    sharding: int = 0,
    *,
    microbatch: int = 1,
    order: Sequence[range] = (),
    bounds: Sequence[int] = (),
    schedule: str | None = None,
    **options: Any,
) -> Plan:
    """Returns a pipeline that runs so many samples on some devices; its stages are in `order` and begin at layers `bounds`."""

    def plan(blocks: Sequence[str]) -> dict[str, Any]:
        starts = [blocks.index(block) for block in _layers(blocks)]
        parts = [blocks[a:b] for a, b in pairwise([0, *(starts[n] for n in bounds), len(blocks)])]
        stages = [_stage(part, own, mesh, sharding, options) for part, own in zip(parts, order or [devices], strict=True)]
        return _strategy(stages, mesh, microbatch, schedule, samples)

    return plan


def _beside(*parts: Plan) -> Plan:
    """Returns unlike pipelines side by side."""

    def plan(blocks: Sequence[str]) -> dict[str, Any]:
        made = [part(blocks) for part in parts]
        return {"batch": BATCH, "pipelines": [{key: one[key] for key in one if key != "batch"} for one in made]}

    return plan


def unlike_plans(kind: str) -> Iterator[tuple[str, str, Plan]]:
    """Yields the same of unlike pipelines side by side, each with its own devices, samples and rest."""
    left, right, ones = range(4), range(4, 8), [range(n, n + 1) for n in range(8)]
    two, both = {"shard": 2}, {"shard": 2, "tensor": 2}
    halves, others = [left[:2], left[2:]], [right[:2], right[2:]]
    copies, hybrid = {"replicate": 2}, {"replicate": 2, "shard": 2}
    yield "DP 2 / FSDP 3 of 6", BESIDE, _beside(_alone(range(2), 2, copies), _alone(range(2, 8), 6, {"shard": 6}, 3))
    yield "TP 4 / hybrid", BESIDE, _beside(_alone(left, 4, {"tensor": 4}, microbatch=2), _alone(right, 4, hybrid, 2))
    yield (
        "PP 4 full / FSDP 1",
        BESIDE,
        _beside(
            _alone(left, 4, {}, order=ones[:4], bounds=(1, 2, 3), schedule="1f1b", recompute="full"),
            _alone(right, 4, {"shard": 4}, 1),
        ),
    )
    yield (
        "PP zbv / PP gpipe 4",
        BESIDE,
        _beside(
            _alone(left, 4, copies, order=[*halves, *halves[::-1]], bounds=(1, 2, 3), schedule="zbv"),
            _alone(right, 4, {}, order=ones[4:], bounds=(1, 2, 3), schedule="gpipe"),
        ),
    )
    yield (
        "PP+TP / PP+FSDP, other cut",
        BESIDE,
        _beside(
            _alone(left, 4, {"tensor": 2}, order=halves, bounds=(1,), schedule="1f1b", sequence_parallel=True),
            _alone(right, 4, two, 1, order=others, bounds=(3,), schedule="1f1b", recompute="selective"),
        ),
    )
    yield (
        "TP+SP 2 / PP 3 / FSDP 1 of 3",
        BESIDE,
        _beside(
            _alone(range(2), 2, {"tensor": 2}, sequence_parallel=True),
            _alone(range(2, 5), 3, {}, order=ones[2:5], bounds=(1, 3), schedule="1f1b"),
            _alone(range(5, 8), 3, {"shard": 3}, 1),
        ),
    )
    yield (
        "PP interleaved+FSDP / TP+FSDP 3 selective",
        BESIDE,
        _beside(
            _alone(left, 4, two, 1, order=halves * 2, bounds=(1, 2, 3), schedule="interleaved_1f1b"),
            _alone(right, 4, both, 3, recompute="selective"),
        ),
    )
    yield (
        "FSDP 2 of 5 / PP 2 / alone",
        BESIDE,
        _beside(
            _alone(range(5), 5, {"shard": 5}, 2),
            _alone(range(5, 7), 1, {}, order=ones[5:7], bounds=(2,), schedule="gpipe"),
            _alone(ones[7], 2, {}, microbatch=2),
        ),
    )
    if kind in UNLIKE_MIXTURES:
        yield (
            "EP 4+FSDP 3 / PP 4",
            BESIDE,
            _beside(
                _alone(left, 4, {"shard": 4}, 3, expert=4),
                _alone(right, 4, {}, order=ones[4:], bounds=(1, 2, 3), schedule="1f1b"),
            ),
        )
        yield (
            "EP 2+TP / EP 4+FSDP 1 full",
            BESIDE,
            _beside(
                _alone(left, 4, {"replicate": 2, "tensor": 2}, expert=2),
                _alone(right, 4, {"shard": 4}, 1, expert=4, recompute="full"),
            ),
        )
        yield (
            "PP+EP 2+FSDP / EP 2+hybrid",
            BESIDE,
            _beside(
                _alone(left, 4, two, 1, order=halves, bounds=(2,), schedule="1f1b", expert=2),
                _alone(right, 4, hybrid, 2, expert=2),
            ),
        )
        yield "EP 4+TP+FSDP 3 / DP 4", BESIDE, _beside(_alone(left, 4, both, 3, expert=4), _alone(right, 4, {"replicate": 4}))


def _plans_for(kind: str) -> Iterator[tuple[str, str, Plan]]:
    if kind == RECOMMENDER:
        yield from table_plans()
        return
    yield from plans()
    if kind in UNLIKE_KINDS:
        yield from unlike_plans(kind)
    if kind in MIXTURES:
        yield from spread_plans()
    if kind not in NO_SEQUENCES:
        yield from context_plans(kind in MIXTURES)


def cells(kind: str) -> dict[str, dict[str, Any]]:
    """Makes the strategies of a model by name."""
    blocks = _blocks(kind)
    return {f"{column}|{how}": plan(blocks) for column, how, plan in _plans_for(kind)}


def _blocks(kind: str) -> tuple[str, ...]:
    """Returns paths of its blocks, in the order in which the forward calls them."""
    model = build(kind)
    graph = capture(model, {name: value[:1] for name, value in batch_of(kind).items()}).graph
    called = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module")
    return tuple(path for path in called if any(True for _ in model.get_submodule(path).parameters()))


def _plain(kind: str, model: nn.Module) -> dict[str, Any]:
    """Loss and gradients of a first step, norm in the last, parameters and buffers after all."""
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=RATE), batch_of(kind)
    found: dict[str, Any] = {}
    for times in TIMES:
        optimizer.zero_grad()
        for _ in range(times):
            value = kind_of(kind).loss(model(**batch), batch)
            value.backward()  # type: ignore[no-untyped-call]
        if not found:
            found = {"loss": value.item(), "gradient": gradients(model)}
        if times > 1:
            found["norm"] = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).item()
        optimizer.step()
    return found | {"trained": _values(model)}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies the gradients of a model by name."""
    named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model.named_parameters()
    return {name: seen(value, value.grad).clone() for name, value in named if value.grad is not None}


def _values(model: Any) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model.named_parameters()
    return {name: seen(value).detach().clone() for name, value in (*named, *model.named_buffers())}


def difference(own: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float) -> float:
    """Finds the largest difference here, relative to the largest element of a tensor, or to `floor` where that is more."""
    if missing := own.keys() - wanted.keys():
        raise AssertionError(f"the plain model has no {sorted(missing)[:3]}")
    largest = 0.0
    for name, value in own.items():
        other = wanted[name]
        most = max(float(other.abs().max()) if other.numel() else 0.0, floor)
        if isinstance(value, DTensor):
            value, other = value.to_local(), own_part(other.to(value.device), value).to_local()
        if value.numel():
            largest = max(largest, float((value.double() - other.to(value.device).double()).abs().max()) / most)
    return largest


def _run(kind: str, model: nn.Module, data: Mapping[str, Any], plain: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns one cell, on every process."""
    strategy, batch, own = Strategy.from_dict(data), batch_of(kind), kind.endswith(LABELLED)
    size = strategy.pipelines[0].microbatch[0]
    inputs = {name: value[:size] for name, value in batch.items()}
    try:
        if own and (reason := context_facts(model, inputs, Conduct(reduction=TARGETS)).no_context) is not None:
            return {"refused": reason}
        native = prepare(model, strategy, inputs, device)
    except InputError as error:
        return {"refused": str(error).removeprefix("native: ")}
    optimizer = torch.optim.AdamW(native.parameter_groups(), lr=RATE, foreach=False)  # a third of the time else
    found: dict[str, Any] = {}
    batch = {name: value.to(device) for name, value in batch.items()}
    for times in TIMES:
        optimizer.zero_grad()
        for _ in range(times):
            if own:
                (made := native(**batch).loss).backward()
                value = made.item()
            else:
                value = native.step(batch, kind_of(kind).loss).item()
        if not found:
            if missing := [name for name, p in native.named_parameters() if p.grad is None and name in plain["gradient"]]:
                raise AssertionError(f"no gradient: {missing[:3]}")
            found["loss"] = abs(value - plain["loss"]) / abs(plain["loss"])
            most = max(float(gradient.abs().max()) for gradient in plain["gradient"].values())
            found["gradient"] = difference(gradients(native), plain["gradient"], 1e-8 * most)
        if times > 1:
            found["norm"] = abs(native.clip_grad_norm_(LARGEST_NORM).item() - plain["norm"]) / plain["norm"]
        optimizer.step()
    return found | {"trained": difference(_values(native), plain["trained"], RATE)}


def run_cells(
    todo: Mapping[tuple[str, str], dict[str, Any]], limit_s: float = 1200.0, device: str = "cpu"
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Runs cells, a launch for each number of processes; yields model and name with its figures, ``refused`` or ``failed``."""
    model_of = {(kind, cell): kind + LABELLED if cell.endswith(PARTS) else kind for kind, cell in todo}
    models = {name: build(name) for name in model_of.values()}
    plain = {name: _plain(name, copy.deepcopy(model)) for name, model in models.items()}
    by_size: dict[int, list[tuple[str, str]]] = {}
    for key, data in todo.items():
        by_size.setdefault(len(Strategy.from_dict(data).devices), []).append(key)

    def work(key: tuple[str, str]) -> dict[str, Any]:
        name = model_of[key]
        return _run(name, copy.deepcopy(models[name]), todo[key], plain[name], device)

    backend = "gloo" if device == "cpu" else "nccl"
    jobs = [zip(keys, run_jobs(work, keys, size, limit_s, backend=backend), strict=True) for size, keys in by_size.items()]
    for key, found in chain.from_iterable(jobs):
        wrong = next((one for one in found if "error" in one), None)
        refused = next((one for one in found if "refused" in one and "error" not in one), None)
        if wrong is not None:
            yield key, {"failed": f"{wrong['error']}: {wrong['line']}", "where": wrong.get("trace", "")}
        else:
            yield key, refused or {figure: max(one[figure] for one in found) for figure in found[0]}


def holds(row: Mapping[str, Any]) -> bool:
    """Says whether a cell equals the plain model."""
    return all(row.get(figure, float("inf")) <= most for figure, most in MOST.items())


def rows() -> list[Row]:
    """Reads what was found last, by model and cell."""
    found = {(row["kind"], row["cell"]): row for row in read_rows(ROWS)}
    order = [(kind, f"{column}|{how}") for kind in KINDS for column, how, _ in _plans_for(kind)]
    return [found[key] for key in order if key in found]


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Makes the page of the docs: its text with the figures of the rows, and their tables."""
    refused = [row for row in rows if "refused" in row]
    wrong = [f"{row['kind']} {row['cell']}" for row in rows if "failed" in row]
    compared = [row for row in rows if "loss" in row]
    run = [row for row in compared if holds({"norm": 0.0, **row})]  # older rows clipped nothing
    rounded = [row for row in compared if row not in run]
    coarse = f"{len(rounded)} rounded by norms in single precision, " if rounded else ""
    summary = (
        f"{len(rows)} cells: {len(run)} equal, {coarse}{len(refused)} refused ({len(refused) / len(rows):.0%}), "
        f"{len(wrong)} failed. "
        f"Largest difference of a gradient {max(row['gradient'] for row in run):.0e}, "
        f"of what was trained {max(row['trained'] for row in run):.0e}. torch {rows[0]['torch'].partition('+')[0]}."
    )
    least, clipped = max(max(row["loss"], row.get("norm", 0.0)) for row in run), sum("norm" in row for row in compared)
    text = PAGE.read_text().partition("## Plain")[0].rstrip() + "\n"
    text = replaced(text, r"\d+ kinds of models of four", f"{len({row['kind'] for row in rows})} kinds of models of four")
    text = replaced(text, r"In \d+ cells the", f"In {clipped} cells the")
    text = replaced(text, r"norms differ by \S+ at", f"norms differ by {least:.0e} at")
    parts = [replaced(text, r"(?m)^\d+ cells: .*$", summary)]
    reasons = list(dict.fromkeys(_short(row["refused"]) for row in refused))
    tables = {
        "Plain": "",
        "Recomputed: full": "full",
        "Recomputed: selective": "selective",
        "In host memory": "offload",
        "Experts over devices": SPREAD,
        "Parts of the positions": PARTS,
        "Unlike pipelines side by side": BESIDE,
        "Divided embedding tables": DIVIDED,
    }
    for title, how in tables.items():
        if shown := [row for row in rows if row["cell"].rpartition("|")[2] == how]:
            parts.append(_table(title, shown, reasons))
    parts.append("## Refused\n\n" + "\n".join(f"{n}. {reason}." for n, reason in enumerate(reasons, 1)) + "\n")
    return "\n".join(parts)


def _table(title: str, rows: Sequence[Mapping[str, Any]], reasons: Sequence[str]) -> str:
    columns = list(dict.fromkeys(row["cell"].partition("|")[0] for row in rows))
    found = {(row["kind"], row["cell"].partition("|")[0]): row for row in rows}
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    lines = [[column, *(_cell(found.get((kind, column)), reasons) for kind in kinds)] for column in columns]
    return f"## {title}\n\n" + markdown(["", *kinds], lines, right=True).replace("|  |", "| |", 1) + "\n"


def _cell(row: Mapping[str, Any] | None, reasons: Sequence[str]) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return f"refused ({reasons.index(_short(row['refused'])) + 1})"
    return "failed" if "failed" in row else f"{row['gradient']:.0e} / {row['trained']:.0e}"


def _short(reason: str) -> str:
    return reason.replace("model.decoder.layers.0", "0").replace("model.layers.0", "0").replace("encoder.block.0", "0")


def report(results: Iterator[tuple[tuple[str, str], dict[str, Any]]], keep: Callable[[Row], object]) -> int:
    """Prints and keeps rows; returns how many do not hold, those refused too."""
    wrong = 0
    for (kind, name), found in results:
        where = found.pop("where", "")
        row = {"kind": kind, "cell": name, "torch": torch.__version__, **found}
        keep(row)
        print(json.dumps(row), flush=True)
        wrong += not holds(row)
        if not holds(row) and "refused" not in row:
            print(f"does not hold: {kind} {name}\n{where}", file=sys.stderr, flush=True)
    return wrong


def main() -> int:
    """Runs cells, or writes the page; the exit code."""
    chosen = arguments(
        __doc__,
        kinds=(tuple(KINDS), "models", KINDS),
        cells=(("*",), "patterns of names, such as 'PP*|full'"),
        missing="only cells without a row that holds or is refused",
        few="the cells of the tests; no row is kept",
        table="write the page from the rows",
    )
    if chosen.table:
        write_rows(ROWS, rows())
        PAGE.write_text(page(rows()))
        return 0
    one_thread()
    if chosen.few:
        by_kind = {kind: cells(kind) for kind, _ in FEW}
        return report(run_cells({(kind, name): by_kind[kind][name] for kind, name in FEW}), lambda row: None)
    for kind in chosen.kinds:
        todo = {n: d for n, d in cells(kind).items() if any(fnmatch(n, pattern) for pattern in chosen.cells)}
        done = {row["cell"] for row in rows() if row["kind"] == kind and (holds(row) or "refused" in row)}
        todo = {name: data for name, data in todo.items() if not chosen.missing or name not in done}
        report(run_cells({(kind, name): data for name, data in todo.items()}), partial(add_row, ROWS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
