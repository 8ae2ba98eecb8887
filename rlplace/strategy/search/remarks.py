"""Remarks of a plan beside its strategy: devices without bf16, and the parts of peak memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cost.lifetimes import TEMPORARY, lifetimes
from rlplace.model.graph.opgraph import OpGraph
from rlplace.plan.plan import make_plan
from rlplace.plan.prediction import HeldMemory
from rlplace.problem import FORWARD
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import DraftEvaluator, StepEvaluation
from rlplace.strategy.executor.meshes import lane_of
from rlplace.strategy.executor.packing import placed_blocks, received_bytes
from rlplace.strategy.executor.traffic import ClusterTraffic
from rlplace.strategy.op_level.expand import ExpandedDraft, Expansion, tasks_of
from rlplace.strategy.op_level.step_build import GATHER
from rlplace.strategy.search.op_level import MOST_TASKS, OpLevel
from rlplace.strategy.search.tries import SearchProblem, priced_settings
from rlplace.text import ms

BF16, FP16 = "bfloat16", "float16"

DEFER = "build it in rlplace.deferred_weights(), as `rlplace run` does without --verify; a process then makes a block at a time"
"""What to do about a host that has no room for whole models."""


def without_bf16(graph: OpGraph, cluster: Cluster, devices: Iterable[int]) -> list[str]:
    """Returns the kinds of these devices with units for float16 and none for bfloat16, if ops of the graph compute in that."""
    if BF16 not in graph.op_dtype:
        return []
    used = {cluster.devices[device].kind for device in devices}
    found = (kind.name for kind in cluster.kinds if FP16 in kind.peak_flops and BF16 not in kind.peak_flops)
    return [name for name in dict.fromkeys(found) if name in used]


def bf16_note(graph: OpGraph, kinds: Iterable[str], step_s: float | None = None, fp16_s: float | None = None) -> str:
    """Returns the note on kinds of `without_bf16`, with seconds of a step, and of the same in float16, where both are known."""
    names = ", ".join(kinds)
    option = "--autocast fp16" if graph.capture.get("autocast") == BF16 else "--dtype fp16"
    note = f"{names}: no bfloat16 units, so products in bf16 are emulated at less than the float32 rate; "
    if step_s is None or fp16_s is None:
        return f"{note}{option} plans in the type that it has units for"
    return f"{note}in fp16 the same strategy takes {ms(fp16_s)} ms, {step_s / fp16_s:.2f} times as fast; {option} plans for it"


def short_host(graph: OpGraph, cluster: Cluster, devices: Iterable[int]) -> str | None:
    """Returns which host has no room for a whole model in every process of these devices; None: all have."""
    item = 4 if graph.capture.get("master_weights") else 0  # the model is built in float32 then
    size = sum(max(parameter.size_bytes, item * math.prod(parameter.shape)) for parameter in graph.parameters)
    short = cluster.short_host(devices, size)
    return None if short is None else f"{short} if every process built the whole model"


def in_fp16(graph: OpGraph) -> OpGraph:
    """Returns the same step with float16 in place of bfloat16, which is as large."""
    return dataclasses.replace(graph, op_dtype=tuple(FP16 if name == BF16 else name for name in graph.op_dtype))


def fp16_step_s(problem: SearchProblem, draft: Draft, graphs: tuple[OpGraph, OpGraph | None], **pricing: Any) -> float:
    """Returns seconds of a draft's step in float16, by the finest executor; other arguments are those of `PricedBlocks`."""
    first, other = graphs
    pricing |= priced_settings(problem.settings)
    blocks = PricedBlocks(in_fp16(first), problem.cluster, other and in_fp16(other), **pricing)
    return OpLevel(dataclasses.replace(problem, scores=DraftEvaluator(blocks, problem.cluster))).evaluate(draft).step_time_s


PARTS = (
    "weights", "gradients", "optimizer", "tables", "activations", "gathered", "backward", "temporaries", "buffers", "reserved",
)  # fmt: skip
"""Weights, gradients, optimizer state: held all step long, shares where they are sharded. Tables: those of divided tables.
Activations: made by the forward. Gathered: weights of blocks for as long as they run. Backward: gradients of activations, and
recomputed activations. Temporaries: of ops. Buffers: of stage transfers, and of gradients while they are reduced. Reserved:
context and communication library."""


