"""One action of a stage with the communication beside its blocks: gathers of parameters, reductions, buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.executor.arrays import PlacedBlock
from rlplace.strategy.executor.meshes import copy_groups
from rlplace.strategy.executor.rules import BUCKET, EACH_BACKWARD, EACH_PASS, FIRST_BUCKET, ONCE, SLOWDOWN, at_once_s, wider
from rlplace.strategy.executor.traffic import table_s
from rlplace.strategy.op_level.step_build import DeviceRun, Exchange

if TYPE_CHECKING:
    from rlplace.strategy.op_level.expand import LaneBuild


class PassBuild:
    """One action of a stage with the communication beside its blocks."""

    def __init__(self, lane: LaneBuild, stage: int, kind: str, microbatch: int) -> None:
        self.lane, self.build, self.stage, self.kind, self.microbatch = lane, lane.build, stage, kind, microbatch
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
        self.meets_blocks, self.meets_copies = lane.meets[self.place]

    def run(self) -> int:
        """Adds it; returns its first op."""
        gathered = [block for block in self.blocks if self._gathers(self.rows[block])]
        reduced = [block for block in self.blocks if self._reduces(self.rows[block])]
        part, build, buckets = self.part, self.build, self._buckets()
        self._slow_down(np.arange(len(part.op)), self._beside_all(buckets))
        beside = self._beside_blocks(gathered, reduced)
        temporary = self.ops.temporary_bytes(self.kind)
        ahead = [block for block in self.blocks if self.kind == "F" and self.microbatch == 0 and block in self.lane.gathers]
        each = [block for block in gathered if self.rows[block].keeping == EACH_PASS or self.kind == "F"] + ahead
        temporary[[part.begins[block] for block in each]] = [int(self.rows[block].weight_bytes) for block in each]
        first_wait = self._gather(gathered[0], [build.last[self.device]]) if gathered and gathered[0] == self.blocks[0] else -1
        if first_wait >= 0:
            for op in build.waiting[self.device]:
                build.edge(op, first_wait)
        labels = self.ops.labels(self.kind) if self.lane.whole.named else ()
        base = build.run(self.device, self.kind, f"{self.name}@{self.device}", self.seconds, temporary, labels)
        build.runs.append(DeviceRun(self.device, self.kind, self.stage, self.microbatch, base, part))
        for block in ahead:
            build.edge(self.lane.gathers[block], base + part.begins[block])
        self._beside(base, first_wait, set(gathered), set(reduced), beside)
        self._send_buckets(base, buckets)
        return base

    def _beside_all(self, buckets: list[tuple[int, float]]) -> float:
        """Returns seconds of communication beside the whole pass: full buckets, or gathers that began with the step."""
        if self.single or self.kind != "F":
            return sum(self._bucket_s(size) for _, size in buckets[:-1])
        rows = [self.rows[block] for block in self.blocks]
        inside_s = sum(row.forward_s for row in rows) + sum(row.forward_tensor_s for row in rows)
        return self.lane.ahead[self.stage].moving_s(self.microbatch, inside_s)

    def _gathers(self, row: PlacedBlock[float]) -> bool:
        """Returns whether a block's parameters are gathered beside this pass."""
        if not self.single:
            return False
        if self.kind == "F":
            return row.keeping == EACH_PASS or (self.microbatch == 0 and row.keeping in (ONCE, EACH_BACKWARD))
        return row.keeping == EACH_PASS and row.backward_s > 0.0

    def _reduces(self, row: PlacedBlock[float]) -> bool:
        """Returns whether a block's gradient is reduced beside this pass."""
        each = row.keeping in (EACH_BACKWARD, EACH_PASS) or (self.last and row.keeping == ONCE)
        return self.single and self.kind != "F" and each

    def _beside_blocks(self, gathered: list[int], reduced: list[int]) -> dict[int, float]:
        """Slows blocks beside the next one's gather and the reduction of the one before; returns factors on those."""
        times = {}
        for index, block in enumerate(self.blocks):
            behind, ahead = self._around(index)
            moving = self.rows[ahead].gather_s if ahead in gathered else 0.0
            if behind in reduced:
                moving += self.rows[behind].reduce_s + self.rows[behind].copies_s
            times[block] = self._slow_down(np.arange(self.part.begins[block], self.part.ends[block]), moving)
        return times

    def _around(self, index: int) -> tuple[int, int]:
        """Returns the blocks that run before and after one, -1 for none."""
        around = [-1, *self.blocks, -1]
        return around[index], around[index + 2]

    def _slow_down(self, rows: NDArray[np.int64], moving_s: float) -> float:
        """Slows ops and collectives beside communication of `moving_s`; returns the factor on that."""
        ops, inside = rows[self.part.op[rows] >= 0], rows[self.part.collective[rows] >= 0]
        compute, tensor = float(self.seconds[ops].sum()), float(self.seconds[inside].sum())
        held_up = at_once_s(self.meets_blocks, compute, tensor, moving_s)
        if compute > 0.0:
            self.seconds[ops] *= 1.0 + SLOWDOWN * min(compute, moving_s) / compute
        self.seconds[inside] *= wider(tensor, held_up)
        return wider(moving_s, held_up)

    def _gather(self, block: int, after: list[int], times: float = 1.0) -> int:
        """Adds the gather of a block's parameters."""
        when, seconds = f"{self.kind}{self.microbatch}", self.rows[block].gather_s * times
        return self.lane.gather(self.place, block, when, self.kind, after, seconds)

    def _beside(self, base: int, first_wait: int, gathered: set[int], reduced: set[int], times: dict[int, float]) -> None:
        """Adds collectives beside the blocks: the next one's gather, in a backward after the last one's reduction."""
        build, part, waits = self.build, self.part, [first_wait]
        for index, block in enumerate(self.blocks):
            begin, end = base + part.begins[block], base + part.ends[block]
            for op in waits:
                build.edge(op, begin)
            if block in gathered and self.rows[block].keeping == EACH_PASS:
                build.edge(waits[-1], end, int(self.rows[block].weight_bytes))
            waits, after = [], [begin]
            behind, ahead = self._around(index)
            if behind in reduced:
                waits.append(self._reduce(behind, base, times[block]))
                build.edge(waits[-1], end)  # torch keeps one gradient that is being reduced
                after = [begin, waits[-1]]
            if ahead in gathered:
                waits.append(self._gather(ahead, after, times[block]))
            if behind in reduced:
                self._copy(behind, waits if self.meets_copies else waits[:1], times[block])
            if self.kind != "F":
                self._hold_gradient(block, base)
        if self.kind != "F":
            if self.blocks[-1] in reduced:
                waits.append(self._reduce(self.blocks[-1], base))
                self._copy(self.blocks[-1], waits[-1:])
        build.waiting[self.device] += waits + self.copied

    def _reduce(self, block: int, base: int, times: float = 1.0) -> int:
        """Adds the reduction of a block's gradient as soon as the block is done."""
        row = self.rows[block]
        op = self.lane.reduce(self.place, block, row, self._when(block), [], times)
        self.build.edge(base + self.part.ends[block], op, int(row.buffer_bytes))
        return op

    def _copy(self, block: int, after: list[int], times: float = 1.0) -> None:
        """Adds the sum of its share over copies."""
        self.copied.append(self.lane.copy(self.place, block, self.rows[block], self._when(block), after, times))

    def _when(self, block: int) -> str:
        return str(self.microbatch) if self.rows[block].keeping != ONCE else ""

    def _hold_gradient(self, block: int, base: int) -> None:
        """Adds the unsharded gradient of a block, which grows while it runs, where it is not there all step long."""
        row, alone = self.rows[block], self.single and self.lane.lane.microbatches == 1
        if self.lane.released or row.keeping in (EACH_BACKWARD, EACH_PASS) or (row.keeping == ONCE and alone):
            rows, sizes = self._gradient(block, row.gradient_bytes)
            self.build.tensors(base + rows, sizes, np.full(len(rows), base + self.part.ends[block]))

    def _gradient(self, block: int, size_bytes: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns rows that make the gradient of a block, and the bytes that each makes."""
        rows, tensors, blocks = self.ops.gradients(self.kind)
        own = blocks == block
        rows, sizes = rows[own], self.ops.passed.tensor_bytes[tensors[own]].astype(np.float64)
        if sizes.sum() <= 0.0:
            return np.array([self.part.ends[block] - 1]), np.array([int(size_bytes)])
        return rows, np.rint(sizes * (size_bytes / sizes.sum())).astype(np.int64)

    def _buckets(self) -> list[tuple[int, float]]:
        """Returns the row at which each bucket of whole gradients is full, and its bytes; in the last pass of one stage."""
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

    def _send_buckets(self, base: int, buckets: list[tuple[int, float]]) -> None:
        for number, (row, size) in enumerate(buckets):
            key, name = ("bucket", self.place, number), f"bucket{number}@{self.device}"
            one = Exchange(key, name, self._bucket_s(size), [("replicate", self.place)], "B")
            self.build.waiting[self.device].append(self.build.exchange(self.device, one, [base + row]))
