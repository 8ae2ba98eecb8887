"""The example of the paper's Figure 2: 17 ops of one second, 21 edges, two devices."""

from __future__ import annotations

from rlplace.problem import Problem
from rlplace.problem.build import TensorSpec, build_problem

NAMES = "ABCDEFGHIJKLMNOPQ"
EDGES = "AB1 AC1 AD1 BE1 BF1 CG1 CH1 EI3 FI1 GJ1 HJ1 JK1 DL1 IM2 KM1 LM1 MN1 MO1 NQ1 OP1 PQ1"
"""Producer, consumer, seconds of the transfer."""


def paper_example(num_devices: int = 2) -> Problem:
    """The problem; op i is called ``NAMES[i]`` in the paper and sits in a group of its own.

    One byte takes one second. The optimum is 13 s on two devices and 12 s on three (a constraint solver's proof); everything on
    one device takes 17 s, and the longest path with its transfers 18 s.
    """
    tensors = [TensorSpec(NAMES.index(edge[0]), int(edge[2]), [NAMES.index(edge[1])]) for edge in EDGES.split()]
    return build_problem(
        "pardnn_example",
        time_s=[[1.0] * num_devices for _ in NAMES],
        tensors=tensors,
        memory_bytes=[None] * num_devices,
    )
