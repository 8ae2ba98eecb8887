import dataclasses

import numpy as np
import pytest

from rlplace.cost.curve import kernel_seconds, work_seconds
from rlplace.cost.fit import DEFAULT_PRIOR, OpTiming, fit_curve, levenberg_marquardt
from rlplace.cost.fit_residual import choose_residual, fit_residual, sizes_of
from rlplace.cost.table import Curve
from rlplace.errors import InputError

DEVICE = {"peak_flops": 2e13, "bandwidth_bytes_per_s": 2e12}


def timings(curve, count, *, noise=0.0, seed=0, factor=None, calls=1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(4, 13)) for _ in range(3))
        dims = {"batch": 1, "m": m, "n": n, "k": k}
        flops, size = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
        work = float(work_seconds(curve, flops, size, **DEVICE)) * (1.0 if factor is None else factor(dims))
        seconds = calls * (curve.floor_s + curve.overhead_s + work) * float(np.exp(noise * rng.normal()))
        rows.append(OpTiming(calls * flops, calls * size, seconds, calls=calls, dims=dims))
    return rows


def mape(curve, rows):
    work = kernel_seconds(
        curve,
        [r.flops / r.calls for r in rows],
        [r.size_bytes / r.calls for r in rows],
        sizes_of(rows),
        processors=100,
        **DEVICE,
    )
    found = np.array([r.calls for r in rows]) * (curve.floor_s + curve.overhead_s + work)
    return float(np.abs(found / np.array([r.seconds for r in rows]) - 1).mean())


TRUE = Curve(0.85, 2e9, 0.7, 2e6, floor_s=8e-6, saturation=0.5)


def test_known_coefficients_come_back():
    fitted = fit_curve(timings(TRUE, 200), basis="calibrated", source="test", **DEVICE)
    assert fitted.compute_efficiency == pytest.approx(0.85, rel=0.02)
    assert fitted.floor_s == pytest.approx(8e-6, rel=0.1)
    assert fitted.saturation == 0.5
    assert (fitted.basis, fitted.source, fitted.overhead_s) == ("calibrated", "test", 0.0)
    assert mape(fitted, timings(TRUE, 100, seed=1)) < 0.02


def test_a_given_floor_leaves_the_rest_as_measuring_overhead():
    slow = dataclasses.replace(TRUE, overhead_s=4e-5)
    fitted = fit_curve(timings(slow, 200), basis="fitted", source="test", floor_s=8e-6, **DEVICE)
    assert fitted.floor_s == 8e-6
    assert fitted.overhead_s == pytest.approx(4e-5, rel=0.1)
    assert mape(fitted, timings(slow, 100, seed=1)) < 0.02


def test_noise_and_outliers_hardly_move_it():
    rows = timings(TRUE, 60, noise=0.05)
    rows[3] = dataclasses.replace(rows[3], seconds=rows[3].seconds * 30)
    fitted = fit_curve(rows, basis="calibrated", source="test", **DEVICE)
    assert mape(fitted, timings(TRUE, 100, seed=1)) < 0.06


def test_several_calls_share_the_work():
    rows = timings(TRUE, 100, calls=2.0)
    assert mape(fit_curve(rows, basis="calibrated", source="test", **DEVICE), rows) < 0.02


def test_what_the_rows_do_not_say_stays_at_the_prior():
    rows = [OpTiming(0.0, float(size), 5e-6 + size / 1.5e12) for size in (10**4, 10**6, 10**8, 10**9)]
    prior = dataclasses.replace(DEFAULT_PRIOR, compute_efficiency=0.33)
    fitted = fit_curve(rows, basis="calibrated", source="test", prior=prior, **DEVICE)
    assert fitted.compute_efficiency == pytest.approx(0.33, rel=1e-3)
    assert fitted.bandwidth_efficiency == pytest.approx(0.75, rel=0.05)


def test_one_row_is_enough_for_something():
    row = OpTiming(2e9, 1e6, 1e-3)
    fitted = fit_curve([row], basis="calibrated", source="test", **DEVICE)
    assert mape(fitted, [row]) < 0.1


@pytest.mark.parametrize(
    "rows", [[], [OpTiming(1.0, 1.0, 0.0)], [OpTiming(float("nan"), 1.0, 1.0)], [OpTiming(1.0, 1.0, 1.0, 0.0)]]
)
def test_rows_that_cannot_be_fitted(rows):
    with pytest.raises(InputError, match="fit_curve"):
        fit_curve(rows, basis="calibrated", source="test", **DEVICE)


def test_a_known_overhead_is_not_fitted():
    slow = dataclasses.replace(TRUE, overhead_s=4e-5)
    fitted = fit_curve(timings(slow, 100), basis="fitted", source="test", floor_s=8e-6, overhead_s=1e-5, **DEVICE)
    assert (fitted.floor_s, fitted.overhead_s) == (8e-6, pytest.approx(1e-5))
    with pytest.raises(InputError, match="overhead_s"):
        fit_curve(timings(slow, 3), basis="fitted", source="test", floor_s=8e-6, overhead_s=float("nan"), **DEVICE)


def narrow(dims):
    """Products with a narrow output are slower."""
    return 1.0 + 1.5 / (1.0 + min(dims["m"], dims["n"]) / 64)


def test_a_residual_learns_what_the_curve_cannot():
    rows, unseen = timings(TRUE, 300, factor=narrow, noise=0.02), timings(TRUE, 100, factor=narrow, seed=1)
    curve = fit_curve(rows, basis="calibrated", source="test", **DEVICE)
    better = choose_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert mape(curve, unseen) > 0.09
    assert mape(better, unseen) < 0.05
    again = choose_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert again == better  # nothing random in it


def test_no_residual_where_it_would_learn_noise():
    rows = timings(TRUE, 60, noise=0.05)
    curve = fit_curve(rows, basis="calibrated", source="test", **DEVICE)
    assert choose_residual(curve, rows, op="gemm", processors=100, **DEVICE).residual is None
    assert choose_residual(curve, rows[:8], op="gemm", processors=100, **DEVICE) is curve
    assert fit_residual(curve, rows, op="elementwise", processors=100, **DEVICE) is curve


def test_least_squares_with_and_without_a_jacobian():
    x = np.linspace(0, 2, 50)

    def errors(p):
        return p[0] * np.exp(p[1] * x) - 3.0 * np.exp(-1.5 * x)

    def jacobian(p):
        return np.stack([np.exp(p[1] * x), p[0] * x * np.exp(p[1] * x)], axis=1)

    for given in (None, jacobian):
        values, cost = levenberg_marquardt(errors, np.array([1.0, 0.0]), jacobian=given)
        assert values == pytest.approx([3.0, -1.5], rel=1e-4)
        assert cost < 1e-9
