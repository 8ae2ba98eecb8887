"""Racing: how often good plans are dropped, how soon bad ones, and what noise is estimated."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.measured.race import FIRST_NOISE, Race, lower_bound, pooled_noise, upper_bound

RACES = 1000


def run_race(rng, race, step_s, noise):
    """Steps of a plan until its race is over."""
    steps = []
    while not (steps and race.over(steps)):
        steps.append(step_s * math.exp(noise * rng.normal()))
    return steps


def races(ratio, *, noise=0.05, repeats=5, known_noise=None, seed=0):
    """Steps of candidates that are `ratio` as slow as the best plan, which was itself timed with noise."""
    rng = np.random.default_rng(seed)
    known = noise if known_noise is None else known_noise
    for _ in range(RACES):
        best = [math.exp(noise * rng.normal()) for _ in range(repeats)]
        race = Race(repeats=repeats, best_s=upper_bound(best, known), noise=known)
        yield race, run_race(rng, race, ratio, noise)


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.2])
@pytest.mark.parametrize("repeats", [3, 5, 8])
def test_a_plan_as_fast_as_the_best_is_rarely_dropped(noise, repeats):
    lost = sum(race.lost(steps) for race, steps in races(1.0, noise=noise, repeats=repeats))
    assert lost <= 0.01 * RACES
    faster = sum(race.lost(steps) for race, steps in races(0.95, noise=noise, repeats=repeats))
    assert faster <= lost or faster <= 0.002 * RACES


def test_a_slow_plan_is_dropped_early():
    for noise, share, steps in ((0.05, 0.85, 3.0), (0.02, 0.999, 1.2)):
        ended = [(race.lost(steps), len(steps)) for race, steps in races(1.2, noise=noise)]
        assert np.mean([lost for lost, _ in ended]) > share
        assert np.mean([count for _, count in ended]) < steps
    much = [(race.lost(steps), len(steps)) for race, steps in races(2.0)]
    assert all(lost for lost, _ in much) and all(count == 1 for _, count in much)


def test_the_quieter_the_cluster_the_smaller_the_difference_that_is_seen():
    seen = [np.mean([race.lost(steps) for race, steps in races(1.05, noise=noise)]) for noise in (0.005, 0.02, 0.1)]
    assert seen[0] > 0.99 > seen[1] > seen[2]


def test_bounds_hold_the_true_median():
    rng = np.random.default_rng(1)
    for count in (1, 2, 3, 5, 20):
        inside = 0
        for _ in range(RACES):
            steps = np.exp(0.05 * rng.normal(size=count)).tolist()
            inside += lower_bound(steps, 0.05) <= 1.0 <= upper_bound(steps, 0.05)
        assert inside >= 0.975 * RACES


def test_lower_bound_is_never_negative_and_bounds_narrow():
    assert lower_bound([1.0], 5.0) == 0.0
    widths = [upper_bound([2.0] * n, 0.1) - lower_bound([2.0] * n, 0.1) for n in (3, 6, 12, 100)]
    assert widths == sorted(widths, reverse=True) and widths[0] > 2 * widths[-1]


def test_without_a_best_plan_nothing_is_dropped():
    race = Race(repeats=4)
    steps = []
    while not race.over(steps):
        steps.append(1e6)
        assert not race.lost(steps)
    assert len(steps) == 4
    assert not Race(best_s=1e-9).lost([])


def test_one_disturbed_step_does_not_drop_a_plan_that_has_good_ones():
    race = Race(repeats=5, best_s=1.05, noise=0.02)
    assert race.lost([10.0]), "a single step that is ten times too slow cannot be told from a bad plan"
    assert not race.lost([1.0, 10.0, 1.0])


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("steps", [3, 5, 10])
def test_pooled_noise_is_about_right(noise, steps):
    rng = np.random.default_rng(3)
    timed = [(rng.uniform(0.01, 10.0) * np.exp(noise * rng.normal(size=steps))).tolist() for _ in range(200)]
    assert 0.6 * noise < pooled_noise(timed) < 1.4 * noise


def test_pooled_noise_ignores_disturbed_steps():
    rng = np.random.default_rng(4)
    timed = [np.exp(0.03 * rng.normal(size=5)).tolist() for _ in range(40)]
    clean = pooled_noise(timed)
    for steps in timed[::4]:
        steps[2] *= 50.0
    assert clean <= pooled_noise(timed) < 1.5 * clean


def test_pooled_noise_without_evidence():
    assert pooled_noise([]) == FIRST_NOISE
    assert pooled_noise([(), (1.0,), (1.0, 5.0)]) == FIRST_NOISE
    assert 0.0 < pooled_noise([(1.0,) * 5] * 10) <= 0.01, "steps that are all equal still leave some doubt"


@given(st.lists(st.lists(st.floats(1e-9, 1e9), max_size=8), max_size=8))
def test_pooled_noise_is_a_positive_number(timed):
    assert 0.0 < pooled_noise(timed) < math.inf


@pytest.mark.parametrize("repeats", [0, -3, 2.5, True, "5", None])
def test_numbers_of_steps_that_are_none(repeats):
    with pytest.raises(InputError, match="race"):
        Race(repeats=repeats)
