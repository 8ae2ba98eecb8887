"""Curves are fitted to timings: of ops, with a bounded residual, and of collectives."""

import dataclasses

import msgspec
import numpy as np
import pytest

from rlplace.cluster.fabric import Fabric, check_fabrics, joined_curve
from rlplace.cluster.machines import fit_collective_curve
from rlplace.cost.curve import DIMS, Curve, kernel_seconds, work_seconds
from rlplace.errors import InputError
from rlplace.measure.fit import DEFAULT_PRIOR, OpTiming, fit_op_curve

DEVICE = {"peak_flops": 2e13, "bandwidth_bytes_per_s": 2e12}


def timings(curve, count, *, noise=0.0, seed=0, calls=1.0, factor=lambda dims: 1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(4, 13)) for _ in range(3))
        flops, size = 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)
        dims = {"batch": 1, "m": m, "n": n, "k": k}
        work = float(work_seconds(curve, flops, size, **DEVICE)) * factor(dims)
        seconds = calls * (curve.floor_s + curve.overhead_s + work) * float(np.exp(noise * rng.normal()))
        rows.append(OpTiming(calls * flops, calls * size, seconds, calls=calls, dims=dims))
    return rows


def mape(curve, rows):
    flops, size = (np.array([getattr(r, name) / r.calls for r in rows]) for name in ("flops", "size_bytes"))
    sizes = {name: np.array([float(r.dims.get(name, 1)) for r in rows]) for name in DIMS} | {"flops": flops, "bytes": size}
    work = kernel_seconds(curve, flops, size, sizes, processors=100, **DEVICE)
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


SIZES = np.geomspace(1e3, 1e9, 25)


def test_exact_pieces_are_found_again():
    true = joined_curve(4, 2e-5, [(0, 1e9), (1e5, 5e9), (1e8, 4e9)])
    found = fit_collective_curve(SIZES, true.seconds(SIZES), kind="all_reduce", group_size=4, breaks=(0, 1e5, 1e8))
    assert len(found.pieces) == 3
    for a, b in zip(found.pieces, true.pieces, strict=True):
        assert a.from_bytes == b.from_bytes
        assert a.latency_s == pytest.approx(b.latency_s, rel=1e-6)
        assert a.bus_bytes_per_s == pytest.approx(b.bus_bytes_per_s, rel=1e-6)


def test_relative_error_counts():
    """One straight line through times that bend: the small ones weigh as much as the large ones."""
    times = 1e-5 + SIZES / 1e9
    times[-1] *= 1.2
    curve = fit_collective_curve(SIZES, times, kind="broadcast", group_size=2)
    assert curve.pieces[0].latency_s == pytest.approx(1e-5, rel=0.05)
    assert np.abs(curve.seconds(SIZES) / times - 1).mean() < 0.05


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_makes_a_curve_fall(seed):
    rng = np.random.default_rng(seed)
    times = (1e-5 + SIZES / 1e10) * rng.lognormal(0, 0.8, len(SIZES))
    curve = fit_collective_curve(SIZES, times, kind="all_reduce", group_size=8, breaks=(0, 1e4, 1e6, 1e8))
    check_fabrics([Fabric(tuple(range(8)), (curve,))], 8)
    assert (np.diff(curve.seconds(np.geomspace(1, 1e12, 400))) >= 0).all()


def test_breaks_without_measurements_are_left_out():
    curve = fit_collective_curve([1e6, 2e6, 4e6], [1e-3, 2e-3, 4e-3], kind="broadcast", group_size=2, breaks=(0, 1e3, 1e9))
    assert [piece.from_bytes for piece in curve.pieces] == [0]
    assert curve.pieces[0].bus_bytes_per_s == pytest.approx(1e9)


def test_times_that_do_not_grow_still_make_a_curve():
    curve = fit_collective_curve([1e3, 1e6], [1e-3, 1e-3], kind="all_reduce", group_size=2)
    check_fabrics([Fabric((0, 1), (curve,))], 2)
    assert curve.seconds(1e6) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "sizes, times", [([1e6], [1e-3]), ([1e6, 1e6], [1e-3, 1e-3]), ([1e3, 1e6], [0, 1]), ([1, 2], [1, np.nan])]
)
def test_too_few_or_impossible_times_are_refused(sizes, times):
    with pytest.raises(InputError, match="cannot fit"):
        fit_collective_curve(sizes, times, kind="all_reduce", group_size=2)
