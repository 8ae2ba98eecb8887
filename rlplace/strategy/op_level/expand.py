"""A whole strategy as ops: input of the op-level simulator for a draft.

One device represents all with the same work: those of one place in lanes that are alike. It runs, micro-batch by micro-batch in
the order of its schedule, the ops of its stages as the tensor axis leaves them, slowest device kind and largest micro-batch of
its lane. All communication between devices is collectives over all groups of its axis, with the time of
`rlplace.strategy.executor.traffic`: collectives inside blocks, which their ops wait for; parameters that are gathered and
gradients that are reduced, block by block beside compute as torch's `fully_shard` does it; buckets of DistributedDataParallel;
stage transfers; sums over ties. `rlplace.strategy.executor` states where these start and what waits for them;
compute beside them is slower by `rlplace.cluster.collectives.COMPUTE_SLOWDOWN`. Bytes that are held all step long are those of
the block executor; activations, recomputation, gathered parameters and gradients are tensors with lifetimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.schedule import SCHEDULES
from rlplace.problem import Problem
from rlplace.strategy.blocks.op_costs import OpCosts, slowest
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor.ahead import GathersAhead, gather_ahead
from rlplace.strategy.executor.arrays import PlacedBlock
from rlplace.strategy.executor.meshes import Lane, alike_lanes, borders, lane_of, stage_actions
from rlplace.strategy.executor.packing import Packer, placed_blocks, received_bytes
from rlplace.strategy.executor.rules import WHOLE
from rlplace.strategy.executor.traffic import ClusterTraffic, table_s, tie_exchanges
from rlplace.strategy.op_level.expand_pass import PassBuild
from rlplace.strategy.op_level.stage_ops import PassLifetimes, StageOps
from rlplace.strategy.op_level.step_build import GATHER, SEND, TIE, UPDATE_RUN, DeviceRun, Exchange, StepBuild


class LaneBuild:
    """The places of one lane, added to a step."""

    def __init__(self, whole: Expansion, number: int, lane: Lane) -> None:
        draft, costs = whole.draft, whole.costs
        self.whole, self.build, self.draft, self.number, self.lane = whole, whole.build, draft, number, lane
        self.rows = placed_blocks(draft, lane, whole.packer)
        places = map(whole.packer.costed.place, draft.places)
        self.meets = [(row[c.MEETS_BLOCKS], row[c.MEETS_COPIES] > 0.0) for row in places]
        self.released = costs.held().released
        step, kind_of = costs.step_ops(whole.split), whole.packer.costed.kind.tolist()
        self.stages, self.collective_s = [], []
        for place, inside in zip(draft.place_of_stage, whole.ranges, strict=True):
            cuts = sorted({(kind_of[device], samples) for samples, devices in lane.replicas[place] for device in devices})
            mesh = draft.places[place]
            passed = slowest([costs.pass_ops(kind, mesh.cut(samples), whole.split) for kind, samples in cuts])
            self.stages.append(StageOps(step, passed, inside, draft.recompute))
            tables, numbers = whole.traffic.tables, whole.traffic.tables_inside(mesh, costs.joins_replicas)
            self.collective_s.append(
                [max(0.0, table_s(tables[numbers[item.kind]], item.size_bytes) - item.hidden_s) for item in passed.collectives]
            )
        self.ahead: list[GathersAhead] = []
        self.gathers: dict[int, int] = {}  # the op that gathers a block ahead
        self.left = [lane.microbatches] * draft.stages
        self.arrived: dict[tuple[int, str, int], int] = {}  # input of a stage: the op that sends it
        self.forward: dict[tuple[int, int], int] = {}  # first op of a forward
        self.halves: dict[tuple[int, int], int] = {}  # of the first half of a backward
        self.lives = cache(lambda stage, kind: self.stages[stage].lifetimes(kind))

    def device(self, place: int) -> int:
        """Returns the device that represents a place in this lane."""
        return self.number * len(self.draft.places) + place

    def resident_bytes(self, place: int) -> float:
        """Returns weights, gradients and optimizer state that are there all step long, and torch's receive buffers."""
        rows = self.rows[place]
        total = sum(rows[block].static_bytes for block in self.draft.blocks_of(place))
        return total + received_bytes(self.draft, self.lane, rows, place)

    def _gather_all(self) -> None:
        """Adds the gathers of a pipeline that begin with the step, one after another on each place."""
        rows, last = self.rows, [(-1, 0.0)] * len(self.draft.places)
        times = [[(row.gather_s, row.forward_s, row.forward_tensor_s) for row in own] for own in rows]
        self.ahead = gather_ahead(self.draft, times, [meets for meets, _ in self.meets])
        for ahead, place, inside in zip(self.ahead, self.draft.place_of_stage, self.whole.ranges, strict=True):
            for block, end_s in zip(inside, ahead.ends_s, strict=True):
                if rows[place][block].gather_s > 0.0:
                    before, start_s = last[place]
                    op = self.gather(place, block, "F0", "F", [before], end_s - start_s)
                    self.gathers[block], last[place] = op, (op, end_s)

    def run(self) -> None:
        """Adds every place's actions, always one whose input another action has sent."""
        if self.draft.stages > 1:
            self._gather_all()
        waiting = [list(reversed(actions)) for actions in stage_actions(self.draft, self.lane.microbatches)]
        while any(waiting):
            ran = False
            for place, actions in enumerate(waiting):
                while actions and self._ready(*actions[-1]):
                    self._action(place, *actions.pop())
                    ran = True
            assert ran, "the schedule waits for itself"

    def _ready(self, stage: int, kind: str, microbatch: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage, "F", microbatch) in self.arrived
        return kind == "W" or stage == self.draft.stages - 1 or (stage, "B", microbatch) in self.arrived

    def _action(self, place: int, stage: int, kind: str, microbatch: int) -> None:
        device, rows, inside = self.device(place), self.rows[place], self.whole.ranges[stage]
        came = self.arrived.pop((stage, "F" if kind == "F" else "B", microbatch), None) if kind != "W" else None
        if came is not None:
            self.build.waiting[device].append(came)
        base = PassBuild(self, stage, kind, microbatch).run()
        sent = -1
        if kind == "F" and stage < self.draft.stages - 1:
            sent = self._send(stage, stage + 1, "F", microbatch, rows[inside.stop - 1].sent_bytes)
        if kind in "BI" and stage > 0:
            sent = self._send(stage, stage - 1, "B", microbatch, rows[inside.start - 1].returned_bytes)
        self._tensors(stage, kind, microbatch, base, sent)
        if kind in "BW":
            self.left[stage] -= 1
            if self.left[stage] == 0 and self.draft.stages > 1:
                self._exchange(place, stage)

    def _send(self, source: int, target: int, way: str, microbatch: int, size_bytes: float) -> int:
        """Sends the output of a stage to a neighbour; returns the op, -1 on one place."""
        here, there = (self.draft.place_of_stage[stage] for stage in (source, target))
        end = self.build.last[self.device(here)]
        if here == there:
            self.arrived[target, way, microbatch] = end
            return -1
        found = self.whole.ways[here, there]
        seconds = found.latency_s + (size_bytes * found.part * found.s_per_byte if size_bytes > 0.0 else 0.0)
        key = (SEND, self.number, source, target, microbatch, int(size_bytes))
        channels = [("way", self.number, channel) for channel in found.channels]
        send = Exchange(key, f"send{way}{source}.{target}.{microbatch}@{self.number}", seconds, channels, way)
        op = self.build.exchange(self.device(here), send, [end])
        self.arrived[target, way, microbatch] = op
        return op

    def _tensors(self, stage: int, kind: str, microbatch: int, base: int, sent: int) -> None:
        """Adds tensors that end in this part, and those of earlier parts that end in it."""
        ops, build = self.stages[stage], self.build
        ahead = self.lives(stage, "F")[0]
        if kind == "F":
            self.forward[stage, microbatch] = base
        if kind == "I":  # of the forward, tensors that come after the last weight
            self.halves[stage, microbatch] = base
            gone = ahead.late & (ahead.half >= 0)
            size = ops.passed.tensor_bytes[ahead.tensor[gone]]
            build.tensors(self.forward[stage, microbatch] + ahead.start[gone], size, base + ahead.half[gone])
        for lives in self.lives(stage, kind):
            now = ~lives.late
            start, size, end = base + lives.start, ops.passed.tensor_bytes[lives.tensor], base + lives.end
            if sent >= 0 and kind in "BI":
                end = np.where(lives.leaves, sent, end)
            build.tensors(start[now], size[now], end[now])
        if kind in "BW":
            self._late(ahead, stage, self.forward.pop((stage, microbatch)), kind, base)
        if kind == "W":
            for lives in self.lives(stage, "I"):
                self._late(lives, stage, self.halves[stage, microbatch], "I", base)

    def _late(self, lives: PassLifetimes, stage: int, first: int, kind: str, base: int) -> None:
        """Adds tensors of an earlier part; those of the forward that the first half leaves end with the second."""
        late, ops = lives.late & ((lives.half < 0) | (kind != "W")), self.stages[stage]
        start, size = first + lives.start[late], ops.passed.tensor_bytes[lives.tensor[late]]
        end = lives.end[late] if kind != "W" else np.full(int(late.sum()), len(ops.part("W").op) - 1)
        self.build.tensors(start, size, base + end)

    def _exchange(self, place: int, stage: int) -> None:
        """Adds the exchange of gradients after the last backward: reduced block by block, copies beside that."""
        build, device = self.build, self.device(place)
        before = build.last[device]
        for block in reversed(self.whole.ranges[stage]):
            row = self.rows[place][block]
            if row.keeping != WHOLE:
                before = self.reduce(place, block, row, "", [before], hold=True)
                build.waiting[device] += [before, self.copy(place, block, row, "", [before])]

    def reduce(
        self,
        place: int,
        block: int,
        row: PlacedBlock[float],
        when: str,
        after: list[int],
        times: float = 1.0,
        *,
        hold: bool = False,
    ) -> int:
        """Adds the reduction of a block's gradient; returns the op."""
        key, name = ("reduce", place, block, when), f"reduce{when}.{block}@{self.device(place)}"
        held = int(row.buffer_bytes) if hold else 0
        one = Exchange(key, name, row.reduce_s * times, [("shard", place)], "B", held)
        return self.build.exchange(self.device(place), one, after)

    def gather(self, place: int, block: int, when: str, part: str, after: list[int], seconds: float) -> int:
        """Adds the gather of a block's parameters; returns the op."""
        key, name = (GATHER, place, block, when), f"gather{when}.{block}@{self.device(place)}"
        return self.build.exchange(self.device(place), Exchange(key, name, seconds, [("shard", place)], part), after)

    def copy(self, place: int, block: int, row: PlacedBlock[float], when: str, after: list[int], times: float = 1.0) -> int:
        """Adds the sum of a block's gradient over copies; returns the op, or the first before it where there are none."""
        if row.copies_s == 0.0:
            return after[0]
        key, name = ("copies", place, block, when), f"copies{when}.{block}@{self.device(place)}"
        channels = [(axis, place) for axis in ("replicate", *(["shard"] if self.meets[place][1] else []))]
        return self.build.exchange(self.device(place), Exchange(key, name, row.copies_s * times, channels, "B"), after)


