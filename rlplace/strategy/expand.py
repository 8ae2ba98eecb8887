"""A whole strategy as ops: what the op-level simulator executes for a draft.

One device stands for all that do the same at the same time: those of one place in lanes that are alike. It runs, micro-batch by
micro-batch in the order of its schedule, the ops of its stages as the tensor axis leaves them, slowest device kind and largest
micro-batch of its lane. Everything that devices tell each other is a collective over all groups of its axis, with the time of
`rlplace.strategy.traffic`: collectives inside blocks, which their ops wait for; parameters that are gathered and gradients that
are reduced, block by block beside compute as torch's `fully_shard` does it; buckets of DistributedDataParallel; what stages send
each other; sums over ties. Where these start and what waits for them stands in docs/cost-model/strategy.md; compute beside them
is slower by `rlplace.problem.collectives.COMPUTE_SLOWDOWN`. Bytes that are held all step long are those of the block executor;
activations, what runs again, gathered parameters and gradients are tensors with lifetimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.problem import Problem
from rlplace.schedule import SCHEDULES
from rlplace.strategy.costs import COLLECTIVE_KINDS
from rlplace.strategy.drafts import Draft
from rlplace.strategy.meshes import Lane, borders, check_draft, copy_groups, lanes, stage_actions, tensor_groups
from rlplace.strategy.op_costs import OpCosts, slowest
from rlplace.strategy.reference import tie_exchanges
from rlplace.strategy.reference_blocks import Block, place_blocks, stage_ranges
from rlplace.strategy.reference_memory import received_bytes, static_bytes
from rlplace.strategy.rules import BUCKET, EACH_BACKWARD, EACH_PASS, FIRST_BUCKET, ONCE, SLOWDOWN, WHOLE
from rlplace.strategy.stage_ops import Lifetimes, Part, StageOps
from rlplace.strategy.step_build import StepBuild
from rlplace.strategy.traffic import Traffic, table_s


@dataclass(frozen=True, eq=False)
class ExpandedDraft:
    """What the op-level simulator runs for a draft.

    Attributes:
        problem: A group a device; all micro-batches are ops of their own.
        order: What each device runs, in order.
        stands_for: For each device of `problem` those of the cluster that it stands for.
    """

    problem: Problem
    order: list[list[int]]
    stands_for: tuple[tuple[int, ...], ...]


def expand_draft(draft: Draft, costs: OpCosts, cluster: Cluster, traffic: Traffic | None = None) -> ExpandedDraft:
    """Lowers a draft to ops.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    return _Expansion(draft, costs, cluster, traffic or Traffic(cluster)).expanded()


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


class _Expansion:
    """Lowers one draft."""

    def __init__(self, draft: Draft, costs: OpCosts, cluster: Cluster, traffic: Traffic) -> None:
        check_draft(draft, cluster, len(costs.names))
        self.draft, self.costs, self.cluster, self.traffic = draft, costs, cluster, traffic
        self.split, self.ranges = splits(draft), stage_ranges(draft)
        self.ways = traffic.ways(borders(draft))
        self.lanes = _alike(draft, cluster)
        self.build = StepBuild(len(self.lanes) * len(draft.places))

    def expanded(self) -> ExpandedDraft:
        draft, resident, stands_for, update = self.draft, [], [], []
        for number, alike in enumerate(self.lanes):
            lane = _LaneBuild(self, number, alike[0])
            lane.run()
            for place in range(len(draft.places)):
                resident.append(math.ceil(lane.resident_bytes(place)))
                stands_for.append(tuple(d for one in alike for _, devices in one.replicas[place] for d in devices))
                update.append([lane.rows[place][block].update_s for block in lane.blocks_of(place)])
        self._sum_ties()
        for device, seconds in enumerate(update):
            self.build.run(device, "U", f"update@{device}", np.array(seconds), np.zeros(len(seconds), dtype=np.int64))
        problem, order = self.build.problem("strategy", draft.batch, resident)
        return ExpandedDraft(problem, order, tuple(stands_for))

    def _sum_ties(self) -> None:
        """Places that hold a tied weight sum its gradients when all of them are done."""
        build, places = self.build, len(self.draft.places)
        for number, (seconds, involved) in enumerate(tie_exchanges(self.draft, self.costs, self.traffic)):
            for device in range(build.devices):
                if device % places in involved:
                    op = build.exchange(("tie", number), device, f"tie{number}@{device}", seconds, [("tie", number)], "U")
                    for before in (build.last[device], *build.waiting[device]):
                        build.edge(before, op)
                    build.waiting[device] = [op]


