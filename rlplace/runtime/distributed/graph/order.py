"""In which order the segments of a cut run: the order of the simulator, fixed before the step begins.

The segments become a small problem, the plan's schedule is simulated on it, and what starts first comes first. Every process
computes the same order, in which producers come before consumers, so each may follow it blindly: nobody can wait in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD, UPDATE, Device, Links, Problem
from rlplace.runtime.distributed.graph.cut import Cut
from rlplace.schedule import LIST
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


@dataclass(frozen=True, eq=False)
class Expected:
    """What a priced problem says about the groups of a plan.

    Axes: G groups, D devices of the plan.

    Attributes:
        forward_s, backward_s, update_s: float64 [G, D], for one micro-batch.
        links: Between the devices.
        devices: The devices.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    update_s: NDArray[np.float64]
    links: Links
    devices: tuple[Device, ...]


def expected_of(problem: Problem) -> Expected:
    """Adds up the times of a problem by group."""

    def total(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        times = np.zeros((problem.num_groups, problem.num_devices))
        np.add.at(times, problem.op_group[chosen], problem.time_s[chosen])
        return times

    phase = problem.op_phase
    return Expected(
        forward_s=total(phase == FORWARD),
        backward_s=total((phase != FORWARD) & (phase != UPDATE)),
        update_s=total(phase == UPDATE),
        links=problem.links,
        devices=problem.devices,
    )


def segment_seconds(cut: Cut, expected: Expected | None = None) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward of each segment.

    Without a priced problem as far as they matter for an order: what its ops read and write at 100 GB/s, and 5 microseconds for
    each; twice that backward.
    """
    graph, seconds = cut.graph, []
    for segment in cut.segments:
        if expected is not None:
            device = segment.placement.device
            shares = [(group, share) for group, share in segment.groups.items() if group >= 0]
            forward = sum(expected.forward_s[group, device] * share for group, share in shares)
            backward = sum(expected.backward_s[group, device] * share for group, share in shares)
            seconds.append((max(float(forward), 1e-9), max(float(backward), 1e-9)))
            continue
        total = 1e-6
        for name in segment.nodes:
            if name in graph.op_of_node:
                touched = [graph.layout[n.name].bytes for n in _with_inputs(cut, name) if n.name in graph.layout]
                total += 5e-6 + sum(touched) / 1e11
        seconds.append((total, 2 * total))
    return seconds


def _with_inputs(cut: Cut, name: str) -> list:  # type: ignore[type-arg]
    node = cut.graph.node(name)
    return [node, *node.all_input_nodes]


def step_order(
    cut: Cut, microbatches: int, schedule: str, *, training: bool = True, expected: Expected | None = None
) -> list[Step]:
    """The passes of one step over all devices of a replica, producers before consumers.

    The segments are simulated as a problem of one op for the forward of each and one for its backward: values go forward,
    their gradients back.

    Args:
        cut: The segments.
        microbatches: Number of them that this replica runs.
        schedule: One of `rlplace.schedule.FREE_SCHEDULES`.
        training: With the backward passes.
        expected: Times and links of the problem that was planned; None guesses from the sizes of values.
    """
    if microbatches == 0:
        return []
    seconds = segment_seconds(cut, expected)
    layout = cut.graph.layout
    count = len(cut.segments)
    gradient = [training and any(layout[name].requires_grad for name in s.makes) for s in cut.segments]
    backward = {number: count + rank for rank, number in enumerate(n for n in range(count) if gradient[n])}
    tensors = []
    for name, readers in cut.readers.items():
        maker = cut.maker[name]
        size = layout[name].bytes
        tensors.append(TensorSpec(maker, size, list(readers)))
        if layout[name].requires_grad and maker in backward:
            tensors += [TensorSpec(backward[reader], size, [backward[maker]]) for reader in readers if reader in backward]
    tensors += [TensorSpec(number, 0, [op]) for number, op in backward.items()]
    segment_of_op = [*range(count), *backward]
    placements = [segment.placement for segment in cut.segments]
    group_of = {placement: number for number, placement in enumerate(sorted(set(placements)))}
    devices = cut.num_devices if expected is None else max(cut.num_devices, len(expected.devices))
    problem = build_problem(
        "segments",
        time_s=[[seconds[number][op >= count]] * devices for op, number in enumerate(segment_of_op)],
        tensors=tensors,
        memory_bytes=[None] * devices,
        group=[group_of[placements[number]] for number in segment_of_op],
        phase=[FORWARD] * count + [BACKWARD] * len(backward),
        bandwidth_bytes_per_s=1e12,
        links=None if expected is None else expected.links,
    )
    timeline = simulate(
        problem,
        [placement.device for placement in group_of],
        microbatches=microbatches,
        schedule=schedule if training else LIST,
        stage_of_group=[placement.stage for placement in group_of],
    )
    first = np.lexsort((timeline.task_microbatch, timeline.task_op, timeline.start_s))
    return [
        Step(segment_of_op[timeline.task_op[task]], int(timeline.task_microbatch[task]), bool(timeline.task_op[task] >= count))
        for task in first.tolist()
    ]
