"""Small problems with known optima; random ones of any size come from `rlplace.problem.generate`.

A toy states its optimum in its docstring, with the argument that proves it, and returns it beside the problem, so that a
planner, an environment or the simulator can be tested against a number that did not come out of rlplace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlplace.problem.check import COLLECTIVE
from rlplace.problem.generate import random_problem
from rlplace.problem.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, Collective, Device, Links, Problem

__all__ = [
    "TOYS",
    "TensorSpec",
    "Toy",
    "build_problem",
    "fork_join",
    "memory_tight_chain",
    "memory_tight_pair",
    "pipeline_chain",
    "random_problem",
    "two_branches",
    "two_device_chain",
    "unlike_pair",
]


class Toy(NamedTuple):
    """A problem, its smallest step time among feasible plans, and one plan that reaches it."""

    problem: Problem
    optimal_step_s: float
    optimal_device_of_group: list[int]


class TensorSpec(NamedTuple):
    """One tensor of `build_problem`; `producer` is an op number, or None for a parameter of the group `owner`."""

    producer: int | None
    size_bytes: int
    consumers: Sequence[int]
    owner: int | None = None


def build_problem(
    name: str,
    *,
    time_s: Sequence[Sequence[float]],
    tensors: Sequence[TensorSpec],
    memory_bytes: Sequence[int | None],
    group: Sequence[int] | None = None,
    resident_bytes: Sequence[int] | None = None,
    temporary_bytes: Sequence[int] | None = None,
    phase: Sequence[int] | None = None,
    bandwidth_bytes_per_s: float | Sequence[Sequence[float]] = 1.0,
    latency_s: float | Sequence[Sequence[float]] = 0.0,
    links: Links | None = None,
    group_device: Sequence[int] | None = None,
    collectives: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
) -> Problem:
    """Builds a problem from plain lists.

    Args:
        name: The problem's name.
        time_s: Per op its seconds on each device, NaN where it cannot run.
        tensors: The tensors.
        memory_bytes: Per device, None for no limit.
        group: Group of each op; default one group per op.
        resident_bytes: Per group, default 0.
        temporary_bytes: Per op, default 0.
        phase: Per op, default forward.
        bandwidth_bytes_per_s: One number for every pair, or a matrix.
        latency_s: Likewise.
        links: Replaces the two above, with channels.
        group_device: Per group the only device it may sit on, -1 where it is free (the default).
        collectives: Per collective its ops and its channels.
    """
    ops, devices = len(time_s), len(memory_bytes)
    op_group = np.arange(ops) if group is None else np.asarray(group)
    groups = int(op_group.max()) + 1 if resident_bytes is None else len(resident_bytes)
    if links is None:
        bandwidth = np.broadcast_to(np.asarray(bandwidth_bytes_per_s, dtype=np.float64), (devices, devices)).copy()
        latency = np.broadcast_to(np.asarray(latency_s, dtype=np.float64), (devices, devices)).copy()
        links = Links(bandwidth, latency)
    unknown = np.full(groups, -1, dtype=np.int64)
    members = {op for took, _ in collectives for op in took}
    return Problem(
        name=name,
        samples_per_microbatch=1,
        devices=tuple(Device(f"gpu{i}", limit) for i, limit in enumerate(memory_bytes)),
        links=links,
        group_names=tuple(f"group{i}" for i in range(groups)),
        resident_bytes=np.array([0] * groups if resident_bytes is None else resident_bytes, dtype=np.int64),
        weight_bytes=unknown,
        gradient_bytes=unknown.copy(),
        optimizer_bytes=unknown.copy(),
        group_device=np.array([-1] * groups if group_device is None else group_device, dtype=np.int32),
        op_names=tuple(f"op{i}" for i in range(ops)),
        op_group=op_group.astype(np.int32),
        op_phase=np.array([FORWARD] * ops if phase is None else phase, dtype=np.int8),
        time_s=np.array(time_s, dtype=np.float64).reshape(ops, devices),
        temporary_bytes=np.array([0] * ops if temporary_bytes is None else temporary_bytes, dtype=np.int64),
        tensor_producer=np.array([-1 if t.producer is None else t.producer for t in tensors], dtype=np.int32),
        tensor_owner=np.array([-1 if t.owner is None else t.owner for t in tensors], dtype=np.int32),
        tensor_bytes=np.array([t.size_bytes for t in tensors], dtype=np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(t.consumers) for t in tensors])]).astype(np.int64),
        consumers=np.array([op for t in tensors for op in t.consumers], dtype=np.int32),
        op_kind=tuple(COLLECTIVE if op in members else "" for op in range(ops)) if members else None,
        collectives=tuple(Collective(tuple(took), tuple(held)) for took, held in collectives),
    )


def pipeline_chain(
    stages: int,
    num_devices: int,
    *,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
    split: bool = False,
    activation_bytes: int = 1,
    latency_s: float = 0.0,
) -> Problem:
    """A chain of equal stages, one group each, whose activations live from a stage's forward to its backward.

    What stages send each other has no bytes, so that memory counts activations alone. `rlplace.simulator.theory` has the step
    times and activations of pipeline schedules on it.

    Args:
        stages: Length of the chain.
        num_devices: Devices, without memory limits.
        forward_s: Of every stage; so are `input_s` and `weight_s`, the two parts of its backward.
        input_s: See `forward_s`.
        weight_s: See `forward_s`.
        split: Whether the weight gradients are an op of their own.
        activation_bytes: What a forward keeps for its backward.
        latency_s: Of every link.
    """
    phases = [FORWARD, BACKWARD, BACKWARD_WEIGHT][: 2 + split]
    seconds = [forward_s, input_s, weight_s] if split else [forward_s, input_s + weight_s]
    first = [stages * k for k in range(len(phases))]  # the op of stage i and phase k is first[k] + i
    tensors = []
    for i in range(stages):
        tensors.append(TensorSpec(i, activation_bytes, [k + i for k in first[1:]]))
        if i + 1 < stages:
            tensors.append(TensorSpec(i, 0, [i + 1]))
        readers = [first[1] + i - 1] if i else []
        readers += [first[2] + i] if split else []
        if readers:
            tensors.append(TensorSpec(first[1] + i, 0, readers))
    return build_problem(
        f"pipeline_{stages}",
        time_s=[[second] * num_devices for second in seconds for _ in range(stages)],
        tensors=tensors,
        memory_bytes=[None] * num_devices,
        group=list(range(stages)) * len(phases),
        phase=[phase for phase in phases for _ in range(stages)],
        bandwidth_bytes_per_s=1e9,
        latency_s=latency_s,
    )


def two_device_chain(length: int = 6) -> Toy:
    """A chain on two equal devices without a memory limit: splitting it only adds transfers.

    Optimum: every op on one device, ``length`` seconds. A chain has no parallelism, so its ops take ``length`` seconds
    anywhere, and each cut adds a transfer of at least a second.
    """
    problem = build_problem(
        "two_device_chain",
        time_s=[[1.0, 1.0]] * length,
        tensors=[TensorSpec(i, 1, [i + 1]) for i in range(length - 1)],
        memory_bytes=[None, None],
        latency_s=1.0,
    )
    return Toy(problem, float(length), [0] * length)


def memory_tight_chain() -> Toy:
    """A chain of six ops with 10 resident bytes each; a device holds 40 bytes, so at least one cut is needed.

    Tensors have 5, 4, 1, 4, 5 bytes at 1 byte per second. Optimum: the cut in the middle, 6 + 1 = 7 seconds. No device holds
    more than three groups beside the activations that move (four would leave no byte for any), so both have three; the
    middle tensor is the smallest, and any other split of three and three cuts more of the chain.
    """
    sizes = [5, 4, 1, 4, 5]
    problem = build_problem(
        "memory_tight_chain",
        time_s=[[1.0, 1.0]] * 6,
        tensors=[TensorSpec(i, size, [i + 1]) for i, size in enumerate(sizes)],
        memory_bytes=[40, 40],
        resident_bytes=[10] * 6,
    )
    return Toy(problem, 7.0, [0, 0, 0, 1, 1, 1])


def fork_join(width: int = 8, num_devices: int = 4) -> Toy:
    """A source, `width` equal branches and a sink, with transfers that cost nothing.

    Optimum: ceil(width / num_devices) + 2 seconds. Source and sink take a second each and no branch overlaps them; between
    them some device runs at least ceil(width / num_devices) branches of a second; dealing the branches out in turn reaches
    that.
    """
    sink = width + 1
    tensors = [TensorSpec(0, 0, list(range(1, sink)))] + [TensorSpec(i, 0, [sink]) for i in range(1, sink)]
    problem = build_problem(
        "fork_join",
        time_s=[[1.0] * num_devices] * (width + 2),
        tensors=tensors,
        memory_bytes=[None] * num_devices,
    )
    return Toy(problem, float(-(-width // num_devices) + 2), [0, *(i % num_devices for i in range(width)), 0])


def memory_tight_pair() -> Toy:
    """Two groups of 6 bytes and devices of 10: they must part, although together they would be quicker.

    Optimum: 1 + 3 + 1 = 5 seconds (op, transfer of 3 bytes at 1 byte per second, op). Both on one device would take 2 seconds
    and need at least 12 bytes. Apart, each device peaks at 9 bytes.
    """
    problem = build_problem(
        "memory_tight_pair",
        time_s=[[1.0, 1.0]] * 2,
        tensors=[TensorSpec(0, 3, [1])],
        memory_bytes=[10, 10],
        resident_bytes=[6, 6],
    )
    return Toy(problem, 5.0, [0, 1])


def unlike_pair() -> Toy:
    """A slow and a quick device, three independent ops that take 6 seconds on the one and 3 on the other.

    Optimum: one op on the slow device, two on the quick one, 6 seconds. With k ops on the slow device the step takes
    max(6 k, 3 (3 - k)) seconds: 9, 6, 12 and 18.
    """
    problem = build_problem("unlike_pair", time_s=[[6.0, 3.0]] * 3, tensors=[], memory_bytes=[None, None])
    return Toy(problem, 6.0, [0, 1, 1])


def two_branches() -> Toy:
    """Two chains of three ops that meet in a last op; between devices a tensor takes half a second.

    Optimum: a device for each chain, 3 + 0.5 + 1 = 4.5 seconds. Suppose the last op started before 3.5 seconds. No chain ends
    before 3 seconds, so neither end can have been sent: both ran on the last op's device. A chain that crosses between
    devices ends at 3.5 seconds or later, so neither crosses: all six ops ran on that device, which takes 6 seconds.
    """
    tensors = [TensorSpec(op, 1, [following]) for op, following in ((0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6))]
    problem = build_problem(
        "two_branches",
        time_s=[[1.0, 1.0]] * 7,
        tensors=tensors,
        memory_bytes=[None, None],
        bandwidth_bytes_per_s=2.0,
    )
    return Toy(problem, 4.5, [0, 0, 0, 1, 1, 1, 0])


TOYS: dict[str, Callable[[], Toy]] = {
    toy.__name__: toy for toy in (two_device_chain, memory_tight_chain, fork_join, memory_tight_pair, unlike_pair, two_branches)
}
"""Every toy by name, each callable without arguments."""
