"""The algebra of replicas times width: identities, saturation, and the size of the published gains."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.planners.dlplacer.hybrid import (
    Workload,
    best_split,
    data_parallel_speedup,
    hybrid_gain,
    hybrid_speedup,
    hybrid_wins,
    model_speedup,
    required_speedup,
    scaling_efficiency,
)
from rlplace.planners.strategy.efficiency import BatchCurve

BATCH, SATURATION = 64, 32
FLAT_THEN_DOUBLING = BatchCurve(points=((BATCH, 5.0), (SATURATION * BATCH, 5.0), (2 * SATURATION * BATCH, 10.0)))
NEVER_RISES = BatchCurve(min_epochs=5.0, critical_batch=math.inf)


def test_efficiencies_are_ratios_of_step_times():
    assert scaling_efficiency(1.0, 1.25) == 0.8
    assert model_speedup(1.0, 0.8) == 1.25
    with pytest.raises(InputError, match="must be positive"):
        model_speedup(1.0, 0.0)


def test_data_parallelism_saturates_where_epochs_start_to_double():
    load = Workload(BATCH, FLAT_THEN_DOUBLING)
    for n in (1, 2, 16, SATURATION):
        assert data_parallel_speedup(load, n) == pytest.approx(n)
    for n in (2 * SATURATION, 4 * SATURATION, 16 * SATURATION):
        assert data_parallel_speedup(load, n) == pytest.approx(SATURATION)


@pytest.mark.parametrize("split", [1.05, 1.15, 1.22, 1.32, 1.9])
def test_at_saturation_the_hybrid_gain_is_exactly_the_model_speedup(split):
    load = Workload(BATCH, FLAT_THEN_DOUBLING)
    devices = 2 * SATURATION
    best = best_split(load, devices, {2: split})
    assert (best.replicas, best.width) == (SATURATION, 2)
    assert best.speedup / data_parallel_speedup(load, devices) == pytest.approx(split, rel=1e-12)
    assert hybrid_gain(load, devices, {2: split}) == pytest.approx(split - 1)
    # Below saturation the same width loses, at half of it by a factor of split / 2.
    early = best_split(load, SATURATION, {2: split})
    assert early.width == 1 and hybrid_gain(load, SATURATION, {2: split}) == 0.0
    assert hybrid_speedup(load, SATURATION // 2, split) / early.speedup == pytest.approx(split / 2)


@pytest.mark.parametrize("split", [1.01, 1.5, 1.99])
@pytest.mark.parametrize("devices", [2, 8, 1024])
def test_data_parallelism_wins_when_epochs_never_rise(split, devices):
    load = Workload(BATCH, NEVER_RISES)
    assert best_split(load, devices, {2: split}).width == 1
    assert not hybrid_wins(load, devices // 2, 2, split)
    assert required_speedup(load, devices // 2, 2) == pytest.approx(2.0)


@given(
    replicas=st.integers(1, 300), width=st.integers(1, 8), split=st.floats(0.5, 8), critical=st.floats(10, 1e6),
    slope=st.floats(0, 0.1),
)  # fmt: skip
def test_the_condition_agrees_with_the_speedups(replicas, width, split, critical, slope):
    load = Workload(BATCH, BatchCurve(min_epochs=3.0, critical_batch=critical), lambda n: 1 / (1 + slope * (n - 1)))
    hybrid, pure = hybrid_speedup(load, replicas, split), data_parallel_speedup(load, replicas * width)
    if abs(hybrid - pure) > 1e-9 * pure:
        assert hybrid_wins(load, replicas, width, split) == (hybrid > pure)
    assert required_speedup(load, replicas, width) == pytest.approx(pure / hybrid * split)


def test_poor_scaling_favours_hybrid():
    poor = Workload(BATCH, NEVER_RISES, lambda n: 1.0 if n <= 4 else 0.5)
    assert best_split(poor, 8, {2: 1.3}).width == 2  # 4 x 2 at 5.2 against 8 x 1 at 4
    assert best_split(Workload(BATCH, NEVER_RISES), 8, {2: 1.3}).width == 1


def test_devices_stay_unused_where_a_larger_batch_only_costs():
    steep = Workload(BATCH, BatchCurve(points=((BATCH, 1.0), (4 * BATCH, 1.0), (8 * BATCH, 4.0))))
    assert best_split(steep, 8).replicas == 4
    forced = best_split(steep, 8, {2: 1.1, 3: 1.2}, use_all=True)
    assert (forced.replicas, forced.width, forced.devices) == (4, 2, 8)  # 3 does not divide 8


PUBLISHED = {  # two-device speed-up, published gain of the hybrid at scale
    "Inception-V3": (1.32, 0.265),
    "GNMT": (1.15, 0.08),
    "BigLSTM": (1.22, 0.22),
}


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("critical_in_devices", [4, 8, 16, 64])
@pytest.mark.parametrize("devices", [64, 256, 1024])
def test_gains_lie_between_nothing_and_the_model_speedup(model, critical_in_devices, devices):
    split, _ = PUBLISHED[model]
    load = Workload(BATCH, BatchCurve(min_epochs=4.0, critical_batch=critical_in_devices * BATCH))
    gain = hybrid_gain(load, devices, {2: split})
    assert 0.0 <= gain < split - 1.0
    # Hybrid wins from the point on where G / critical passes (2 - SU) / (SU - 1).
    assert (gain > 0) == (devices / critical_in_devices > (2 - split) / (split - 1))


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_gains_follow_from_a_fitted_curve(model):
    """Epochs fitted to a batch that doubles them at 8 devices' worth: within four points of the published gains."""
    split, published = PUBLISHED[model]
    batches = [BATCH * n for n in (1, 2, 4, 8, 16, 32)]
    curve = BatchCurve.fit(batches, [4.0 * (1 + b / (8 * BATCH)) for b in batches])
    gain = hybrid_gain(Workload(BATCH, curve), 256, {2: split})
    assert 0.0 < gain <= split - 1.0
    assert gain == pytest.approx(published, abs=0.04)


def test_bad_arguments():
    load = Workload(BATCH, NEVER_RISES)
    for call in (
        lambda: best_split(load, 0),
        lambda: best_split(load, 4, {0: 1.0}),
        lambda: hybrid_speedup(load, 0, 1.0),
        lambda: required_speedup(load, 1, 0),
        lambda: hybrid_speedup(load, 2, -1.0),
    ):
        with pytest.raises(InputError):
            call()
