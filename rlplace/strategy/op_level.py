"""Drafts that a search has chosen, simulated op by op: the figures that plans announce where so many ops are affordable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.simulator import simulate
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluation import Evaluation
from rlplace.strategy.expand import expand_draft, tasks_of
from rlplace.strategy.op_costs import OpCosts
from rlplace.strategy.traffic import Traffic
from rlplace.strategy.tries import Question, Tried

MOST_TASKS = 60_000
"""A draft of more ops and micro-batches keeps the figures of the block executor; so many take about a second."""

TRIES = 3
"""Drafts that fit op by op, of which the quickest is chosen."""


def evaluate_ops(
    draft: Draft, costs: OpCosts, cluster: Cluster, said: Evaluation, traffic: Traffic | None = None
) -> Evaluation:
    """What the op-level simulator says of a draft; parts and stages are those of the block executor.

    Args:
        draft: The draft.
        costs: What ops take.
        cluster: Where it runs.
        said: What the block executor says of it.
        traffic: Of the cluster, where it is known.
    """
    expanded = expand_draft(draft, costs, cluster, traffic)
    line = simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)
    step = math.inf if line.step_time_s is None else line.step_time_s
    peaks = [0] * cluster.num_devices
    for peak, devices in zip(line.peak_memory_bytes.tolist(), expanded.stands_for, strict=True):
        for device in devices:
            peaks[device] = peak + cluster.devices[device].reserved_bytes
    over = sum(
        max(0.0, peak - float(device.memory_bytes or math.inf)) for peak, device in zip(peaks, cluster.devices, strict=True)
    )
    return dataclasses.replace(
        said,
        step_time_s=step,
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(peaks),
        over_bytes=over,
        parts={name: seconds * (step / said.step_time_s) for name, seconds in said.parts.items()},
    )


def checked(question: Question, costs: OpCosts, ranked: Sequence[Tried]) -> list[tuple[Tried, Evaluation]]:
    """The first drafts of a ranking that fit op by op, the quickest first; none where the first one has too many ops.

    Args:
        question: What was asked.
        costs: Those of its executor, op by op.
        ranked: Drafts that fit block by block, the best first.

    Raises:
        InfeasibleError: None of them fits.
    """
    if not ranked or tasks_of(ranked[0].draft, costs) > MOST_TASKS:
        return []
    found: list[tuple[Tried, Evaluation]] = []
    cluster, traffic = question.cluster, Traffic(question.cluster)
    larger, short = 1.0, 0.0  # peaks of what did not fit, over those that the block executor says; and bytes that were missing
    for tried in ranked:
        if len(found) == TRIES or (found and tried.step_s > 1.05 * min(said.step_time_s for _, said in found)):
            break
        said = question.scores.evaluate(tried.draft)
        sizes = zip(said.peak_memory_bytes, cluster.devices, strict=True)
        if tasks_of(tried.draft, costs) > MOST_TASKS or any(larger * peak > (d.memory_bytes or math.inf) for peak, d in sizes):
            continue
        finer = evaluate_ops(tried.draft, costs, cluster, said, traffic)
        if finer.feasible:
            found.append((tried, finer))
        else:
            pairs = zip(finer.peak_memory_bytes, said.peak_memory_bytes, strict=True)
            larger = max(larger, *(peak / max(1, other) for peak, other in pairs))
            short = short or finer.over_bytes
    if not found:
        raise InfeasibleError(
            f"no strategy fits op by op: the nearest is {short / 1e9:.2f} GB over the devices' memory, though it fits block by "
            "block; use more or larger devices, a smaller batch, or a wider space",
            short_bytes=int(short),
        )
    return sorted(found, key=lambda pair: pair[1].step_time_s)
