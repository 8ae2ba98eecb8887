"""Model types of transformers over two processes: shares of parameters, and two stages, with the plain model's gradients.

    python -m benchmarks.types_runs                 all types that train and have no such figures yet
    python -m benchmarks.types_runs bert clip       these types, again

A type's model, as its row of `benchmarks/types.py` says it, is planned twice for a step of four samples: with parameters shared
by two devices, and as a pipeline of two stages. Both plans run over two gloo processes by `rlplace.distribute`, whose loss and
gradients must be the mean of what the plain model finds on either half of the batch: a replica's half, or a micro-batch.
Figures are entered into the rows; `python -m benchmarks.types --table` shows them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import multiprocessing
import resource
import sys
import tempfile
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import rlplace
from benchmarks.equality import difference, gradients
from benchmarks.types import BATCH, CLOSE, CLUSTER, LIMIT_S, LONG, ROWS, Connection, read, reason, step, without_dropout
from rlplace.api import CapturedModel, plan_model
from rlplace.cluster.parse import parse
from rlplace.errors import RlplaceError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.strategy.facts import facts_of

WAYS = {"shares": "pipeline=1 shard=2 sharding=3", "stages": "pipeline=2 replicate=1 shard=1 tensor=1"}
"""By name, what `place` may choose from."""

CALLS, HANGS_S = 60, 20

FLOOR = 1e-3
"""Gradients whose largest element is below this part of the largest of all are compared with that: in single precision some are
nothing but rounding, as in the bias of keys."""


def half(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Of every tensor with as many rows as the batch, its first or second half."""
    rows, own = 2 * BATCH, slice(number * BATCH, (number + 1) * BATCH)
    found: dict[str, Any] = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf[own] if leaf.shape[:1] == (rows,) else leaf, dict(batch)
    )
    return found


def plain(model: LoadedModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and gradients of both halves."""
    losses, found = [], []
    for number in range(2):
        module = copy.deepcopy(model.module)
        losses.append(step(module, dataclasses.replace(model, example_inputs=half(model.example_inputs, number)))[0])
        found.append(gradients(module))
    return sum(losses) / 2, {name: (value + found[1][name]) / 2 for name, value in found[0].items() if name in found[1]}


def run(rank: int, store: str, model: LoadedModel, plan: PlacementPlan, wanted: Any, answers: Any) -> None:
    """One process's part of the step: the largest difference of what it holds, or what went wrong."""
    try:
        dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=HANGS_S), world_size=2, rank=rank)
        micro = half(model.example_inputs, 0)
        placed = rlplace.distribute(model.module, plan, micro, loss=model.loss, device="cpu")
        torch.manual_seed(0)
        output = placed(**model.example_inputs)
        loss = output.loss if model.loss is None else output
        loss.backward()
        apart = abs(loss.item() - wanted[0]) / max(abs(wanted[0]), 1e-6)
        most = max(float(g.abs().max()) for g in wanted[1].values() if g.numel())
        answers.put(max(apart, difference(gradients(placed), wanted[1], FLOOR * most)))
    except Exception as error:
        answers.put(reason(error))


def over_two(model: LoadedModel, graph: OpGraph, wanted: Any, space: str) -> float | str:
    """Plans a model in a space and runs the plan over two processes: the largest difference, or why not."""
    facts = partial(facts_of, model.module, half(model.example_inputs, 0))
    plan, _ = plan_model(
        CapturedModel(graph, examine=facts), parse(CLUSTER), space=space, fixed={"microbatch": BATCH}, planner="strategy",
        batch=2 * BATCH, calls=CALLS, seed=0, time_limit_s=None,
    )  # fmt: skip
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", model, plan, wanted, answers)
        ranks = [context.Process(target=run, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        try:
            found = [answers.get(timeout=LIMIT_S) for _ in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return next((text for text in found if isinstance(text, str) and "gloo" not in text), max(found, key=str))


def look(row: dict[str, Any], say: Connection) -> None:
    """Enters into a row what either way gives."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    found: dict[str, Any] = {}
    try:
        torch.manual_seed(0)
        model = load_model(row["model"], batch=2 * BATCH, seq=LONG, device="cpu")
        without_dropout(model.module)
        graph, wanted = capture(model.module, half(model.example_inputs, 0), loss=model.loss), plain(model)
    except Exception as error:
        found = dict.fromkeys(WAYS, reason(error))
    for way, space in WAYS.items() if not found else ():
        try:
            apart = over_two(model, graph, wanted, space)
            if isinstance(apart, float) and apart > CLOSE:
                apart = f"gradients differ by {apart:.1e}"
            found[way] = apart if isinstance(apart, str) else float(f"{apart:.1e}")
        except Exception as error:
            found[way] = reason(error)
    say.send(found)


def ask(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a type, from a process of its own."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(row, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(4 * LIMIT_S) else dict.fromkeys(WAYS, f"takes more than {4 * LIMIT_S} s")
    except EOFError:
        return dict.fromkeys(WAYS, "its process ended")
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    chosen = parser.parse_args().types
    rows = read(ROWS)
    if unknown := [kind for kind in chosen if not rows.get(kind, {}).get("reached")]:
        raise RlplaceError(f"{', '.join(unknown)}: no row says that it trains; run benchmarks.types first")
    torch.set_num_threads(1)
    ends = multiprocessing.Pipe()
    look(rows["gpt2"], ends[1])  # what it imports and compiles, all others find in memory
    for kind in chosen or [kind for kind, row in rows.items() if row["reached"] and "runs" not in row]:
        rows[kind]["runs"] = ask(rows[kind])
        ROWS.write_text("".join(json.dumps(rows[kind]) + "\n" for kind in rows))
        print(kind, json.dumps(rows[kind]["runs"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
