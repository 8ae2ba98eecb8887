"""Files of measurements and of plan timings: what is written is read back, and nothing else is taken."""

import copy
import json

import pytest

from rlplace.cost.timings import Measurement, PlaceTiming, PlanTiming, PlanTimings, rank_correlation
from rlplace.errors import InputError
from tests.hostile.seeds import DATA

FULL = Measurement.load(DATA / "mlp.measure.json")


def edited(**changes):
    data = copy.deepcopy(FULL.to_dict())
    for path, value in changes.items():
        *parents, last = path.split("__")
        item = data
        for part in parents:
            item = item[int(part) if part.isdigit() else part]
        if value is ...:
            del item[last]
        else:
            item[last] = value
    return data


def test_round_trip(tmp_path):
    FULL.save(tmp_path / "a.measure.json")
    assert Measurement.load(tmp_path / "a.measure.json") == FULL
    assert FULL.ops_s == pytest.approx(8 * 0.00138)
    assert FULL.control.drift == pytest.approx(17 / 16)


def test_what_is_not_known_is_left_out():
    data = FULL.to_dict()
    assert "power_limit_w" not in data["environment"] and not {"issue_s", "dims"} & set(data["ops"][1])


def test_a_disturbed_step_counts_by_processor_time():
    assert FULL.step.quiet_s == FULL.step.seconds
    lost = Measurement.from_dict(edited(step__undisturbed=3, step__busy_s=0.07))
    assert lost.step.quiet_s == 0.07 < lost.step.seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": "cold"}, "unknown cache 'cold'"),
        ({"control": ...}, "'control' is missing"),
        ({"ops__0__kind": "gem"}, "did you mean 'gemm'"),
        ({"ops__0__direction": "sideways"}, "unknown direction"),
        ({"ops__0__seconds": -1.0}, r"ops\[0\].seconds: expected a number in 0..1e\+06, found -1.0"),
        ({"ops__0__flops": 1e40}, "flops: expected a number"),
        ({"ops__0__count": 0}, "whole number from 1"),
        ({"ops__0__dims__m": -3}, "whole number"),
        ({"ops__0__target": ""}, "target: expected text that is not empty"),
        ({"step__p10_s": 0.0}, "step.p10_s: expected a number above 0"),
        ({"step__repeats": 0}, "whole number from 1"),
        ({"environment__threads": 0}, "whole number from 1"),
        ({"environment__details__x": []}, r"details\['x'\]: expected .*text.*, found \[\]"),
        ({"control__first_s": 0.0}, "control.first_s: expected a number above 0"),
    ],
)
def test_hostile_input_is_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        Measurement.from_dict(edited(**changes))
    assert "\n" not in str(caught.value)


def timings():
    place = PlaceTiming(0, "a", 0.06, 0.03, 0.0, 812, 0.058, 790)
    bare = PlaceTiming(1, "b", 0.05, 0.04, 0.0)
    plan = PlanTiming("x", "f" * 64, "e" * 64, "heft", "joint_graph", (0.1, 0.2, 0.12, 0.11), (place, bare), 0.8, 0.12)
    return PlanTimings("hf:gpt2", {"torch": "2.13", "threads": 1}, (plan,))


def test_timings_survive_a_file(tmp_path):
    path = tmp_path / "t.timings.json"
    timings().save(path)
    assert PlanTimings.load(path) == timings()


def test_figures_of_timings():
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
        (lambda d: d["plans"][0].update(peak_memory_bytes=[-1]), "peak_memory_bytes"),
        (lambda d: d["plans"][0].update(step_s=[]), "step_s"),
        (lambda d: d["plans"][0].update(step_s=[0.0]), r"step_s\[0\]: expected a number above 0"),
        (lambda d: d["plans"][0].update(step_s=[float("1e400")]), "step_s|NaN|finite|number"),
        (lambda d: d["plans"][0].update(predicted_s=-1), "predicted_s"),
        (lambda d: d["plans"][0]["places"][0].update(rank=-1), "rank"),
    ],
)
def test_hostile_timings(tmp_path, change, message):
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
