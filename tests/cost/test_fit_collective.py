import numpy as np
import pytest

from rlplace.cost.fit_collective import fit_collective_curve
from rlplace.errors import InputError
from rlplace.problem.fabric import Fabric, check_fabrics, joined_curve

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
