"""`DraftEvaluator`: step time and memory of drafts on a cluster, as search asks for them by the thousand.

Unlike pipelines beside each other: each runs its own samples, then all sum the gradients of every block, and update.

The sum waits for the last pipeline's passes, and nothing runs beside it. It is an all-reduce among one device of each place
with the block (`meshes.tie_groups`), block after block; places without a common block sum at once. The two executors say what
each pipeline takes for itself; what they have in common stands here once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.strategy.costs import BlockCosts, Floats
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor.meshes import check_draft, expert_share_degree, places_of, share_degree, tie_groups
from rlplace.strategy.executor.packing import NO_TIES, Frame, Packer
from rlplace.strategy.executor.traffic import Traffic, table_s, tie_part

PARTS = ("compute", "tensor", "gather", "exchange", "hand_over", "bubble", "update")
"""Where the busiest place's step goes: ops; collectives inside blocks; waiting for parameters; waiting for gradients to be
exchanged, ties and compute slowed meanwhile included; waiting for what other stages send, as far as the way takes; waiting for
other stages; updates."""

EXECUTOR = "blocks"
"""Name of the block executor, who simulated a step, in predictions."""


def bytes_over(peak_bytes: Sequence[float], cluster: Cluster) -> float:
    """Returns bytes over capacity, summed over the devices of a cluster."""
    pairs = zip(peak_bytes, cluster.devices, strict=True)
    return sum(max(0.0, peak - float(device.memory_bytes or math.inf)) for peak, device in pairs)


@dataclass(frozen=True)
class StepEvaluation:
    """Step time and memory of a draft.

    Attributes:
        step_time_s: Seconds of a step.
        passes_s: Seconds until all gradients are exchanged; what follows are updates.
        feasible: Whether it ends, and every device has room.
        peak_memory_bytes: For each device of the cluster; 0 for those that the draft leaves out, else with what is reserved.
        host_bytes: For each host number from 0, what lives in its memory instead of on a device.
        over_bytes: Bytes over capacity, summed over devices.
        parts: Seconds by entry of `PARTS` on the place with most work; they add up to the step time. Of several pipelines it is
            a place of the slowest.
        bottleneck: The stage with most work on that place; stages of several pipelines count one after the other.
        stage_busy_s: For each stage its ops, collectives and exposed communication in a step, of the slowest lane.
        executor: Who says so: the block executor, or the op-level simulator.
    """

    step_time_s: float
    passes_s: float
    feasible: bool
    peak_memory_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    over_bytes: float
    parts: dict[str, float]
    bottleneck: int
    stage_busy_s: tuple[float, ...]
    executor: str = EXECUTOR


def side_by_side(draft: Draft, alone: Sequence[StepEvaluation], costs: BlockCosts, traffic: Traffic) -> StepEvaluation:
    """Returns step time and memory of all pipelines of a draft.

    Args:
        draft: Two or more pipelines.
        alone: What each of them takes.
        costs: Of the model.
        traffic: On the cluster.

    Raises:
        InputError: Two pipelines share a device.
    """
    if len(set(draft.devices)) < len(draft.devices):
        raise InputError("draft: two pipelines share a device; give every device to one of them")
    sum_s = gradient_sum_s(draft.pipelines, costs, traffic)
    passes_s = max(one.passes_s for one in alone) + sum_s
    step_s = passes_s + max(one.step_time_s - one.passes_s for one in alone)
    last = max(range(len(alone)), key=lambda number: alone[number].passes_s)
    slowest, before = alone[last], sum(len(one.stage_busy_s) for one in alone[:last])
    parts = dict(slowest.parts)
    parts["exchange"] += sum_s
    parts["bubble"] += max(0.0, step_s - sum(parts.values()))
    return StepEvaluation(
        step_time_s=step_s,
        passes_s=passes_s,
        feasible=all(one.feasible for one in alone),
        peak_memory_bytes=tuple(max(sizes) for sizes in zip(*(one.peak_memory_bytes for one in alone), strict=True)),
        host_bytes=tuple(sum(sizes) for sizes in zip(*(one.host_bytes for one in alone), strict=True)),
        over_bytes=sum(one.over_bytes for one in alone),
        parts={name: parts[name] for name in PARTS},
        bottleneck=before + slowest.bottleneck,
        stage_busy_s=tuple(busy for one in alone for busy in one.stage_busy_s),
        executor=slowest.executor,
    )


def gradient_sum_s(pipelines: Sequence[Draft], costs: BlockCosts, traffic: Traffic) -> float:
    """Returns seconds in which pipelines sum the gradients of all blocks."""
    bytes_of = [[_exchanged(place, costs) for place in pipeline.places] for pipeline in pipelines]
    spent: dict[tuple[int, int], float] = {}  # by pipeline and place
    for block in range(len(costs.names)):
        holders = [places_of(pipeline, (block,))[0] for pipeline in pipelines]
        size = max(float(rows[place][block]) for rows, place in zip(bytes_of, holders, strict=True))
        places = [pipeline.places[number] for pipeline, number in zip(pipelines, holders, strict=True)]
        seconds = table_s(traffic.table("all_reduce", tie_groups(places)), size)
        for holder in enumerate(holders):
            spent[holder] = spent.get(holder, 0.0) + seconds
    return max(spent.values())


def _exchanged(place: Mesh, costs: BlockCosts) -> Floats:
    """Returns float64 [B], bytes of gradients of which a device of a place has the sum of its pipeline; a tied weight counts
    once.
    """
    held = costs.held(place.tensor, place.expert)
    dense = held.gradient_bytes - held.expert_bytes[1].astype(float)
    for tie in costs.ties:
        dense[list(tie.blocks[1:])] -= tie.gradient_bytes * tie_part(costs, tie.blocks, place)
    shares = dense / share_degree(place) + held.expert_bytes[1] / expert_share_degree(place)
    found: Floats = shares.clip(min=0.0) * held.gradient_item
    return found


__all__ = ["StepEvaluation", "DraftEvaluator"]


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


class DraftEvaluator:
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
        """Returns step time in seconds, and bytes over capacity; `evaluate` says more.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        if draft.beside:
            said = self.evaluate(draft)
            return said.step_time_s, said.over_bytes
        step, over = self._run(draft)[1][0].tolist()
        return step, over

    def evaluate(self, draft: Draft) -> StepEvaluation:
        """Returns step time and memory with everything that a search or a person asks about them; raises as `score` does."""
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
        return StepEvaluation(
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
        """Returns float64 [P, `PARTS`], where the step goes on every place of a draft of one pipeline; raises as
        `score` does.
        """
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
    """Returns seconds of a place by entry of `PARTS`; what is left of the step is the bubble."""
    spent = [*answer[: c.END].tolist(), 0.0, float(answer[c.UPDATE_S])]
    spent[PARTS.index("bubble")] = max(0.0, step_s - sum(spent))
    return spent
