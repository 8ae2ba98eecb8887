"""Layer-wise pipelines: torchgpipe's bound, and the optimum by hand."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.placement.published.bipartition import block_partition, straight_pipelines
from rlplace.problem.build import TensorSpec, build_problem


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 6))
def test_block_partition_keeps_its_bound(costs, parts):
    cuts = block_partition(costs, parts)
    assert cuts[0] == 0 and cuts[-1] == len(costs) and len(cuts) == min(parts, len(costs)) + 1
    assert cuts == sorted(cuts)
    spread = max(costs) - min(costs)
    scaled = [(c - min(costs)) / spread if spread else 0.0 for c in costs]
    sums = [sum(scaled[a:b]) for a, b in itertools.pairwise(cuts)]
    assert max(sums) <= min(sums) + 1 + 1e-6


def test_the_exact_partition_is_among_them():
    """Layers of 9, 1, 1, 1, 9, 1 on three devices: 22 seconds of work, and a 9 must share a device with a 1: 10."""
    times = [9, 1, 1, 1, 9, 1]
    tensors = [TensorSpec(layer, 8, [layer + 1]) for layer in range(5)]
    problem = build_problem("chain", time_s=[[t] * 3 for t in times], tensors=tensors, memory_bytes=[None] * 3)
    assert min(np.bincount(found, weights=times, minlength=3).max() for found in straight_pipelines(problem)) == 10
