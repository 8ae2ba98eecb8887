import dataclasses

import msgspec
import numpy as np
import pytest

from rlplace.cost.curve import kernel_seconds, work_seconds
from rlplace.cost.fit import DEFAULT_PRIOR, OpTiming, fit_op_curve
from rlplace.cost.table import Curve
from rlplace.errors import InputError

DEVICE = {"peak_flops": 2e13, "bandwidth_bytes_per_s": 2e12}


def timings(curve, count, *, noise=0.0, seed=0, calls=1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(4, 13)) for _ in range(3))
        flops, size = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
        work = float(work_seconds(curve, flops, size, **DEVICE))
        seconds = calls * (curve.floor_s + curve.overhead_s + work) * float(np.exp(noise * rng.normal()))
        rows.append(OpTiming(calls * flops, calls * size, seconds, calls=calls))
    return rows


def mape(curve, rows):
    work = kernel_seconds(
        curve,
        [r.flops / r.calls for r in rows],
        [r.size_bytes / r.calls for r in rows],
        {},
        processors=100,
        **DEVICE,
    )
    found = np.array([r.calls for r in rows]) * (curve.floor_s + curve.overhead_s + work)
    return float(np.abs(found / np.array([r.seconds for r in rows]) - 1).mean())


TRUE = Curve(0.85, 2e9, 0.7, 2e6, floor_s=8e-6, saturation=0.5)


def test_known_coefficients_come_back():
    fitted = fit_op_curve(timings(TRUE, 200), basis="calibrated", source="test", **DEVICE)
    assert fitted.compute_efficiency == pytest.approx(0.85, rel=0.02)
    assert fitted.floor_s == pytest.approx(8e-6, rel=0.1)
    assert fitted.saturation == 0.5
    assert (fitted.basis, fitted.source, fitted.overhead_s) == ("calibrated", "test", 0.0)
    assert mape(fitted, timings(TRUE, 100, seed=1)) < 0.02


def test_a_given_floor_leaves_the_rest_as_measuring_overhead():
    slow = msgspec.structs.replace(TRUE, overhead_s=4e-5)
    fitted = fit_op_curve(timings(slow, 200), basis="fitted", source="test", floor_s=8e-6, **DEVICE)
    assert fitted.floor_s == 8e-6
    assert fitted.overhead_s == pytest.approx(4e-5, rel=0.1)
    assert mape(fitted, timings(slow, 100, seed=1)) < 0.02


def test_noise_and_outliers_hardly_move_it():
    rows = timings(TRUE, 60, noise=0.05)
    rows[3] = dataclasses.replace(rows[3], seconds=rows[3].seconds * 30)
    fitted = fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)
    assert mape(fitted, timings(TRUE, 100, seed=1)) < 0.06


def test_several_calls_share_the_work():
    rows = timings(TRUE, 100, calls=2.0)
    assert mape(fit_op_curve(rows, basis="calibrated", source="test", **DEVICE), rows) < 0.02


def test_what_the_rows_do_not_say_stays_at_the_prior():
    rows = [OpTiming(0.0, float(size), 5e-6 + size / 1.5e12) for size in (10**4, 10**6, 10**8, 10**9)]
    prior = msgspec.structs.replace(DEFAULT_PRIOR, compute_efficiency=0.33)
    fitted = fit_op_curve(rows, basis="calibrated", source="test", prior=prior, **DEVICE)
    assert fitted.compute_efficiency == pytest.approx(0.33, rel=1e-3)
    assert fitted.bandwidth_efficiency == pytest.approx(0.75, rel=0.05)


def test_one_row_is_enough_for_something():
    row = OpTiming(2e9, 1e6, 1e-3)
    fitted = fit_op_curve([row], basis="calibrated", source="test", **DEVICE)
    assert mape(fitted, [row]) < 0.1


@pytest.mark.parametrize(
    "rows", [[], [OpTiming(1.0, 1.0, 0.0)], [OpTiming(float("nan"), 1.0, 1.0)], [OpTiming(1.0, 1.0, 1.0, 0.0)]]
)
def test_rows_that_cannot_be_fitted(rows):
    with pytest.raises(InputError, match="fit_op_curve"):
        fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)


def test_a_known_overhead_is_not_fitted():
    slow = msgspec.structs.replace(TRUE, overhead_s=4e-5)
    fitted = fit_op_curve(timings(slow, 100), basis="fitted", source="test", floor_s=8e-6, overhead_s=1e-5, **DEVICE)
    assert (fitted.floor_s, fitted.overhead_s) == (8e-6, pytest.approx(1e-5))
    with pytest.raises(InputError, match="overhead_s"):
        fit_op_curve(timings(slow, 3), basis="fitted", source="test", floor_s=8e-6, overhead_s=float("nan"), **DEVICE)
