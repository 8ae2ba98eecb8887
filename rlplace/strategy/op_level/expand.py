"""A whole strategy as ops: what the op-level simulator executes for a draft.

One device stands for all that do the same at the same time: those of one place in lanes that are alike. It runs, micro-batch by
micro-batch in the order of its schedule, the ops of its stages as the tensor axis leaves them, slowest device kind and largest
micro-batch of its lane. Everything that devices tell each other is a collective over all groups of its axis, with the time of
`rlplace.strategy.executor.traffic`: collectives inside blocks, which their ops wait for; parameters that are gathered and
gradients that
are reduced, block by block beside compute as torch's `fully_shard` does it; buckets of DistributedDataParallel; what stages
send each other; sums over ties. Where these start and what waits for them stands in docs/cost-model/strategy.md; compute beside
them is slower by `rlplace.cluster.collectives.COMPUTE_SLOWDOWN`. Bytes that are held all step long are those of the block
executor; activations, what runs again, gathered parameters and gradients are tensors with lifetimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.schedule import SCHEDULES
from rlplace.problem import Problem
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.meshes import Lane, borders, lanes
from rlplace.strategy.executor.packing import Packer
from rlplace.strategy.executor.ties import tie_exchanges
from rlplace.strategy.executor.traffic import Traffic
from rlplace.strategy.op_level.expand_lane import LaneBuild
from rlplace.strategy.op_level.step_build import TIE, UPDATE_RUN, Run, StepBuild


@dataclass(frozen=True, eq=False)
class ExpandedDraft:
    """What the op-level simulator runs for a draft.

    Attributes:
        problem: A group a device; all micro-batches are ops of their own.
        order: What each device runs, in order.
        stands_for: For each device of `problem` those of the cluster that it stands for.
        runs: What its devices run beside collectives with one another.
        exchanges: For each of its collectives what it is, see `rlplace.strategy.op_level.step_build.SEND`.
    """

    problem: Problem
    order: list[list[int]]
    stands_for: tuple[tuple[int, ...], ...]
    runs: tuple[Run, ...]
    exchanges: tuple[Any, ...]


def expand_draft(
    draft: Draft, costs: OpCosts, cluster: Cluster, traffic: Traffic | None = None, *, named: bool = False
) -> ExpandedDraft:
    """Lowers a draft to ops.

    Args:
        draft: The draft.
        costs: What ops take.
        cluster: Where it runs.
        traffic: Of the cluster, where it is known.
        named: Ops have the names of captured ops, for people.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    if draft.beside:
        raise InputError("draft: it has several pipelines beside each other; expand each of them alone")
    return Expansion(draft, costs, cluster, traffic or Traffic(cluster), named).expanded()


def tasks_of(draft: Draft, costs: OpCosts) -> int:
    """About how many ops `expand_draft` makes of a draft whose lanes are alike."""
    ops = len(costs.step_ops(splits(draft)).phase) + 4 * len(costs.names)
    return ops * max(draft.microbatches)


def splits(draft: Draft) -> bool:
    """Whether weight gradients are ops of their own."""
    return draft.schedule is not None and SCHEDULES[draft.schedule].splits_backward


def _alike(draft: Draft, cluster: Cluster) -> list[list[Lane]]:
    """Lanes by what they do: as many micro-batches, as large, on as quick devices."""
    found: dict[object, list[Lane]] = {}
    for lane in lanes(draft):
        looks = tuple(
            tuple(sorted({(samples, tuple(str(cluster.devices[d].kind) for d in devices)) for samples, devices in replicas}))
            for replicas in lane.replicas
        )
        found.setdefault((lane.microbatches, looks), []).append(lane)
    return list(found.values())


class Expansion:
    """Lowers one draft."""

    def __init__(self, draft: Draft, costs: OpCosts, cluster: Cluster, traffic: Traffic, named: bool) -> None:
        self.draft, self.costs, self.cluster, self.traffic, self.named = draft, costs, cluster, traffic, named
        self.split, self.ranges = splits(draft), draft.ranges
        self.packer = Packer(costs, cluster, traffic)
        self.packer.frame(draft)  # checks it
        self.ways = traffic.ways(borders(draft))
        self.lanes = _alike(draft, cluster)
        self.build = StepBuild(len(self.lanes) * len(draft.places))

    def expanded(self) -> ExpandedDraft:
        draft, resident, stands_for, update = self.draft, [], [], []
        for number, alike in enumerate(self.lanes):
            lane = LaneBuild(self, number, alike[0])
            lane.run()
            for place in range(len(draft.places)):
                resident.append(math.ceil(lane.resident_bytes(place)))
                stands_for.append(tuple(d for one in alike for _, devices in one.replicas[place] for d in devices))
                update.append([lane.rows[place][block].update_s for block in draft.blocks_of(place)])
        self._sum_ties()
        for device, seconds in enumerate(update):
            none = np.zeros(len(seconds), dtype=np.int64)
            first = self.build.run(device, UPDATE_RUN, f"update@{device}", np.array(seconds), none)
            self.build.runs.append(Run(device, UPDATE_RUN, -1, -1, first, None))
        names = [" ".join(self.cluster.devices[device].name for device in row) for row in stands_for]
        problem, order = self.build.problem("strategy", draft.batch, names, resident)
        return ExpandedDraft(problem, order, tuple(stands_for), tuple(self.build.runs), tuple(self.build.exchanges))

    def _sum_ties(self) -> None:
        """Places that hold a tied weight sum its gradients when all of them are done."""
        build, places = self.build, len(self.draft.places)
        for number, (seconds, involved) in enumerate(tie_exchanges(self.draft, self.costs, self.traffic)):
            for device in range(build.devices):
                if device % places in involved:
                    key, after = (TIE, number), [build.last[device], *build.waiting[device]]
                    op = build.exchange(key, device, f"tie{number}@{device}", seconds, [key], UPDATE_RUN, after)
                    build.waiting[device] = [op]
