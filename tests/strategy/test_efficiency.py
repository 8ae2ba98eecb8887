"""The curves of epochs that choose a batch."""

import json
import math

import pytest

from rlplace.errors import InputError
from rlplace.strategy.search.efficiency import BatchCurve

STEP = BatchCurve(points=((64, 10.0), (1024, 10.0), (2048, 20.0)))


def test_law_of_the_critical_batch():
    curve = BatchCurve(min_epochs=10.0, critical_batch=1000.0)
    assert curve.epochs(1000) == 20.0 and curve.epochs(500) == 15.0
    assert BatchCurve(min_epochs=10.0, critical_batch=math.inf).epochs(1e9) == 10.0


def test_the_inverse_law_is_the_same_law():
    updates, samples, size = 500.0, 2e6, 1e5
    curve = BatchCurve.from_updates(updates, samples, size)
    for batch in (1, 64, 4000, 10**6):
        assert curve.epochs(batch) == pytest.approx((updates + samples / batch) * batch / size)
    assert BatchCurve.from_updates(0, samples, size).epochs(10**6) == pytest.approx(20.0)


def test_points_are_met_exactly_and_joined_by_power_laws():
    for batch, epochs in STEP.points:
        assert STEP.epochs(batch) == epochs
    assert STEP.epochs(300) == pytest.approx(10.0)
    assert STEP.epochs(1024 * math.sqrt(2)) == pytest.approx(10.0 * math.sqrt(2))


def test_outside_the_points_epochs_never_shrink():
    assert STEP.epochs(1) == 10.0
    assert STEP.epochs(8192) == pytest.approx(80.0)  # the last slope goes on: twice the batch, twice the epochs
    assert BatchCurve(points=((64, 12.0), (128, 9.0))).epochs(1024) == 9.0
    assert BatchCurve(points=((64, 12.0),)).epochs(1024) == 12.0


def test_points_may_come_in_any_order():
    assert BatchCurve(points=((2048, 20.0), (64, 10.0), (1024, 10.0))) == STEP


@pytest.mark.parametrize(
    "curve",
    [STEP, BatchCurve(min_epochs=3.5, critical_batch=777.0, name="gnmt"), BatchCurve(min_epochs=3.5, critical_batch=math.inf)],
)
def test_files_come_back_as_they_were(tmp_path, curve):
    curve.save(tmp_path / "c.json")
    assert BatchCurve.load(tmp_path / "c.json") == curve


HEADER = {"format": "rlplace.batch_curve", "version": 1}


def write(tmp_path, data):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(HEADER | data))
    return path


def test_file_of_the_inverse_law(tmp_path):
    data = {"updates_floor": 500, "updates_samples": 2e6, "samples_per_epoch": 1e5}
    assert BatchCurve.load(write(tmp_path, data)) == BatchCurve.from_updates(500, 2e6, 1e5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give one form"),
        ({"points": [[1, 2]], "min_epochs": 1}, "give one form"),
        ({"min_epochs": 1}, "give one form"),
        ({"points": []}, r"points: expected a list of 1 or more, found \[\]"),
        ({"points": [[1, 2, 3]]}, r"points\[0\]: expected a list of 2 values, found \[1, 2, 3\]"),
        ({"points": [[0, 2]]}, r"points\[0\]\[0\]: expected a number in 1e-12..1e\+18, found 0"),
        ({"points": [[1, 2], [1, 3]]}, "once"),
        ({"min_epochs": -1, "critical_batch": 5}, "min_epochs: expected a number in 1e-12"),
        ({"min_epochs": None, "critical_batch": 5}, "min_epochs: expected a number"),
        ({"updates_floor": -3, "updates_samples": 5, "samples_per_epoch": 5}, "updates_floor: expected a number in 0"),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path, data, message):
    with pytest.raises(InputError, match=message) as raised:
        BatchCurve.load(write(tmp_path, data))
    assert "\n" not in str(raised.value) and "c.json" in str(raised.value)


def test_a_batch_must_be_a_positive_number():
    for batch in (0, -5, math.nan, math.inf, True):
        with pytest.raises(InputError):
            STEP.epochs(batch)
    with pytest.raises(InputError, match="either points"):
        BatchCurve()
    with pytest.raises(InputError, match="either points"):
        BatchCurve(points=((1, 1),), min_epochs=3, critical_batch=4)
