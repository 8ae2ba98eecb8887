"""What the places of one lane run, action by action, and what they send each other."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from rlplace.strategy.blocks.op_costs import slowest
from rlplace.strategy.costs import kind_numbers
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor.meshes import Lane, stage_actions
from rlplace.strategy.executor.placed_blocks import Block, placed_blocks, received_bytes
from rlplace.strategy.executor.rules import WHOLE
from rlplace.strategy.executor.traffic import table_s
from rlplace.strategy.op_level.expand_pass import PassBuild
from rlplace.strategy.op_level.stage_ops import Lifetimes, StageOps
from rlplace.strategy.op_level.step_build import SEND

if TYPE_CHECKING:
    from rlplace.strategy.op_level.expand import Expansion


class LaneBuild:
    """Adds what the places of one lane run."""

    def __init__(self, whole: Expansion, number: int, lane: Lane) -> None:
        draft, costs = whole.draft, whole.costs
        self.whole, self.build, self.draft, self.number, self.lane = whole, whole.build, draft, number, lane
        self.rows = placed_blocks(draft, lane, whole.packer)
        costed = whole.packer.costed
        kept = [costed.place(place) for place in draft.places]
        self.meets = [(row[c.MEETS_BLOCKS], row[c.MEETS_COPIES] > 0.0) for row in kept]
        step = costs.step_ops(whole.split)
        kind_of = kind_numbers(costs, whole.cluster)
        self.stages = []
        for stage, inside in enumerate(whole.ranges):
            place = draft.place_of_stage[stage]
            cuts = sorted({(kind_of[device], samples) for samples, devices in lane.replicas[place] for device in devices})
            cut = draft.places[place].cut
            passed = slowest([costs.pass_ops(kind, cut(samples), whole.split) for kind, samples in cuts])
            self.stages.append(StageOps(step, passed, inside, draft.recompute))
        self.collective_s = [self._collective_s(stage) for stage in range(draft.stages)]
        self.left = [lane.microbatches] * draft.stages
        self.arrived: dict[tuple[int, str, int], int] = {}  # what a stage waits for: the op that sends it
        self.forward: dict[tuple[int, int], int] = {}  # first op of a forward
        self.halves: dict[tuple[int, int], int] = {}  # of the first half of a backward
        self.lives = cache(lambda stage, kind: self.stages[stage].lifetimes(kind))

    def device(self, place: int) -> int:
        """The device that stands for a place in this lane."""
        return self.number * len(self.draft.places) + place

    def resident_bytes(self, place: int) -> float:
        """Weights, gradients and optimizer state as far as they are there all step long, and torch's receive buffers."""
        rows = self.rows[place]
        total = sum(rows[block].static_bytes for block in self.draft.blocks_of(place))
        return total + received_bytes(self.draft, self.lane, rows, place)

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
        tables = traffic.tables_inside(place)
        return [table_s(traffic.tables[tables[item.kind]], item.size_bytes) for item in self.stages[stage].passed.collectives]

    def _action(self, place: int, stage: int, kind: str, microbatch: int) -> None:
        device = self.device(place)
        came = self.arrived.pop((stage, "F" if kind == "F" else "B", microbatch), None) if kind != "W" else None
        if came is not None:
            self.build.waiting[device].append(came)
        pass_of = PassBuild(self, stage, kind, microbatch)
        base = pass_of.run()
        end = self.build.last[device]
        sent = -1
        if kind == "F" and stage < self.draft.stages - 1:
            sent = self._send(
                stage, stage + 1, "F", microbatch, self.rows[place][self.whole.ranges[stage].stop - 1].sent_bytes, end
            )
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
        key = (SEND, self.number, source, target, microbatch, int(size_bytes))
        name = f"send{way}{source}.{target}.{microbatch}@{self.number}"
        channels = [("way", self.number, channel) for channel in found.channels]
        op = self.build.exchange(key, self.device(here), name, seconds, channels, way, [end])
        self.arrived[target, way, microbatch] = op
        return op

    def _tensors(self, stage: int, kind: str, microbatch: int, base: int, sent: int) -> None:
        """Tensors that end in this part, and those of earlier parts that end in it."""
        ops, build = self.stages[stage], self.build
        if kind == "F":
            self.forward[stage, microbatch] = base
        if kind == "I":
            self.halves[stage, microbatch] = base
            self._halved(self.lives(stage, "F")[0], stage, self.forward[stage, microbatch], base)
        for lives in self.lives(stage, kind):
            now = ~lives.late
            start, size, end = base + lives.start, ops.passed.tensor_bytes[lives.tensor], base + lives.end
            if sent >= 0 and kind in "BI":
                end = np.where(lives.leaves, sent, end)
            build.tensors(start[now], size[now], end[now])
        if kind in "BW":
            self._late(self.lives(stage, "F")[0], stage, self.forward.pop((stage, microbatch)), kind, base)
        if kind == "W":
            for lives in self.lives(stage, "I"):
                self._late(lives, stage, self.halves[stage, microbatch], "I", base)

    def _halved(self, lives: Lifetimes, stage: int, first: int, base: int) -> None:
        """What the first half of a split backward frees: tensors of the forward that come after the last weight."""
        gone = lives.late & (lives.half >= 0)
        size = self.stages[stage].passed.tensor_bytes[lives.tensor[gone]]
        self.build.tensors(first + lives.start[gone], size, base + lives.half[gone])

    def _late(self, lives: Lifetimes, stage: int, first: int, kind: str, base: int) -> None:
        """Tensors of an earlier part; what the first half of a split backward has left of the forward ends with the second."""
        late, ops = lives.late & ((lives.half < 0) | (kind != "W")), self.stages[stage]
        start, size = first + lives.start[late], ops.passed.tensor_bytes[lives.tensor[late]]
        end = lives.end[late] if kind != "W" else np.full(int(late.sum()), len(ops.part("W").op) - 1)
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

    def reduce(
        self, place: int, block: int, row: Block, when: str, after: list[int], times: float = 1.0, *, hold: bool = False
    ) -> int:
        key, name = ("reduce", place, block, when), f"reduce{when}.{block}@{self.device(place)}"
        held = int(row.buffer_bytes) if hold else 0
        return self.build.exchange(key, self.device(place), name, row.reduce_s * times, [("shard", place)], "B", after, held)

    def copy(self, place: int, block: int, row: Block, when: str, after: list[int], times: float = 1.0) -> int:
        if row.copies_s == 0.0:
            return after[0]
        key, name = ("copies", place, block, when), f"copies{when}.{block}@{self.device(place)}"
        channels = [(axis, place) for axis in ("replicate", *(["shard"] if self.meets[place][1] else []))]
        return self.build.exchange(key, self.device(place), name, row.copies_s * times, channels, "B", after)