@dataclass(frozen=True, eq=False)
class ExpandedDraft:
    """A draft as the op-level simulator runs it.

    Attributes:
        problem: A group a device; all micro-batches are ops of their own.
        order: Ops of each device, in order.
        stands_for: For each device of `problem` those of the cluster that it represents.
        runs: Ops of its devices beside collectives with one another.
        exchanges: For each of its collectives its key, see `rlplace.strategy.op_level.step_build.SEND`.
    """

    problem: Problem
    order: list[list[int]]
    stands_for: tuple[tuple[int, ...], ...]
    runs: tuple[DeviceRun, ...]
    exchanges: tuple[Any, ...]


def expand_draft(
    draft: Draft, costs: OpCosts, cluster: Cluster, traffic: ClusterTraffic | None = None, *, named: bool = False
) -> ExpandedDraft:
    """Lowers a draft to ops.

    Args:
        draft: The draft.
        costs: Costs of ops.
        cluster: Where it runs.
        traffic: Of the cluster, where it is known.
        named: Ops have the names of captured ops, for people.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    if draft.beside:
        raise InputError("draft: it has several pipelines beside each other; expand each of them alone")
    return Expansion(draft, costs, cluster, traffic or ClusterTraffic(cluster), named).expanded()


def tasks_of(draft: Draft, costs: OpCosts) -> int:
    """Returns about how many ops `expand_draft` makes of a draft whose lanes are alike."""
    ops = len(costs.step_ops(splits(draft)).phase) + 4 * len(costs.names)
    return ops * max(draft.microbatches)


def splits(draft: Draft) -> bool:
    """Returns whether weight gradients are ops of their own."""
    return draft.schedule is not None and SCHEDULES[draft.schedule].splits_backward


class Expansion:
    """One draft on its way to ops."""

    def __init__(self, draft: Draft, costs: OpCosts, cluster: Cluster, traffic: ClusterTraffic, named: bool) -> None:
        self.draft, self.costs, self.cluster, self.traffic, self.named = draft, costs, cluster, traffic, named
        self.split, self.ranges = splits(draft), draft.ranges
        self.packer = Packer(costs, cluster, traffic)
        self.packer.frame(draft)  # checks it
        self.ways = traffic.ways(borders(draft))
        self.lanes = alike_lanes(draft, self.packer.costed.kind)
        self.build = StepBuild(len(self.lanes) * len(draft.places))

    def expanded(self) -> ExpandedDraft:
        """Returns all ops."""
        draft, build, resident, stands_for, update = self.draft, self.build, [], [], []
        for number, alike in enumerate(self.lanes):
            lane = LaneBuild(self, number, lane_of(draft, alike.first))
            lane.run()
            for place in range(len(draft.places)):
                resident.append(math.ceil(lane.resident_bytes(place)))
                stands_for.append(tuple(alike.devices[place].tolist()))
                update.append([lane.rows[place][block].update_s for block in draft.blocks_of(place)])
        for number, (tie_s, involved) in enumerate(tie_exchanges(draft, self.costs, self.traffic)):
            for device in range(build.devices):  # once all places with the weight are done
                if device % len(draft.places) in involved:
                    tie = Exchange((TIE, number), f"tie{number}@{device}", tie_s, [(TIE, number)], UPDATE_RUN)
                    build.waiting[device] = [build.exchange(device, tie, [build.last[device], *build.waiting[device]])]
        for device, seconds in enumerate(update):
            none = np.zeros(len(seconds), dtype=np.int64)
            first = build.run(device, UPDATE_RUN, f"update@{device}", np.array(seconds), none)
            build.runs.append(DeviceRun(device, UPDATE_RUN, -1, -1, first, None))
        names = [" ".join(self.cluster.devices[device].name for device in row) for row in stands_for]
        problem, order = build.problem("strategy", draft.batch, names, resident)
        return ExpandedDraft(problem, order, tuple(stands_for), tuple(build.runs), tuple(build.exchanges))
