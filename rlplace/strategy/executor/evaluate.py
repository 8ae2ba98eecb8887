"""`DraftEvaluator`: step time and memory of drafts on a cluster, for a search that evaluates thousands.

Unlike pipelines beside each other: each runs its own samples, then all sum the gradients of every block, and update. The sum
waits for the last pipeline's passes, and nothing runs beside it. The devices of each place with a block divide it; those that
answer for the same part send theirs to each other, one device of each place (`meshes.tie_groups`), and then their sums to the
copies of their place, block after block. Places without a common block sum at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.strategy.costs import BlockCosts, Floats
from rlplace.strategy.drafts import Draft, Mesh, array_of
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor.meshes import check_draft, copy_groups, expert_share_degree, places_of, share_degree, tie_groups
from rlplace.strategy.executor.packing import NO_TIES, Frame, Packer
from rlplace.strategy.executor.traffic import ClusterTraffic, tie_part

PARTS = ("compute", "tensor", "gather", "exchange", "hand_over", "bubble", "update")
"""Parts of a step on its busiest place: ops; collectives inside blocks; exposed gathers of parameters; exposed exchange of
gradients, ties and slower compute meanwhile included; stage transfers, as far as the place waits for them; waiting for other
stages; updates."""

EXECUTOR = "blocks"
"""Value of `Prediction.simulator` for the block executor."""


def bytes_over(peak_bytes: Sequence[float], starting_bytes: Sequence[float], cluster: Cluster) -> float:
    """Returns bytes over capacity, summed over the devices and the hosts of a cluster."""
    room = np.array([device.memory_bytes or math.inf for device in cluster.devices])
    return float(np.maximum(np.array(peak_bytes) - room, 0.0).sum()) + cluster.host_over_bytes(starting_bytes)


def starting(draft: Draft, host_bytes: Sequence[float], costs: BlockCosts, cluster: Cluster) -> list[float]:
    """Returns bytes of each host while its processes start: what is offloaded, and one whole block a process, for weights are
    made or loaded one by one, and only then cut (`rlplace.deferred_weights`).
    """
    block, hosts = float(costs.held().weight_bytes.max()), np.array(cluster.hosts)
    processes = sum(np.bincount(hosts[array_of(place.devices)], minlength=len(host_bytes)) for place in draft.all_places)
    return (np.array(host_bytes) + block * processes).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class StepEvaluation:
    """Step time and memory of a draft.

    Attributes:
        step_time_s: Seconds of a step.
        passes_s: Seconds until all gradients are exchanged; updates follow.
        feasible: Whether it ends, and every device has room.
        peak_memory_bytes: For each device of the cluster, reserved bytes included; 0 for devices that are not in use.
        host_bytes: For each host number from 0, offloaded bytes in its memory.
        starting_bytes: For each host, bytes in its memory while its processes start (`starting`).
        over_bytes: Bytes over capacity, summed over devices and hosts.
        parts: Seconds by entry of `PARTS` on the place with most work; they add up to the step time. Of several pipelines it is
            a place of the slowest.
        bottleneck: The stage with most work on that place; stages of several pipelines count one after the other.
        stage_busy_s: For each stage its ops, collectives and exposed communication in a step, of the slowest lane.
        executor: Name of the executor: of blocks, or of ops.
    """

    step_time_s: float
    passes_s: float
    feasible: bool
    peak_memory_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    starting_bytes: tuple[int, ...]
    over_bytes: float
    parts: dict[str, float]
    bottleneck: int
    stage_busy_s: tuple[float, ...]
    executor: str = EXECUTOR


def side_by_side(draft: Draft, alone: Sequence[StepEvaluation], costs: BlockCosts, traffic: ClusterTraffic) -> StepEvaluation:
    """Returns step time and memory of a draft of several pipelines, from those of each pipeline alone.

    Raises:
        InputError: Two pipelines share a device.
    """
    if len(set(draft.devices)) < len(draft.devices):
        raise InputError("draft: two pipelines share a device; give every device to one of them")
    sum_s = _gradient_sum_s(draft.pipelines, costs, traffic)
    passes_s = max(one.passes_s for one in alone) + sum_s
    step_s = passes_s + max(one.step_time_s - one.passes_s for one in alone)
    last = max(range(len(alone)), key=lambda number: alone[number].passes_s)
    slowest, before = alone[last], sum(len(one.stage_busy_s) for one in alone[:last])
    parts = dict(slowest.parts)
    parts["exchange"] += sum_s
    parts["bubble"] += max(0.0, step_s - sum(parts.values()))
    host_bytes = tuple(sum(sizes) for sizes in zip(*(one.host_bytes for one in alone), strict=True))
    starting_bytes = tuple(sum(sizes) for sizes in zip(*(one.starting_bytes for one in alone), strict=True))
    cluster = traffic.cluster
    over_hosts = cluster.host_over_bytes(starting_bytes) - sum(cluster.host_over_bytes(one.starting_bytes) for one in alone)
    return StepEvaluation(
        step_time_s=step_s,
        passes_s=passes_s,
        feasible=all(one.feasible for one in alone) and not over_hosts,
        peak_memory_bytes=tuple(max(sizes) for sizes in zip(*(one.peak_memory_bytes for one in alone), strict=True)),
        host_bytes=host_bytes,
        starting_bytes=starting_bytes,
        over_bytes=sum(one.over_bytes for one in alone) + over_hosts,
        parts={name: parts[name] for name in PARTS},
        bottleneck=before + slowest.bottleneck,
        stage_busy_s=tuple(busy for one in alone for busy in one.stage_busy_s),
        executor=slowest.executor,
    )


def _gradient_sum_s(pipelines: Sequence[Draft], costs: BlockCosts, traffic: ClusterTraffic) -> float:
    """Returns seconds in which pipelines sum the gradients of all blocks."""
    parts = [[_exchanged_bytes(place, costs) for place in pipeline.places] for pipeline in pipelines]
    whole = _exchanged_bytes(Mesh((0,)), costs)
    spent: Counter[tuple[int, int]] = Counter()  # by pipeline and place
    for block in range(len(costs.names)):
        holders = [(number, places_of(pipeline, (block,))[0]) for number, pipeline in enumerate(pipelines)]
        places = [pipelines[number].places[place] for number, place in holders]
        groups = tie_groups(places)
        for (number, place), mesh in zip(holders, places, strict=True):
            copies = copy_groups(mesh)
            traded_s = traffic.exchanged_s(groups, float(whole[block]) / len(mesh.devices))
            given_s = traffic.exchanged_s(copies, float(parts[number][place][block]) / copies.size)
            spent[number, place] += traded_s + given_s  # type: ignore[assignment]
    return max(spent.values())


def _exchanged_bytes(place: Mesh, costs: BlockCosts) -> Floats:
    """Returns float64 [B], bytes of the summed gradients of a pipeline on a device of a place; a tied weight counts once."""
    held = costs.held(*place.state)
    dense = held.gradient_bytes - held.expert_bytes[1].astype(float)
    for tie in costs.ties:
        dense[list(tie.blocks[1:])] -= tie.gradient_bytes * tie_part(costs, tie.blocks, place)
    shares = dense / share_degree(place) + held.expert_bytes[1] / expert_share_degree(place)
    found: Floats = shares.clip(min=0.0) * held.gradient_item
    return found


def warm_up() -> None:
    """Compiles the kernels of the block executor, or loads them: with empty arrays, so that nothing is evaluated."""
    from rlplace.strategy.executor.kernel import evaluate_packed, moved_s, place_blocks

    whole, table, rows = np.empty(0, dtype=np.int64), np.empty((0, 0)), np.empty((0, 0, 0))
    frame = c.FrameArrays(
        whole, table, whole, np.empty((0, 0), dtype=np.int64), np.empty((0, 3), dtype=np.int32), whole, rows, whole, whole,
        np.empty(0), whole, whole,
    )  # fmt: skip
    chosen = c.BlockChoices(whole, *[np.frombuffer(b"", dtype=np.uint8)] * 2)
    moved_s(table, whole, rows, rows)
    place_blocks(c.LanePlace(table, np.empty(0), table, 0, 0), chosen, NO_TIES)
    evaluate_packed(rows, table, *map(tuple, (frame, chosen, NO_TIES, c.StepResult.of(0, 0, 0))))


class DraftEvaluator:
    """The block executor for one model and cluster; it caches what drafts share. One thread at a time.

    Args:
        costs: Costs of blocks on the kinds of the cluster's devices.
        cluster: Where drafts run.

    Attributes:
        traffic: Times of communication on the cluster.
        packer: Drafts in arrays, and blocks on places.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster) -> None:
        self.costs, self.cluster, self.traffic = costs, cluster, ClusterTraffic(cluster)
        self.packer = Packer(costs, cluster, self.traffic)
        self._host = np.array(cluster.hosts, dtype=np.int64)
        self._reserved = np.array([device.reserved_bytes for device in cluster.devices], dtype=np.float64)

    def score(self, draft: Draft) -> tuple[float, float]:
        """Returns step time in seconds, and bytes over capacity; `evaluate` returns more.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        if draft.beside:
            evaluation = self.evaluate(draft)
            return evaluation.step_time_s, evaluation.over_bytes
        result = self._run(draft)[1]
        step, over = result.step.tolist()
        if self.cluster.host_memory_bytes:
            over += self.cluster.host_over_bytes(self._hosts(draft, result.hosts)[1])
        return step, over

    def evaluate(self, draft: Draft) -> StepEvaluation:
        """Returns step time, memory and the parts of the step; raises as `score` does."""
        if draft.beside:
            return side_by_side(draft, [self.evaluate(one) for one in draft.pipelines], self.costs, self.traffic)
        frame, (result, answers, used, on_host, stage_s) = self._run(draft)
        step, over = result.tolist()
        peaks, (hosts, at_start) = np.zeros(self.cluster.num_devices, dtype=np.int64), self._hosts(draft, on_host)
        over += self.cluster.host_over_bytes(at_start)
        for size, devices in zip(used.ravel().tolist(), frame.devices, strict=True):
            peaks[devices] = np.ceil(self._reserved[devices] + size)
        busiest = int((answers[:, c.COMPUTE] + answers[:, c.TENSOR]).argmax())
        stages = [stage for stage, place in enumerate(draft.place_of_stage) if place == busiest]
        return StepEvaluation(
            step_time_s=step,
            passes_s=float(answers[:, c.END].max()) if step < math.inf else step,
            feasible=over == 0.0 and step < math.inf,
            peak_memory_bytes=tuple(peaks.tolist()),
            host_bytes=tuple(map(math.ceil, hosts)),
            starting_bytes=tuple(map(math.ceil, at_start)),
            over_bytes=over,
            parts=dict(zip(PARTS, _spent(answers[busiest], step), strict=True)),
            bottleneck=max(stages, key=lambda stage: stage_s[stage]),
            stage_busy_s=tuple(stage_s.tolist()),
        )

    def left_bytes(self, draft: Draft) -> Floats:
        """Returns float64 [P], unused bytes of the fullest device of every place of one pipeline, below 0 where it is over."""
        frame, result = self._run(draft)
        arrays = frame.arrays
        least = np.minimum.reduceat(arrays.room_bytes, arrays.room_ptr[:-1]).reshape(result.used.shape)
        found: Floats = (least - result.used).min(axis=0)
        return found

    def _hosts(self, draft: Draft, on_host: Floats) -> tuple[list[float], list[float]]:
        """Returns bytes in the memory of each host, and while it starts, from float64 [P], those of a device of each place."""
        hosts = np.zeros(self._host.max() + 1)
        for place, size in zip(draft.places, on_host.tolist(), strict=True):
            hosts += size * np.bincount(self._host[array_of(place.devices)], minlength=len(hosts))
        return hosts.tolist(), starting(draft, hosts.tolist(), self.costs, self.cluster)

    def parts_of_places(self, draft: Draft) -> Floats:
        """Returns float64 [P, `PARTS`], parts of the step of one pipeline on every place; raises as `score` does."""
        result = self._run(draft)[1]
        return np.array([_spent(answer, float(result.step[0])) for answer in result.answers])

    def _run(self, draft: Draft) -> tuple[Frame, c.StepResult]:
        from rlplace.strategy.executor.kernel import evaluate_packed

        packer = self.packer
        frame = packer.frame(draft)
        records = frame.arrays, packer.choices(draft), packer.ties(frame, draft), frame.result
        if not evaluate_packed(packer.costed.rows, self.traffic.tables, *map(tuple, records)):
            check_draft(draft, self.cluster, len(self.costs.names))
            raise InputError("draft: it cannot be packed")
        return frame, frame.result


def _spent(answer: Floats, step_s: float) -> list[float]:
    """Returns seconds of a place by entry of `PARTS`; the rest of the step is the bubble."""
    spent = [*answer[: c.END].tolist(), 0.0, float(answer[c.UPDATE_S])]
    spent[PARTS.index("bubble")] = max(0.0, step_s - sum(spent))
    return spent
