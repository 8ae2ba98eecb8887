"""Hybrids of replicas and model parallelism: the algebra of the benchmark against time to a target computed step by step."""

import math

import pytest

from benchmarks.papers.hybrid import PAPER, batch_for, gain
from rlplace.strategy.search.efficiency import BatchCurve


def rate(curve, workers, speedup, batch=64):
    """Targets a second of so many workers, each so many times as fast as a device with `batch` samples a second."""
    global_batch = workers * batch
    return workers * speedup * batch / curve.epochs(global_batch)


@pytest.mark.parametrize("speedup", [said.speedup for said in PAPER.values()])
@pytest.mark.parametrize("devices", [2, 16, 128, 4096])
def test_gains_are_those_of_times_to_the_target(speedup, devices):
    curve = BatchCurve(min_epochs=7.0, critical_batch=1000.0)
    hybrid, parallel = rate(curve, devices // 2, speedup), rate(curve, devices, 1.0)
    assert gain(speedup, devices // 2 * 64 / 1000.0) == pytest.approx(hybrid / parallel - 1)


def test_the_limit_is_the_speedup_and_never_rising_epochs_leave_replicas_ahead():
    assert gain(1.32, 1e9) == pytest.approx(gain(1.32, math.inf)) == pytest.approx(0.32)
    assert gain(1.99, 0.0) == pytest.approx(-0.005)  # flat epochs: two replicas are twice as fast
    doubling = BatchCurve(points=((1, 1.0), (64, 1.0), (128, 2.0)))
    assert rate(doubling, 64, 1.32) / rate(doubling, 128, 1.0) == pytest.approx(1.32)


def test_the_batch_that_a_gain_needs():
    for said in PAPER.values():
        for wanted in (0.0, said.gain / 2, 0.9 * said.gain):
            assert gain(said.speedup, batch_for(said.speedup, wanted)) == pytest.approx(wanted)
    assert batch_for(1.22, 0.22) == math.inf  # BigLSTM's published gain is the limit itself
