"""Timings of plans: the file, its checks, the figures drawn from it."""

import json

import pytest

from rlplace.cost.timings import PlaceTiming, PlanTiming, PlanTimings, rank_correlation
from rlplace.errors import InputError


def timings():
    place = PlaceTiming(0, "a", 0.06, 0.03, 0.0, 0.008, 812, 0.058, 790)
    bare = PlaceTiming(1, "b", 0.05, 0.04, 0.0, 0.008)
    plan = PlanTiming(
        "x", "f" * 64, "e" * 64, "heft", "stage_graph", "computed", (0.1, 0.2, 0.12, 0.11), (place, bare), 0.8, 0.12
    )
    return PlanTimings("hf:gpt2", {"torch": "2.13", "threads": 1}, (plan,))


def test_round_trip(tmp_path):
    path = tmp_path / "t.timings.json"
    timings().save(path)
    assert PlanTimings.load(path) == timings()


def test_figures():
    plan = timings().plans[0]
    assert plan.median_s == pytest.approx(0.115)
    assert plan.error == pytest.approx(0.12 / 0.115 - 1)
    assert 0 < plan.spread < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("plans"), "plans"),
        (lambda d: d.update(environment=[1]), "environment"),
        (lambda d: d["plans"][0].update(mode="guessed"), "mode"),
        (lambda d: d["plans"][0].update(step_s=[]), "step_s"),
        (lambda d: d["plans"][0].update(step_s=[0.0]), r"step_s\[0\]: expected a number above 0"),
        (lambda d: d["plans"][0].update(step_s=[float("1e400")]), "step_s|NaN|finite|number"),
        (lambda d: d["plans"][0].update(predicted_s=-1), "predicted_s"),
        (lambda d: d["plans"][0]["places"][0].update(rank=-1), "rank"),
    ],
)
def test_hostile_files(tmp_path, change, message):
    data = timings().to_dict()
    change(data)
    path = tmp_path / "t.timings.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        PlanTimings.load(path)


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    with pytest.raises(InputError, match="two pairs"):
        rank_correlation([1], [1])
    with pytest.raises(InputError, match="different values"):
        rank_correlation([1, 1], [1, 2])