class _LaneBuild:
    """Adds what the places of one lane run."""

    def __init__(self, whole: _Expansion, number: int, lane: Lane) -> None:
        draft, costs = whole.draft, whole.costs
        self.whole, self.build, self.draft, self.number, self.lane = whole, whole.build, draft, number, lane
        places = range(len(draft.places))
        self.rows = [place_blocks(draft, place, lane, costs, whole.cluster, whole.traffic) for place in places]
        step = costs.step_ops(whole.split)
        kinds = {name: kind for kind, name in enumerate(costs.kinds)}
        self.stages = []
        for stage, inside in enumerate(whole.ranges):
            place = draft.place_of_stage[stage]
            cuts = sorted(
                {
                    (kinds[str(whole.cluster.devices[device].kind)], samples)
                    for samples, devices in lane.replicas[place]
                    for device in devices
                }
            )
            cut = draft.places[place].cut
            passed = slowest([costs.pass_ops(kind, cut(samples), whole.split) for kind, samples in cuts])
            last = stage == draft.stages - 1
            self.stages.append(StageOps(step, passed, inside, draft.recompute, last=last))
        self.collective_s = [self._collective_s(stage) for stage in range(draft.stages)]
        self.left = [lane.microbatches] * draft.stages
        self.arrived: dict[tuple[int, str, int], int] = {}  # what a stage waits for: the op that sends it
        self.forward: dict[tuple[int, int], int] = {}  # first op of a forward
        self.halves: dict[tuple[int, int], int] = {}  # of the first half of a backward
        self.lives = cache(self._lives)

    def device(self, place: int) -> int:
        """The device that stands for a place in this lane."""
        return self.number * len(self.draft.places) + place

    def blocks_of(self, place: int) -> list[int]:
        """Blocks on a place."""
        return [b for stage, at in enumerate(self.draft.place_of_stage) if at == place for b in self.whole.ranges[stage]]

    def resident_bytes(self, place: int) -> float:
        """Weights, gradients and optimizer state as far as they are there all step long, and torch's receive buffers."""
        draft, count, rows = self.draft, self.lane.microbatches, self.rows[place]
        total = sum(static_bytes(rows[block], draft.stages, count) for block in self.blocks_of(place))
        stages = [stage for stage, at in enumerate(draft.place_of_stage) if at == place]
        return total + sum(received_bytes(draft, stage, count, rows) for stage in stages)

    def run(self) -> None:
        """Every place's actions, always one whose input another action has sent."""
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

    def _collective_s(self, stage: int) -> list[float]:
        """Seconds of the collectives inside blocks."""
        place, traffic = self.draft.places[self.draft.place_of_stage[stage]], self.whole.traffic
        tables = [traffic.table(name, tensor_groups(place, kind)) for kind, name in enumerate(COLLECTIVE_KINDS)]
        return [table_s(tables[item.kind], item.size_bytes) for item in self.stages[stage].passed.collectives]

    def _lives(self, stage: int, kind: str) -> list[Lifetimes]:
        return self.stages[stage].lifetimes(kind)

    def _action(self, place: int, stage: int, kind: str, microbatch: int) -> None:
        device = self.device(place)
        came = self.arrived.pop((stage, "F" if kind == "F" else "B", microbatch), None) if kind != "W" else None
        if came is not None:
            self.build.waiting[device].append(came)
        pass_of = _Pass(self, stage, kind, microbatch)
        base = pass_of.run()
        end = self.build.last[device]
        sent = -1
        if kind == "F" and stage < self.draft.stages - 1:
            sent = self._send(stage, stage + 1, "F", microbatch, self.rows[place][self.whole.ranges[stage].stop - 1].sent_bytes, end)
        if kind in "BI" and stage > 0:
            size = self.rows[place][self.whole.ranges[stage].start - 1].returned_bytes
            sent = self._send(stage, stage - 1, "B", microbatch, size, end)
        self._tensors(stage, kind, microbatch, base, sent)
        if kind in "BW":
            self.left[stage] -= 1
            if self.left[stage] == 0 and self.draft.stages > 1:
                self._exchange(place, stage)

    def _send(self, source: int, target: int, way: str, microbatch: int, size_bytes: float, end: int) -> int:
        """Hands a tensor to a neighbour; the op that does so."""
        here, there = (self.draft.place_of_stage[stage] for stage in (source, target))
        if here == there:
            self.arrived[target, way, microbatch] = end
            return -1
        found = self.whole.ways[here, there]
        seconds = found.latency_s + (size_bytes * found.part * found.s_per_byte if size_bytes > 0.0 else 0.0)
        key = ("send", self.number, source, target, microbatch)
        name = f"send{way}{source}.{target}.{microbatch}@{self.number}"
        channels = [("way", self.number, channel) for channel in found.channels]
        op = self.build.exchange(key, self.device(here), name, seconds, channels, "F" if way == "F" else "B")
        self.build.edge(end, op)
        self.arrived[target, way, microbatch] = op
        return op

    def _tensors(self, stage: int, kind: str, microbatch: int, base: int, sent: int) -> None:
        """Tensors that end in this part, and those of earlier parts that end in it."""
        ops, build = self.stages[stage], self.build
        if kind == "F":
            self.forward[stage, microbatch] = base
        if kind == "I":
            self.halves[stage, microbatch] = base
        for lives in self.lives(stage, kind):
            now = ~lives.late
            start, size = base + lives.start, ops.passed.tensor_bytes[lives.tensor]
            build.tensors(start[now], size[now], base + lives.end[now])
            gone = lives.leaves & now
            if sent >= 0 and gone.any() and kind in "BI":
                build.tensors(start[gone], size[gone], np.full(int(gone.sum()), sent))
        if kind in "BW":
            self._late(self.lives(stage, "F")[0], stage, self.forward.pop((stage, microbatch)), kind, base)
        if kind == "W":
            for lives in self.lives(stage, "I"):
                self._late(lives, stage, self.halves[stage, microbatch], "I", base)

    def _late(self, lives: Lifetimes, stage: int, first: int, kind: str, base: int) -> None:
        """Tensors of an earlier part; the first half of a split backward frees nothing that the forward kept."""
        late, ops = lives.late, self.stages[stage]
        start, size = first + lives.start[late], ops.passed.tensor_bytes[lives.tensor[late]]
        end = lives.end[late] if kind != "W" else np.full(int(late.sum()), ops.part("W").rows - 1)
        self.build.tensors(start, size, base + end)

    def _exchange(self, place: int, stage: int) -> None:
        """Gradients of a stage of a pipeline, after its last backward: reduced block by block, copies beside that."""
        build, device = self.build, self.device(place)
        before, copied = build.last[device], -1
        for block in reversed(self.whole.ranges[stage]):
            row = self.rows[place][block]
            if row.keeping != WHOLE:
                reduced = self.reduce(place, block, row, "", [before], hold=True)
                copied = self.copy(place, block, row, "", [reduced])
                before = reduced
                build.waiting[device] += [reduced, copied]

    def reduce(self, place: int, block: int, row: Block, when: str, after: list[int], *, hold: bool = False) -> int:
        key, name = ("reduce", place, block, when), f"reduce{when}.{block}@{self.device(place)}"
        held = int(row.buffer_bytes) if hold else 0
        op = self.build.exchange(key, self.device(place), name, row.reduce_s, [("shard", place)], "B", held)
        for before in after:
            self.build.edge(before, op)
        return op

    def copy(self, place: int, block: int, row: Block, when: str, after: list[int]) -> int:
        if row.copies_s == 0.0:
            return after[0]
        key, name = ("copies", place, block, when), f"copies{when}.{block}@{self.device(place)}"
        op = self.build.exchange(key, self.device(place), name, row.copies_s, [("replicate", place)], "B")
        for before in after:
            self.build.edge(before, op)
        return op


