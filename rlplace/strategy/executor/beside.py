"""Unlike pipelines beside each other: each runs its own samples, then all sum the gradients of every block, and update.

The sum waits for the last pipeline's passes, and nothing runs beside it. It is an all-reduce among one device of each place
with the block (`meshes.tie_groups`), block after block; places without a common block sum at once. The two executors say what
each pipeline takes for itself; what they have in common stands here once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.errors import InputError
from rlplace.strategy.costs import BlockCosts, Floats
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.executor.evaluation import PARTS, Evaluation
from rlplace.strategy.executor.meshes import expert_share_degree, places_of, share_degree, tie_groups
from rlplace.strategy.executor.ties import tie_part
from rlplace.strategy.executor.traffic import Traffic, table_s


def side_by_side(draft: Draft, alone: Sequence[Evaluation], costs: BlockCosts, traffic: Traffic) -> Evaluation:
    """Step time and memory of all pipelines of a draft.

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
    return Evaluation(
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
    """Seconds in which pipelines sum the gradients of all blocks."""
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


def _exchanged(place: Place, costs: BlockCosts) -> Floats:
    """float64 [B], bytes of gradients of which a device of a place has the sum of its pipeline; a tied weight counts once."""
    held = costs.held(place.tensor, place.expert)
    dense = held.gradient_bytes - held.expert_bytes[1].astype(float)
    for tie in costs.ties:
        dense[list(tie.blocks[1:])] -= tie.gradient_bytes * tie_part(costs, tie.blocks, place)
    shares = dense / share_degree(place) + held.expert_bytes[1] / expert_share_degree(place)
    found: Floats = shares.clip(min=0.0) * held.gradient_item
    return found
