"""Small problems with known optima.

A toy states its optimum in its docstring, with the argument that proves it, and returns it beside the problem, so that a
planner, an environment or the simulator can be tested against a number that did not come out of rlplace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import Problem


class Toy(NamedTuple):
    """A problem, its smallest step time among feasible plans, and one plan that reaches it."""

    problem: Problem
    optimal_step_s: float
    optimal_device_of_group: list[int]


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
        "fork_join", time_s=[[1.0] * num_devices] * (width + 2), tensors=tensors, memory_bytes=[None] * num_devices
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
        "two_branches", time_s=[[1.0, 1.0]] * 7, tensors=tensors, memory_bytes=[None, None], bandwidth_bytes_per_s=2.0
    )
    return Toy(problem, 4.5, [0, 0, 0, 1, 1, 1, 0])


def pardnn_example(num_devices: int = 2) -> Problem:
    """ParDNN's Figure 2: 17 ops of one second, named A to Q in order, 21 edges; every op is a group of its own.

    One byte takes one second. The optimum is 13 s on two devices and 12 s on three (a constraint solver's proof); everything on
    one device takes 17 s, and the longest path with its transfers 18 s.
    """
    edges = "AB1 AC1 AD1 BE1 BF1 CG1 CH1 EI3 FI1 GJ1 HJ1 JK1 DL1 IM2 KM1 LM1 MN1 MO1 NQ1 OP1 PQ1"  # from, to, seconds
    return build_problem(
        "pardnn_example",
        time_s=[[1.0] * num_devices] * 17,
        tensors=[TensorSpec(ord(a) - 65, int(cost), [ord(b) - 65]) for a, b, cost in edges.split()],
        memory_bytes=[None] * num_devices,
    )


TOYS: dict[str, Callable[[], Toy]] = {
    toy.__name__: toy for toy in (two_device_chain, memory_tight_chain, fork_join, memory_tight_pair, unlike_pair, two_branches)
}
"""Every toy by name, each callable without arguments."""