class _Pass:
    """Adds one action of a stage with what moves beside its blocks."""

    def __init__(self, lane: _LaneBuild, stage: int, kind: str, microbatch: int) -> None:
        self.lane, self.build, self.kind, self.microbatch = lane, lane.build, kind, microbatch
        self.place = lane.draft.place_of_stage[stage]
        self.device = lane.device(self.place)
        self.ops, self.part = lane.stages[stage], lane.stages[stage].part(kind)
        self.name = f"{kind}{stage}.{microbatch}"
        self.seconds = self.ops.seconds(kind, lane.collective_s[stage])
        self.rows = lane.rows[self.place]
        self.blocks = list(lane.whole.ranges[stage])
        self.single = lane.draft.stages == 1
        if kind != "F":
            self.blocks.reverse()
        self.last = kind in "BW" and lane.left[stage] == 1
        self.copied: list[int] = []  # collectives over copies

    def run(self) -> int:
        """Adds it; the number of its first op."""
        gathered = [block for block in self.blocks if self._gathers(self.rows[block])]
        reduced = [block for block in self.blocks if self._reduces(self.rows[block])]
        part, build, buckets = self.part, self.build, self._buckets()
        self.seconds = np.where(part.compute, self.seconds * (1.0 + SLOWDOWN * self._under(buckets)), self.seconds)
        self._slow_down(gathered, reduced)
        temporary = self.ops.temporary_bytes(self.kind)
        each = [block for block in gathered if self.rows[block].keeping == EACH_PASS or self.kind == "F"]
        temporary[[part.begins[block] for block in each]] = [int(self.rows[block].weight_bytes) for block in each]
        first_wait = self._gather(gathered[0], [build.last[self.device]]) if gathered and gathered[0] == self.blocks[0] else -1
        if first_wait >= 0:
            for op in build.waiting[self.device]:
                build.edge(op, first_wait)
        base = build.run(self.device, self.kind, f"{self.name}@{self.device}", self.seconds, temporary)
        self._beside(base, first_wait, set(gathered), set(reduced))
        self._send_buckets(base, buckets)
        return base

    def _gathers(self, row: Block) -> bool:
        """Whether a block's parameters are gathered for this pass."""
        if self.kind == "F":
            return row.keeping == EACH_PASS or (self.microbatch == 0 and row.keeping in (ONCE, EACH_BACKWARD))
        return self.single and row.keeping == EACH_PASS

    def _reduces(self, row: Block) -> bool:
        """Whether a block's gradient is reduced beside this pass."""
        each = row.keeping in (EACH_BACKWARD, EACH_PASS) or (self.last and row.keeping == ONCE)
        return self.single and self.kind != "F" and each

    def _slow_down(self, gathered: list[int], reduced: list[int]) -> None:
        """A block's ops are slower beside what moves: the next block's parameters, the gradient of the one before."""
        for index, block in enumerate(self.blocks):
            behind, ahead = self.blocks[index - 1] if index else -1, self.blocks[index + 1] if index + 1 < len(self.blocks) else -1
            moving = self.rows[ahead].gather_s if ahead in gathered else 0.0
            if behind in reduced:
                moving += self.rows[behind].reduce_s + self.rows[behind].copies_s
            inside = np.arange(self.part.begins[block], self.part.ends[block])
            inside = inside[self.part.compute[inside]]
            compute = float(self.seconds[inside].sum())
            if compute > 0.0:
                self.seconds[inside] *= 1.0 + SLOWDOWN * min(compute, moving) / compute

    def _gather(self, block: int, after: list[int]) -> int:
        """Gathers the parameters of a block, which are there until its pass is over."""
        row, when = self.rows[block], f"{self.kind}{self.microbatch}"
        key, name = ("gather", self.place, block, when), f"gather{when}.{block}@{self.device}"
        op = self.build.exchange(key, self.device, name, row.gather_s, [("shard", self.place)], self.kind)
        for before in after:
            self.build.edge(before, op)
        return op

    def _beside(self, base: int, first_wait: int, gathered: set[int], reduced: set[int]) -> None:
        """Collectives beside the blocks: the next one's parameters, then, in the backward, before these the last one's gradient."""
        build, part, waits = self.build, self.part, [first_wait]
        for index, block in enumerate(self.blocks):
            begin, end = base + part.begins[block], base + part.ends[block]
            for op in waits:
                build.edge(op, begin)
            if block in gathered and self.rows[block].keeping == EACH_PASS:
                build.edge(waits[-1], end, int(self.rows[block].weight_bytes))
            waits, after = [], [begin]
            behind = self.blocks[index - 1] if index else -1
            if behind in reduced:
                waits.append(self._reduce(behind, base))
                after = [begin, waits[-1]]
            ahead = self.blocks[index + 1] if index + 1 < len(self.blocks) else -1
            if ahead in gathered:
                waits.append(self._gather(ahead, after))
            if self.kind != "F":
                self._hold_gradient(block, base)
        if self.kind != "F":
            if self.blocks[-1] in reduced:
                waits.append(self._reduce(self.blocks[-1], base))
            build.waiting[self.device] += waits + self.copied
        else:
            build.waiting[self.device] += waits

    def _reduce(self, block: int, base: int) -> int:
        """The gradient of a block leaves as soon as the block is done, its share goes on to the copies."""
        row, lane, when = self.rows[block], self.lane, str(self.microbatch) if self.rows[block].keeping != ONCE else ""
        end = base + self.part.ends[block]
        op = lane.reduce(self.place, block, row, when, [])
        self.build.edge(end, op, int(row.buffer_bytes))
        self.copied.append(lane.copy(self.place, block, row, when, [op]))
        return op

    def _hold_gradient(self, block: int, base: int) -> None:
        """The unsharded gradient of a block grows while it runs, where it is not there all step long."""
        row, lane = self.rows[block], self.lane
        passing = row.keeping in (EACH_BACKWARD, EACH_PASS) or (
            row.keeping == ONCE and self.single and lane.lane.microbatches == 1
        )
        if not passing:
            return
        rows, sizes = self._gradient(block, row.gradient_bytes)
        end = np.full(len(rows), base + self.part.ends[block])
        self.build.tensors(base + rows, sizes, end)

    def _gradient(self, block: int, size_bytes: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows that make the gradient of a block, and the bytes that each makes."""
        rows, tensors, blocks = self.ops.gradients(self.kind)
        own = blocks == block
        rows, sizes = rows[own], self.ops.passed.tensor_bytes[tensors[own]].astype(np.float64)
        if sizes.sum() <= 0.0:
            return np.array([self.part.ends[block] - 1]), np.array([int(size_bytes)])
        return rows, np.rint(sizes * (size_bytes / sizes.sum())).astype(np.int64)

    def _buckets(self) -> list[tuple[int, float]]:
        """Row at which each bucket of whole gradients is full, and its bytes; in the last micro-batch of a single stage."""
        if not (self.single and self.last):
            return []
        found, filled, limit, row = [], 0.0, FIRST_BUCKET, 0
        for block in self.blocks:
            if self.rows[block].bucket_bytes > 0.0:
                for row, size in zip(*self._gradient(block, self.rows[block].bucket_bytes), strict=True):
                    filled += float(size)
                    if filled >= limit:
                        found.append((int(row), filled))
                        filled, limit = 0.0, BUCKET
        return [*found, (int(row), filled)] if filled > 0.0 else found

    def _bucket_s(self, size_bytes: float) -> float:
        place = self.lane.draft.places[self.place]
        return table_s(self.lane.whole.traffic.table("all_reduce", copy_groups(place)), size_bytes)

    def _under(self, buckets: list[tuple[int, float]]) -> float:
        """The share of the backward that runs beside all buckets but the last."""
        compute = float(self.seconds[self.part.compute].sum())
        under = sum(self._bucket_s(size) for _, size in buckets[:-1])
        return min(under, compute) / compute if compute > 0.0 else 0.0

    def _send_buckets(self, base: int, buckets: list[tuple[int, float]]) -> None:
        for number, (row, size) in enumerate(buckets):
            key, name = ("bucket", self.place, number), f"bucket{number}@{self.device}"
            op = self.build.exchange(key, self.device, name, self._bucket_s(size), [("replicate", self.place)], "B")
            self.build.edge(base + row, op)
            self.build.waiting[self.device].append(op)
