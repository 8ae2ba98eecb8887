"""What fills the memory of devices under a strategy, kind by kind, at the moment when each holds the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cost.lifetimes import TEMPORARY, lifetimes
from rlplace.plan.memory import HeldMemory
from rlplace.plan.plan import make_plan
from rlplace.problem import FORWARD
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluation import Evaluation
from rlplace.strategy.executor.placed_blocks import held_bytes, placed_blocks, received_bytes
from rlplace.strategy.executor.traffic import Traffic
from rlplace.strategy.op_level.expand import ExpandedDraft, Expansion, tasks_of
from rlplace.strategy.op_level.step_build import GATHER
from rlplace.strategy.search.op_level import MOST_TASKS

PARTS = (
    "weights", "gradients", "optimizer", "activations", "gathered", "backward", "temporaries", "buffers", "reserved",
)  # fmt: skip
"""Weights, gradients, optimizer state: held all step long, shares where they are sharded. Activations: what the forward makes.
Gathered: weights of blocks for as long as they run. Backward: gradients on their way, and what runs again. Temporaries: of ops.
Buffers: for what other stages send, and for gradients while they are reduced. Reserved: context and communication library."""


def memory_parts(
    draft: Draft, costs: OpCosts, cluster: Cluster, said: Evaluation, traffic: Traffic | None = None
) -> tuple[HeldMemory, ...]:
    """The memory of all devices in use, those alike together.

    Args:
        draft: The draft.
        costs: What ops take.
        cluster: Where it runs.
        said: What the finest executor that is affordable says of it; `rlplace.strategy.search.op_level.OpLevel`.
        traffic: Of the cluster, where it is known.
    """
    traffic = traffic or Traffic(cluster)
    found: dict[tuple[Any, ...], list[int]] = {}
    for one in draft.pipelines:
        expansion, fine = Expansion(one, costs, cluster, traffic, False), tasks_of(one, costs) <= MOST_TASKS
        moments = _at_peak(expansion.expanded()) if fine else None
        for number, alike in enumerate(expansion.lanes):
            held, blocks = held_bytes(one, alike[0], expansion.packer), placed_blocks(one, alike[0], expansion.packer)
            for place, static in enumerate(held.tolist()):
                parts = dict.fromkeys(PARTS, 0) | dict(zip(PARTS, map(int, static), strict=False))
                parts["buffers"] = int(received_bytes(one, alike[0], blocks[place], place))
                for name, size in (moments[number * len(one.places) + place] if moments else {}).items():
                    parts[name] += size
                for device in (d for lane in alike for _, devices in lane.replicas[place] for d in devices):
                    own = {**parts, "reserved": cluster.devices[device].reserved_bytes}
                    left = said.peak_memory_bytes[device] - sum(own.values())  # op by op what rounding has left
                    own["weights" if fine else "activations"] += left
                    key = (cluster.devices[device].kind, cluster.devices[device].memory_bytes, fine, *own.items())
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
    """For every device of an expanded draft, bytes by part beside what it holds all step long, when it holds the most."""
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
