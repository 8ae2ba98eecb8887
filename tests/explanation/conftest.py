"""Problems for tests of explanations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.problem import BACKWARD, FORWARD, UPDATE
from rlplace.problem.build import TensorSpec, build_problem


@pytest.fixture
def layers():
    """Builds a chain of training layers with activations that a backward reads, and optimizer state."""

    def build(count=4, *, devices=1, memory=None, inside=10, weight=4, samples=1):
        """Layer i: forward 1 s keeps `inside` bytes for its backward of 2 s, hands 1 byte on; update 0.5 s.

        Weights and gradients have `weight` bytes each, the optimizer twice that: 4 * weight resident bytes a layer.
        """
        forward, backward = list(range(count)), list(range(count, 2 * count))
        tensors = [TensorSpec(i, inside * samples, [backward[i]]) for i in range(count)]
        tensors += [TensorSpec(i, 1, [i + 1]) for i in range(count - 1)]
        tensors += [TensorSpec(count - 1, 0, [backward[-1]])]
        tensors += [TensorSpec(backward[i], 1, [backward[i - 1]]) for i in range(1, count)]
        tensors += [TensorSpec(backward[i], 0, [2 * count + i]) for i in range(count)]
        problem = build_problem(
            "layers",
            time_s=[[1.0] * devices] * count + [[2.0] * devices] * count + [[0.5] * devices] * count,
            tensors=tensors,
            memory_bytes=[memory] * devices,
            group=forward * 3,
            phase=[FORWARD] * count + [BACKWARD] * count + [UPDATE] * count,
            bandwidth_bytes_per_s=1e9,
        )
        part = np.full(count, weight, dtype=np.int64)
        return dataclasses.replace(
            problem,
            group_names=tuple(f"layer.{i}.body" for i in range(count)),
            samples_per_microbatch=samples,
            resident_bytes=4 * part,
            weight_bytes=part,
            gradient_bytes=part.copy(),
            optimizer_bytes=2 * part,
        )

    return build
