"""The bounded residual of a curve, as the shipped table is fitted with."""

import numpy as np

from benchmarks.fit_residual import choose_residual, fit_residual, sizes_of
from rlplace.cost.curve import kernel_seconds, work_seconds
from rlplace.cost.fit import OpTiming, fit_op_curve
from rlplace.cost.table import Curve

DEVICE = {"peak_flops": 2e13, "bandwidth_bytes_per_s": 2e12}
TRUE = Curve(0.85, 2e9, 0.7, 2e6, floor_s=8e-6, saturation=0.5)


def timings(count, *, noise=0.0, seed=0, factor=lambda dims: 1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(4, 13)) for _ in range(3))
        dims = {"batch": 1, "m": m, "n": n, "k": k}
        flops, size = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
        work = float(work_seconds(TRUE, flops, size, **DEVICE)) * factor(dims)
        rows.append(OpTiming(flops, size, (TRUE.floor_s + work) * float(np.exp(noise * rng.normal())), dims=dims))
    return rows


def mape(curve, rows):
    work = kernel_seconds(
        curve, [r.flops for r in rows], [r.size_bytes for r in rows], sizes_of(rows), processors=100, **DEVICE
    )
    return float(np.abs((curve.floor_s + work) / np.array([r.seconds for r in rows]) - 1).mean())


def narrow(dims):
    """Products with a narrow output are slower."""
    return 1.0 + 1.5 / (1.0 + min(dims["m"], dims["n"]) / 64)


def test_a_residual_learns_what_the_curve_cannot():
    rows, unseen = timings(300, factor=narrow, noise=0.02), timings(100, factor=narrow, seed=1)
    curve = fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)
    better = choose_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert mape(curve, unseen) > 0.09
    assert mape(better, unseen) < 0.05
    again = choose_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert again == better  # nothing random in it


def test_no_residual_where_it_would_learn_noise():
    rows = timings(60, noise=0.05)
    curve = fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)
    assert choose_residual(curve, rows, op="gemm", processors=100, **DEVICE).residual is None
    assert choose_residual(curve, rows[:8], op="gemm", processors=100, **DEVICE) is curve
    assert fit_residual(curve, rows, op="elementwise", processors=100, **DEVICE) is curve
