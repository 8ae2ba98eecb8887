"""Model types of transformers over two processes: replicas, shares of parameters and two stages, with gradients compared.

    python -m benchmarks.types_runs                 all types that train and have no such figures yet
    python -m benchmarks.types_runs bert clip       these types, again

A type's model, as its row of `benchmarks/types.py` says it and with the caches that its constructor turns on, is planned three
times for a step of four samples: as two replicas, with parameters shared by two devices (level 3, or level 1 where that is
refused), and as a pipeline of two stages. The plans run over two gloo processes by `rlplace.distribute`, whose loss and
gradients must be the mean of what the plain model finds on either half of the batch: a replica's half, or a micro-batch.
Figures are entered into the rows; `python -m benchmarks.types --table` shows them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import resource
import sys
import warnings
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import rlplace
from benchmarks.equality import difference, gradients
from benchmarks.groups import run_jobs
from benchmarks.harness import Row, apart, arguments, one_thread, write_rows
from benchmarks.types import BATCH, CLOSE, CLUSTER, LIMIT_S, LONG, ROWS, read, reason, step, without_dropout
from rlplace.api import plan_model
from rlplace.captured import CapturedModel
from rlplace.cluster.parse import parse
from rlplace.errors import RlplaceError
from rlplace.model.capture.caches import turn_off_caches
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.runtime.strategy.facts import facts_of

WAYS = {
    "replicas": ("pipeline=1 shard=1 tensor=1",),
    "shares": ("pipeline=1 shard=2 sharding=3", "pipeline=1 shard=2 sharding=1"),
    "stages": ("pipeline=2 replicate=1 shard=1 tensor=1",),
}
"""By name, what `place` may choose from; the next where it refuses one."""

CALLS = 60

FLOOR = 1e-3
"""Gradients whose largest element is below this part of the largest of all are compared with that: in single precision some are
nothing but rounding, as in the bias of keys."""


def half(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Takes of every tensor with as many rows as the batch, its first or second half."""
    rows, own = 2 * BATCH, slice(number * BATCH, (number + 1) * BATCH)
    found: dict[str, Any] = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf[own] if leaf.shape[:1] == (rows,) else leaf, dict(batch)
    )
    return found


STREAM = 1009
"""Distance between the seeds of replicas in the first step of a run with seed 0 (`step_stream`)."""


def plain(model: LoadedModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Computes mean loss and gradients of both halves, which draw what the two replicas do."""
    losses, found = [], []
    for number in range(2):
        module = copy.deepcopy(model.module)
        part = dataclasses.replace(model, example_inputs=half(model.example_inputs, number))
        losses.append(step(module, part, number * STREAM)[0])
        found.append(gradients(module))
    return sum(losses) / 2, {name: (value + found[1][name]) / 2 for name, value in found[0].items() if name in found[1]}


def over_two(model: LoadedModel, captured: CapturedModel, wanted: Any, space: str) -> float | str:
    """Plans a model in a space and runs the plan over two processes: the largest difference, or why not."""
    micro = half(model.example_inputs, 0)
    plan, _ = plan_model(
        captured, parse(CLUSTER), space=space, fixed={"microbatch": BATCH}, planner="strategy", batch=2 * BATCH, calls=CALLS,
        seed=0, time_limit_s=None,
    )  # fmt: skip

    def run(job: None) -> dict[str, Any]:
        placed = rlplace.distribute(model.module, plan, micro, loss=model.loss, device="cpu")
        torch.manual_seed(0)
        output = placed(**model.example_inputs)
        loss = output.loss if model.loss is None else output
        loss.backward()
        apart = abs(loss.item() - wanted[0]) / max(abs(wanted[0]), 1e-6)
        most = max(float(g.abs().max()) for g in wanted[1].values() if g.numel())
        return {"apart": max(apart, difference(gradients(placed), wanted[1], FLOOR * most))}

    (found,) = run_jobs(run, [None], 2, LIMIT_S)
    failed = [one for one in found if "error" in one]
    if not failed:
        return max(one["apart"] for one in found)
    first = min(failed, key=lambda one: "gloo" in one["line"])  # the other lost a process that failed
    return first["line"] if first["refused"] else f"{first['error']}: {first['line']}"


def with_caches(model: nn.Module) -> None:
    """Gives configurations their library's default of ``use_cache``, as in a file where a constructor builds the model."""
    root = vars(model).get("config")
    for config in {id(one): one for one in (vars(part).get("config") for part in model.modules())}.values():
        encoder = config is not root and type(config) is type(root) and not getattr(config, "is_decoder", False)
        if hasattr(config, "use_cache") and not encoder:  # whose stack turns its own copy off
            config.use_cache = getattr(type(config)(), "use_cache", False)


def doubled(model: LoadedModel) -> LoadedModel:
    """Returns a model in double precision: in single some gradients are nothing but rounding, as before a normalization."""
    inputs = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, dict(model.example_inputs)
    )
    return dataclasses.replace(model, module=model.module.double(), example_inputs=inputs)


