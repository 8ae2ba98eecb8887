"""Cluster-v0: both checkers with warnings as errors, rewards that add up, masks that hold."""

import math
import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_sb3
from worlds import pool, question

from rlplace.envs.cluster import ClusterEnv, Scenario
from rlplace.errors import InputError
from rlplace.measured.choose import LOST
from rlplace.measured.truths import Truth


def scenarios(count=4):
    found = [Scenario.of(pool(), Truth.drawn(question(), seed)) for seed in range(count)]
    return [scenario for scenario in found if math.isfinite(scenario.least_s)]


def test_both_checkers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(ClusterEnv(scenarios(), render_mode="ansi"), skip_render_check=True)
        check_sb3(ClusterEnv(scenarios()))


def test_rewards_add_up_to_what_was_won():
    env, rng = ClusterEnv(scenarios(), runs=6), np.random.default_rng(0)
    for episode in range(8):
        _, _ = env.reset(seed=episode)
        total, over, info = 0.0, False, {}
        while not over:
            action = int(rng.choice(np.flatnonzero(env.action_masks())))
            _, reward, over, cut, info = env.step(action)
            assert not cut
            total += reward
        costs = env.run_cost * info["runs"] + env.loss_cost * info["lost"]
        assert total == pytest.approx(LOST - math.log(info["over"]) - costs)
        assert info["over"] >= 1.0 - 1e-12


def test_nothing_runs_twice_and_nothing_stops_before_something_ran():
    env = ClusterEnv(scenarios(), runs=3)
    env.reset(seed=0)
    assert not env.action_masks()[-1]
    good = int(np.argmin(env.scenario.share))
    env.step(good)
    assert env.action_masks()[-1] and not env.action_masks()[good]
    _, reward, over, _, info = env.step(good)
    assert not over and info["runs"] == 1 and reward == -env.run_cost
    _, reward, over, _, _ = env.step(env.candidates)
    assert over and reward == 0.0


def test_what_fits_in_nobody_is_refused():
    scenario = scenarios()[0]
    full = Scenario(scenario.pool, scenario.step_s, scenario.share + 10.0)
    with pytest.raises(InputError, match="fits"):
        ClusterEnv([full])
    with pytest.raises(InputError, match="fits"):
        ClusterEnv([])
