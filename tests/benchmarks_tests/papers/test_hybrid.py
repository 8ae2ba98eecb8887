"""The algebra of replicas times width: the condition, saturation, and devices that stay unused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.dlplacer.hybrid import Workload, best_split, hybrid_speedup, required_speedup
from rlplace.planners.strategy.efficiency import BatchCurve

BATCH, SATURATION = 64, 32
FLAT_THEN_DOUBLING = BatchCurve(points=((BATCH, 5.0), (SATURATION * BATCH, 5.0), (2 * SATURATION * BATCH, 10.0)))
NEVER_RISES = BatchCurve(min_epochs=5.0, critical_batch=math.inf)


@pytest.mark.parametrize("split", [1.05, 1.32, 1.9])
def test_at_saturation_the_hybrid_gain_is_exactly_the_model_speedup(split):
    load = Workload(BATCH, FLAT_THEN_DOUBLING)
    replicas, width, speedup = best_split(load, 2 * SATURATION, {2: split})
    assert (replicas, width) == (SATURATION, 2)
    assert speedup / hybrid_speedup(load, 2 * SATURATION) == pytest.approx(split, rel=1e-12)
    assert best_split(load, SATURATION, {2: split})[1] == 1  # below saturation the same width loses


@pytest.mark.parametrize("devices", [2, 8, 256])
def test_data_parallelism_wins_when_epochs_never_rise(devices):
    load = Workload(BATCH, NEVER_RISES)
    assert best_split(load, devices, {2: 1.99})[1] == 1
    assert required_speedup(load, devices // 2, 2) == pytest.approx(2.0)


@given(
    replicas=st.integers(1, 300), width=st.integers(1, 8), split=st.floats(0.5, 8), critical=st.floats(10, 1e6),
    slope=st.floats(0, 0.1),
)  # fmt: skip
def test_the_condition_agrees_with_the_speedups(replicas, width, split, critical, slope):
    load = Workload(BATCH, BatchCurve(min_epochs=3.0, critical_batch=critical), lambda n: 1 / (1 + slope * (n - 1)))
    hybrid, pure = hybrid_speedup(load, replicas, split), hybrid_speedup(load, replicas * width)
    assert required_speedup(load, replicas, width) == pytest.approx(pure / hybrid * split)


def test_devices_stay_unused_where_a_larger_batch_only_costs():
    steep = Workload(BATCH, BatchCurve(points=((BATCH, 1.0), (4 * BATCH, 1.0), (8 * BATCH, 4.0))))
    assert best_split(steep, 8, {})[:2] == (4, 1)
