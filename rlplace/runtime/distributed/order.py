"""In which order the segments of a cut run: the order of the simulator, fixed before the step begins.

The segments become a small problem, the plan's schedule is simulated on it, and what starts first comes first. Every process
computes the same order, in which producers come before consumers, so each may follow it blindly: nobody can wait in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.problem.toys import TensorSpec, build_problem
from rlplace.runtime.distributed.cut import Cut
from rlplace.simulator import simulate


@dataclass(frozen=True)
class Step:
    """One pass of a segment over one micro-batch.

    Attributes:
        segment: Number of the segment.
        microbatch: Number of the micro-batch in this replica's step, from 0.
        backward: Backward pass, else forward.
    """

    segment: int
    microbatch: int
    backward: bool


def segment_seconds(cut: Cut, seconds_of_op: Mapping[str, float] | None = None) -> list[float]:
    """Seconds that the forward of each segment takes, as far as they matter for an order.

    Without the times of a priced problem: what its ops read and write at 100 GB/s, and 5 microseconds for each.
    """
    graph, seconds = cut.graph, []
    for segment in cut.segments:
        total = 1e-6
        for name in segment.nodes:
            op = graph.op_of_node.get(name)
            if seconds_of_op is not None and op in seconds_of_op:
                total += seconds_of_op[op]
            elif op is not None:
                node = graph.node(name)
                touched = [graph.layout[n.name].bytes for n in (node, *node.all_input_nodes) if n.name in graph.layout]
                total += 5e-6 + sum(touched) / 1e11
        seconds.append(total)
    return seconds


def step_order(
    cut: Cut, microbatches: int, schedule: str, *, training: bool = True, seconds_of_op: Mapping[str, float] | None = None
) -> list[Step]:
    """The passes of one training step over all devices of a replica, producers before consumers.

    Args:
        cut: The segments.
        microbatches: Of this replica.
        schedule: ``"list"``, ``"gpipe"`` or ``"1f1b"``.
        training: With the backward passes.
        seconds_of_op: Forward times by op name, from the problem that was planned.
    """
    if microbatches == 0:
        return []
    seconds = segment_seconds(cut, seconds_of_op)
    count = len(cut.segments)
    gradient = [training and any(cut.graph.layout[name].requires_grad for name in s.makes) for s in cut.segments]
    backward = {number: count + rank for rank, number in enumerate(n for n in range(count) if gradient[n])}
    times = seconds + [2 * seconds[number] for number in backward]
    tensors = []
    for name, readers in cut.readers.items():
        maker = cut.maker[name]
        tensors.append(TensorSpec(maker, 1, list(readers)))
        if cut.graph.layout[name].requires_grad and maker in backward:
            tensors += [TensorSpec(backward[reader], 1, [backward[maker]]) for reader in readers if reader in backward]
    tensors += [TensorSpec(number, 0, [op]) for number, op in backward.items()]
    spots = [segment.spot for segment in cut.segments]
    places = cut.places
    op_spots = spots + [spots[number] for number in backward]
    group_of = {spot: number for number, spot in enumerate(sorted(set(spots)))}
    problem = build_problem(
        "segments",
        time_s=[[time] * places for time in times],
        tensors=tensors,
        memory_bytes=[None] * places,
        group=[group_of[spot] for spot in op_spots],
        phase=[FORWARD] * count + [BACKWARD] * len(backward),
        bandwidth_bytes_per_s=1e12,
    )
    timeline = simulate(
        problem,
        [spot.place for spot in group_of],
        microbatches=microbatches,
        schedule=schedule,
        stage_of_group=[spot.stage for spot in group_of],
    )
    segment_of_op = [*range(count), *backward]
    first = np.lexsort((timeline.task_microbatch, timeline.task_op, timeline.start_s))
    return [
        Step(segment_of_op[timeline.task_op[task]], int(timeline.task_microbatch[task]), bool(timeline.task_op[task] >= count))
        for task in first.tolist()
    ]
