"""Cluster-v0: rewards that add up, masks that hold."""

import math

import msgspec
import numpy as np
import pytest

from rlplace.envs.cluster import ClusterEnv, Scenario
from rlplace.errors import InputError
from rlplace.measure.belief import LOST
from rlplace.measure.session import run_of
from rlplace.measure.world import Truth
from tests.measure.worlds import pool, question


def scenarios(count=4):
    found = [Scenario.of(pool(), Truth.drawn(question(), seed)) for seed in range(count)]
    return [scenario for scenario in found if math.isfinite(scenario.least_s)]


@pytest.mark.slow
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


def test_a_plan_is_seen_as_the_graph_of_its_stages():
    scenario = scenarios(1)[0]
    env = ClusterEnv([scenario])
    observation, _ = env.reset(seed=0)
    shape = env.candidates + 1, env.stages
    place, stages = observation["place"].reshape(shape), observation["stages"].reshape(*shape, -1)
    for number, (draft, said) in enumerate(zip(scenario.pool.drafts, scenario.pool.steps, strict=True)):
        assert (place[number] >= 0).sum() == len(said.stage_busy_s) and place[number].max() + 1 == len(draft.places)
        named = dict(zip(env.STAGE_FEATURES, stages[number, : len(said.stage_busy_s)].T, strict=True))
        np.testing.assert_allclose(named["blocks"].sum(), 1.0, atol=1e-6)
        np.testing.assert_allclose(named["busy"] * said.step_time_s, said.stage_busy_s, rtol=1e-5)
    assert (place[len(scenario.pool.drafts) :] == -1).all()
    alike = observation["alike"].reshape(shape[0], shape[0])
    np.testing.assert_allclose(np.diag(alike)[: len(scenario.pool.drafts)], 1.0, atol=1e-5)
    np.testing.assert_array_equal(alike, alike.T)


def test_what_ran_is_seen_beside_what_is_believed():
    env = ClusterEnv(scenarios())
    env.reset(seed=0)
    good = int(np.argmin(env.scenario.share))
    observation, *_ = env.step(good)
    table = observation["candidates"].reshape(env.candidates + 1, len(env.FEATURES))
    named = dict(zip(env.FEATURES, table.T, strict=True))
    assert named["ran"].sum() == named["ran"][good] == 1.0
    assert named["took"][good] == pytest.approx(
        np.log(env.scenario.step_s[good]) - np.log(env.scenario.pool.by_model_s[good]), abs=0.05
    )


def test_a_log_of_real_runs_is_replayed():
    """Every strategy of a session takes what it took there, and what did not fit does not fit."""
    asked = question()
    names, truth, rng = asked.costs.names, Truth.drawn(question(), 2), np.random.default_rng(0)
    runs = []
    for draft, said in zip(pool().drafts[:6], pool().steps, strict=False):
        runs.append(run_of(draft, said, names, asked.cluster, **msgspec.structs.asdict(truth.run(draft, rng))))
    lost = run_of(pool().drafts[6], pool().steps[6], names, asked.cluster, status="out_of_memory")
    crashed = run_of(pool().drafts[7], pool().steps[7], names, asked.cluster, status="crashed")
    scenario = Scenario.replayed(asked, [*runs, lost, crashed])
    assert scenario.pool.drafts == pool().drafts[:7] and scenario.share[6] > 1
    assert scenario.least_s == min(run.median_s for run in runs if run.median_s)
    env = ClusterEnv([scenario], runs=3)
    env.reset(seed=0)
    *_, info = env.step(int(np.argmin(scenario.step_s)))
    assert info["over"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_reward_of_ones_own_counts_what_the_best_run_is_worth():
    env = ClusterEnv(reward=lambda step_s, least_s: -step_s / least_s, run_cost=0.0, loss_cost=0.0)
    env.reset(seed=0)
    first, second = np.flatnonzero(env.scenario.share <= 1.0)[:2]
    worth = [-float(env.scenario.step_s[number]) / env.scenario.least_s for number in (first, second)]
    assert env.step(int(first))[1] == pytest.approx(max(worth[0], -LOST) + LOST)
    assert env.step(int(second))[1] == pytest.approx(max(0.0, max(worth) - max(worth[0], -LOST)))