def in_ways(model: LoadedModel, wanted: Any, ways: Collection[str]) -> Row:
    """Runs a model in some of `WAYS`; the largest difference of each, or why not."""
    micro = half(model.example_inputs, 0)
    graph = capture(model.module, micro, loss=model.loss)
    captured = CapturedModel(graph, examine=cache(partial(facts_of, model.module, micro, model.loss, graph)))
    found: Row = {}
    for way in ways:
        for space in WAYS[way]:
            try:
                apart = over_two(model, captured, wanted, space)
                if isinstance(apart, float) and apart > CLOSE:
                    apart = f"{DIFFER}{apart:.1e}"
                found[way] = apart if isinstance(apart, str) else float(f"{apart:.1e}")
                found |= {"level": 1} if space != WAYS[way][0] else {}
                break
            except RlplaceError as error:
                found.setdefault(way, reason(error))
            except Exception as error:
                found[way] = reason(error)
                break
    return found


DIFFER = "gradients differ by "


def look(row: Row) -> Row:
    """Finds what either way gives for the model of a row; in double precision where single shows a difference."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    try:
        torch.manual_seed(0)
        model = load_model(row["model"], batch=2 * BATCH, seq=LONG, device="cpu")
        without_dropout(model.module)
        with_caches(model.module)
        try:
            wanted = plain(model)
        except ValueError:  # a cache needs layers of attention, which so short a model does not have
            turn_off_caches(model.module)
            wanted = plain(model)
        found = in_ways(model, wanted, WAYS)
    except Exception as error:
        return dict.fromkeys(WAYS, reason(error))
    unlike = [way for way, apart in found.items() if str(apart).startswith(DIFFER)]
    if unlike:
        with contextlib.suppress(Exception):  # as where a forward makes tensors of single precision
            model = doubled(model)
            again = in_ways(model, plain(model), unlike)
            found |= {way: apart for way, apart in again.items() if isinstance(apart, float)}
    return found


def main() -> None:
    """Enters figures into the rows, each type's from a process of its own."""
    chosen, rows = arguments(__doc__, "types").types, read()
    if unknown := [kind for kind in chosen if not rows.get(kind, {}).get("reached")]:
        raise RlplaceError(f"{', '.join(unknown)}: no row says that it trains; run benchmarks.types first")
    one_thread()
    look(rows["gpt2"])  # what it imports and compiles, all others find in memory
    for kind in chosen or [kind for kind, row in rows.items() if row["reached"] and "runs" not in row]:
        rows[kind]["runs"] = apart(look, rows[kind], limit_s=4 * LIMIT_S, lost=partial(dict.fromkeys, WAYS))
        write_rows(ROWS, rows.values())
        print(kind, json.dumps(rows[kind]["runs"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