def memory_parts(
    draft: Draft, costs: OpCosts, cluster: Cluster, finest: StepEvaluation, traffic: ClusterTraffic | None = None
) -> tuple[HeldMemory, ...]:
    """Returns the memory of all devices in use, those alike together.

    Args:
        draft: The draft.
        costs: Costs of ops.
        cluster: Where it runs.
        finest: Evaluation by the finest executor that is affordable; `rlplace.strategy.search.op_level.OpLevel`.
        traffic: Of the cluster, where it is known.
    """
    traffic = traffic or ClusterTraffic(cluster)
    found: dict[tuple[Any, ...], list[int]] = {}
    for one in draft.pipelines:
        expansion, fine = Expansion(one, costs, cluster, traffic, False), tasks_of(one, costs) <= MOST_TASKS
        moments = _at_peak(expansion.expanded()) if fine else None
        for number, alike in enumerate(expansion.lanes):
            lane = lane_of(one, alike.first)
            for place, blocks in enumerate(placed_blocks(one, lane, expansion.packer)):
                parts, own = dict.fromkeys(PARTS, 0), [blocks[block] for block in one.blocks_of(place)]
                parts["weights"] = int(sum(block.held_weight_bytes for block in own))
                parts["gradients"] = int(sum(block.held_gradient_bytes for block in own))
                parts["optimizer"] = int(sum(block.held_optimizer_bytes for block in own))
                if one.places[place].tables > 1:
                    parts["tables"] = int(costs.held(*one.places[place].state).expert_bytes[2, [*one.blocks_of(place)]].sum())
                    parts["optimizer"] -= parts["tables"]
                parts["buffers"] = int(received_bytes(one, lane, blocks, place))
                for name, size in (moments[number * len(one.places) + place] if moments else {}).items():
                    parts[name] += size
                for device in alike.devices[place].tolist():
                    held = {**parts, "reserved": cluster.devices[device].reserved_bytes}
                    left = finest.peak_memory_bytes[device] - sum(held.values())  # op by op only rounding
                    held["weights" if fine else "activations"] += left
                    key = (cluster.devices[device].kind, cluster.devices[device].memory_bytes, fine, *held.items())
                    found.setdefault(key, []).append(device)
    rows = sorted((sorted(devices), key) for key, devices in found.items())
    return tuple(
        HeldMemory(
            devices=tuple(cluster.devices[device].name for device in devices),
            parts=dict(parts),
            total_bytes=sum(size for _, size in parts),
            capacity_bytes=limit,
            op_by_op=fine,
        )
        for devices, (_, limit, fine, *parts) in rows
    )


def _at_peak(expanded: ExpandedDraft) -> Sequence[Mapping[str, int]]:
    """Returns for every device of an expanded draft the bytes by part at its peak, without those held all step long."""
    problem = expanded.problem
    life = lifetimes(problem, make_plan(problem, problem.group_device, planner="", order=expanded.order))
    made_as = np.where(problem.op_phase == FORWARD, PARTS.index("activations"), PARTS.index("backward"))
    scratch = np.full(problem.num_ops, PARTS.index("temporaries"))
    for key, collective in zip(expanded.exchanges, problem.collectives, strict=True):
        part = PARTS.index("gathered" if key[0] == GATHER else "buffers")
        made_as[list(collective.ops)] = scratch[list(collective.ops)] = part
    for run in expanded.runs:
        if run.part is not None:  # where a block begins its weights arrive, where it ends its gradient is copied to be reduced
            scratch[[run.first + row for row in run.part.begins.values()]] = PARTS.index("gathered")
            made_as[[run.first + row for row in run.part.ends.values()]] = PARTS.index("buffers")
    part_of = np.where(life.kind == TEMPORARY, scratch[life.op], made_as[life.op])
    totals = []
    for device in range(problem.num_devices):
        alive = life.at_peak(device)
        sizes = np.bincount(part_of[alive], life.bytes[alive], len(PARTS)).astype(np.int64)
        totals.append(dict(zip(PARTS, sizes.tolist(), strict=True)))
    return totals
