"""Calibration by trials: known truths are found again, and what it does with little, wrong or disturbed data."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
from simulated_cluster import SimulatedCluster, random_plans

from rlplace.errors import InputError
from rlplace.measured.calibrate import fit_correction, predict
from rlplace.measured.correction import corrected, no_correction
from rlplace.planners import get_planner
from rlplace.problem.generate import random_problem

DEVICES, TRIALS, HELD_OUT = 3, 20, 30
CARDS = tuple(tuple(() if i == j else (i, DEVICES + j) for j in range(DEVICES)) for i in range(DEVICES))
"""Channels 0..2 send, 3..5 receive."""


def make_problem(seed=3, groups=14):
    problem = random_problem(seed, groups, DEVICES, comm_ratio=0.7)
    return dataclasses.replace(problem, links=dataclasses.replace(problem.links, channels=CARDS))


PROBLEM = make_problem()
BASE = get_planner("best")(PROBLEM).device_of_group


def ones(count, at, factor):
    values = np.ones(count)
    values[at] = factor
    return values


def change(**parts):
    return corrected(PROBLEM, dataclasses.replace(no_correction(PROBLEM), **parts))


def slow_pair():
    pair = np.ones((DEVICES, DEVICES))
    pair[0, 1] = 4.0
    return pair


def group_factors():
    rng = np.random.default_rng(9)
    groups = rng.normal(size=(PROBLEM.num_groups, 1)), rng.normal(size=(PROBLEM.num_groups, DEVICES))
    return np.exp(0.3 * groups[0] + 0.1 * groups[1])


TRUTHS = {
    "as believed": PROBLEM,
    "slow device": change(device_factor=ones(DEVICES, 2, 1.8)),
    "unlike devices": change(device_factor=np.array([1.3, 0.8, 1.6])),
    "slow channels": change(channel_slowdown=ones(2 * DEVICES, [2, 5], 3.0)),
    "slow pair": change(pair_slowdown=slow_pair()),
    "mispriced groups": change(group_factor=group_factors()),
    "ops are wrong by 7": change(device_factor=np.full(DEVICES, 7.0)),
    "all is wrong by 7": change(device_factor=np.full(DEVICES, 7.0), pair_slowdown=np.full((DEVICES, DEVICES), 7.0)),
    "device and channel": change(device_factor=ones(DEVICES, 1, 1.5), channel_slowdown=ones(2 * DEVICES, 0, 2.5)),
}


@functools.cache
def fit(name, *, trials=TRIALS, seed=0, busy=True, noise=0.02):
    """The fit, and the mean relative errors on plans that it has not seen: before and after."""
    plans = random_plans(PROBLEM, trials + HELD_OUT, seed=seed, around=BASE)
    cluster = SimulatedCluster(TRUTHS[name], noise=noise, seed=seed)
    found = fit_correction(PROBLEM, [cluster.trial(PROBLEM, p, busy=busy) for p in plans[:trials]])
    held_out = np.array(plans[trials:])
    true_s = np.array([cluster.true_s(plan) for plan in held_out])
    errors = [
        float(np.abs(predict(PROBLEM, correction, held_out) / true_s - 1.0).mean())
        for correction in (no_correction(PROBLEM), found.correction)
    ]
    return found, errors[0], errors[1]


SLOW = ("unlike devices", "device and channel", "ops are wrong by 7")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in TRUTHS if n != "as believed"]
)
def test_known_truths_are_found_again(name):
    found, before, after = fit(name)
    assert after < 0.5 * before and after < 0.07
    assert found.error_after < 0.5 * found.error_before
    assert len(found.predicted_s) == len(found.measured_s) == len(found.priced_s) == TRIALS


def transfer_ratio(correction):
    """float64 [D, D], what transfers of the tensors of mean size take over what was believed; 1 on the diagonal."""
    size = PROBLEM.tensor_bytes.mean()
    ratio = np.ones((DEVICES, DEVICES))
    links = corrected(PROBLEM, correction).links
    for i, j in zip(*np.nonzero(~np.eye(DEVICES, dtype=bool)), strict=True):
        ratio[i, j] = links.transfer_s(i, j, size) / PROBLEM.links.transfer_s(i, j, size)
    return ratio


def test_the_right_thing_is_blamed():
    device = fit("slow device")[0].correction
    assert device.device_factor == pytest.approx([1.0, 1.0, 1.8], rel=0.08)
    assert transfer_ratio(device) == pytest.approx(np.ones((DEVICES, DEVICES)), rel=0.25)
    channel = fit("slow channels")[0].correction
    assert channel.device_factor == pytest.approx(np.ones(DEVICES), rel=0.05)
    slow = transfer_ratio(channel)
    concerned = np.zeros((DEVICES, DEVICES), dtype=bool)
    concerned[2, :2] = concerned[:2, 2] = True
    assert slow[concerned].min() > 1.8 and np.median(slow[concerned]) == pytest.approx(3.0, rel=0.25)
    others = ~concerned & ~np.eye(DEVICES, dtype=bool)
    assert slow[others].max() < 0.9 * slow[concerned].min(), "links on which little depends are known less well"
    pair = transfer_ratio(fit("slow pair")[0].correction)
    assert pair[0, 1] == pair.max() > 2.5 and np.sort(pair.ravel())[-2] < 2.0


def test_mispriced_groups_are_told_apart():
    truth = group_factors()
    found = fit("mispriced groups", trials=50)[0].correction
    total = found.device_factor[None] * found.group_factor
    plans = np.array(random_plans(PROBLEM, 60, around=BASE))
    used = np.array([[(plans[:, g] == d).sum() >= 8 for d in range(DEVICES)] for g in range(PROBLEM.num_groups)])
    assert used.sum() > 20
    assert np.corrcoef(np.log(total[used]), np.log(truth[used]))[0, 1] > 0.6


def test_a_cost_model_that_is_right_stays():
    found, before, after = fit("as believed")
    assert before < 1e-9 and after < 0.02
    assert found.correction.device_factor == pytest.approx(np.ones(DEVICES), rel=0.03)
    assert found.correction.step_factor == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("steps", [1, 3], ids=lambda steps: f"{steps} of 3 steps")
def test_one_disturbed_trial_spoils_nothing(steps):
    plans = random_plans(PROBLEM, TRIALS + HELD_OUT, around=BASE)
    cluster = SimulatedCluster(TRUTHS["slow channels"])
    trials = [cluster.trial(PROBLEM, plan) for plan in plans[:TRIALS]]
    wrong = trials[TRIALS // 2]
    slow = tuple(10.0 * step if number < steps else step for number, step in enumerate(wrong.step_s))
    trials[TRIALS // 2] = msgspec.structs.replace(wrong, step_s=slow)
    held_out = np.array(plans[TRIALS:])
    true_s = np.array([cluster.true_s(plan) for plan in held_out])
    error = np.abs(predict(PROBLEM, fit_correction(PROBLEM, trials).correction, held_out) / true_s - 1.0).mean()
    assert error < fit("slow channels")[2] + 0.02


def test_a_single_trial_works():
    cluster = SimulatedCluster(TRUTHS["slow device"], noise=0.0)
    for plan in (BASE, np.zeros(14, dtype=np.int32), np.full(14, 2, dtype=np.int32)):
        trial = cluster.trial(PROBLEM, plan, steps=1)
        found = fit_correction(PROBLEM, [trial])
        assert found.predicted_s == pytest.approx([trial.median_s], rel=0.05)
        unused = np.setdiff1d(np.arange(DEVICES), plan)
        factor = found.correction.device_factor
        assert np.isfinite(factor).all() and (factor > 0).all()
        if len(np.unique(plan)) > 1:
            assert factor[unused] == pytest.approx(1.0, rel=0.15)


def test_trials_without_busy_seconds_still_teach():
    _, before, after = fit("all is wrong by 7", busy=False)
    assert after < 0.5 * before


def test_failures_are_left_out_and_better_times_are_believed():
    cluster = SimulatedCluster(TRUTHS["slow device"])
    trials = [cluster.trial(PROBLEM, plan) for plan in random_plans(PROBLEM, 3, around=BASE)]
    failed = [msgspec.structs.replace(trial, status="crashed", step_s=(), places=()) for trial in trials[:2]]
    found, plain = fit_correction(PROBLEM, [*failed, *trials]), fit_correction(PROBLEM, trials)
    assert np.array_equal(found.measured_s, plain.measured_s) and np.array_equal(found.predicted_s, plain.predicted_s)
    seconds = [cluster.true_s(trial.device_of_group) for trial in trials]
    assert fit_correction(PROBLEM, trials, seconds=seconds).measured_s.tolist() == seconds


def test_going_on_from_the_last_fit():
    plans = random_plans(PROBLEM, TRIALS, around=BASE)
    cluster = SimulatedCluster(TRUTHS["slow channels"])
    trials = [cluster.trial(PROBLEM, plan) for plan in plans]
    first = fit_correction(PROBLEM, trials[:-1])
    again = fit_correction(PROBLEM, trials, start=first)
    assert again.error_after < 1.2 * first.error_after + 0.005


def test_equal_trials_give_equal_fits():
    first, second = (vars(fit.__wrapped__("slow pair", trials=6)[0].correction) for _ in range(2))
    assert all(np.array_equal(value, second[name]) for name, value in first.items())


def test_nothing_to_learn_from():
    trial = SimulatedCluster(PROBLEM).trial(PROBLEM, BASE)
    for trials in ([], [msgspec.structs.replace(trial, status="crashed", step_s=(), places=())]):
        with pytest.raises(InputError, match="no trial has step times"):
            fit_correction(PROBLEM, trials)


def test_trials_of_another_problem():
    trial = SimulatedCluster(PROBLEM).trial(PROBLEM, BASE)
    with pytest.raises(InputError, match="another problem"):
        fit_correction(make_problem(seed=4), [trial])
