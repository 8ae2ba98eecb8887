"""`Evaluator`: step time and memory of drafts on a cluster, as search asks for them by the thousand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.strategy.costs import BlockCosts, Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor.beside import side_by_side
from rlplace.strategy.executor.evaluation import PARTS, Evaluation
from rlplace.strategy.executor.meshes import check_draft
from rlplace.strategy.executor.packing import NO_TIES, Frame, Packer
from rlplace.strategy.executor.traffic import Traffic

__all__ = ["Evaluation", "Evaluator"]


def warm_up() -> None:
    """Compiles the kernels of the block executor, or loads them: with empty arrays, so that nothing is evaluated."""
    from rlplace.strategy.executor.kernel import evaluate_packed, moved_s, place_blocks

    def empty(dimensions: int, kind: type = np.float64) -> Any:
        return np.empty((0,) * dimensions, dtype=kind)

    rows, whole, chosen = empty(3), empty(1, np.int64), np.frombuffer(b"", dtype=np.uint8)
    moved_s(empty(2), whole, rows, rows)
    place_blocks(empty(2), empty(1), empty(2), chosen, chosen, whole, empty(2), 0, 0)
    evaluate_packed(
        rows, empty(2), whole, empty(2), whole, empty(2, np.int64), empty(2, np.int32), whole, rows, whole, whole, empty(1),
        whole, whole, whole, chosen, chosen, empty(1), whole, whole, whole, empty(2), empty(1), empty(2), empty(2), empty(1),
        empty(1),
    )  # fmt: skip


class Evaluator:
    """The block executor for one model and cluster; it keeps what drafts have in common. One thread at a time.

    Args:
        costs: What blocks cost on the kinds of the cluster's devices.
        cluster: Where drafts run.

    Attributes:
        traffic: Times of communication on the cluster.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster) -> None:
        self.costs, self.cluster, self.traffic = costs, cluster, Traffic(cluster)
        self._packer = Packer(costs, cluster, self.traffic)

    def score(self, draft: Draft) -> tuple[float, float]:
        """Step time in seconds, and bytes over capacity; `evaluate` says more.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        if draft.beside:
            said = self.evaluate(draft)
            return said.step_time_s, said.over_bytes
        step, over = self._run(draft)[1][0].tolist()
        return step, over

    def evaluate(self, draft: Draft) -> Evaluation:
        """Step time and memory with everything that a search or a person asks about them; raises as `score` does."""
        if draft.beside:
            return side_by_side(draft, [self.evaluate(one) for one in draft.pipelines], self.costs, self.traffic)
        frame, (result, answers, used, on_host, stage_s) = self._run(draft)
        step, over = result.tolist()
        peaks, hosts = [0] * self.cluster.num_devices, [0.0] * (max(self.cluster.hosts) + 1)
        for size, devices in zip(used.ravel().tolist(), frame.devices, strict=True):
            for device in devices:
                peaks[device] = math.ceil(self.cluster.devices[device].reserved_bytes + size)
        for place, size in zip(draft.places, on_host.tolist(), strict=True):
            for device in place.devices:
                hosts[self.cluster.hosts[device]] += size
        work = answers[:, c.COMPUTE] + answers[:, c.TENSOR]
        busiest = int(work.argmax())
        stages = [stage for stage, place in enumerate(draft.place_of_stage) if place == busiest]
        busy = stage_s.tolist()
        return Evaluation(
            step_time_s=step,
            passes_s=float(answers[:, c.END].max()) if step < math.inf else step,
            feasible=over == 0.0 and step < math.inf,
            peak_memory_bytes=tuple(peaks),
            host_bytes=tuple(math.ceil(size) for size in hosts),
            over_bytes=over,
            parts=dict(zip(PARTS, _spent(answers[busiest], step), strict=True)),
            bottleneck=max(stages, key=lambda stage: busy[stage]),
            stage_busy_s=tuple(busy),
        )

    def parts_of_places(self, draft: Draft) -> Floats:
        """float64 [P, `PARTS`], where the step goes on every place of a draft of one pipeline; raises as `score` does."""
        _, (result, answers, *_) = self._run(draft)
        return np.array([_spent(answer, float(result[0])) for answer in answers])

    def _run(self, draft: Draft) -> tuple[Frame, tuple[Floats, ...]]:
        from rlplace.strategy.executor.kernel import evaluate_packed

        frame = self._packer.frame(draft)
        ties = self._packer.ties(frame, draft) if self.costs.ties else NO_TIES
        lanes, places = len(frame.microbatches), len(draft.places)
        room = np.zeros(2), np.zeros((places, c.ANSWER)), np.zeros((lanes, places)), np.zeros(places), np.zeros(draft.stages)
        done = evaluate_packed(
            self._packer.costed.rows, self.traffic.tables, frame.stage_place, frame.places, frame.microbatches, frame.row,
            frame.actions, frame.action_ptr, frame.ways, frame.way_ptr, frame.way_channels,
            frame.room_bytes, frame.room_count, frame.room_ptr, np.array(draft.bounds, dtype=np.int64),
            np.frombuffer(draft.recompute, dtype=np.uint8), np.frombuffer(draft.offload, dtype=np.uint8), ties.seconds,
            ties.ptr, ties.places, ties.block, ties.again_bytes,
            *room,
        )  # fmt: skip
        if not done:
            check_draft(draft, self.cluster, len(self.costs.names))
            raise InputError("draft: it cannot be packed")
        return frame, room


def _spent(answer: Floats, step_s: float) -> list[float]:
    """Seconds of a place by entry of `PARTS`; what is left of the step is the bubble."""
    spent = [*answer[: c.END].tolist(), 0.0, float(answer[c.UPDATE_S])]
    spent[PARTS.index("bubble")] = max(0.0, step_s - sum(spent))
    return spent
