"""Both environments: determinism, masks, rewards, endings, and policies of stable-baselines3."""

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C

import rlplace
from rlplace.agents.network import HEURISTIC
from rlplace.agents.policy import PlacerPolicy, UnmaskedPlacerPolicy
from rlplace.envs import PlacementEnv, RefinementEnv, SimulatedBackend, make_instance
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import fork_join, memory_tight_pair, two_device_chain

IDS = ("rlplace/Placement-v0", "rlplace/Refinement-v0")


def play(env, seed, choose):
    """Plays one episode; returns observations, rewards and the last info."""
    observation, _ = env.reset(seed=seed)
    seen, rewards = [observation], []
    while True:
        observation, reward, terminated, truncated, info = env.step(choose(env))
        assert not truncated
        seen.append(observation)
        rewards.append(reward)
        if terminated:
            return seen, rewards, info


def random_legal(seed):
    rng = np.random.default_rng(seed)
    return lambda env: rng.choice(np.flatnonzero(env.action_masks()))


@pytest.mark.parametrize("name", IDS)
def test_ids_work_with_and_without_the_module(name):
    assert name in gym.registry
    assert type(gym.make(f"rlplace:{name}").unwrapped) is type(gym.make(name).unwrapped)


def test_placement_reward_is_the_log_ratio_to_the_best_plan():
    problem = random_problem(5, num_groups=10, num_devices=2)
    env = PlacementEnv([problem])
    _, rewards, info = play(env, 0, random_legal(1))
    step = simulate(problem, info["device_of_group"]).step_time_s
    assert rewards[:-1] == [0.0] * 9
    assert rewards[-1] == pytest.approx(np.log(make_instance(problem).reference_step_time_s / step))


def test_placement_follows_the_depth_first_order():
    env = PlacementEnv([random_problem(2, num_groups=9, num_devices=2)])
    env.reset(seed=0)
    asked, done = [], False
    while not done:
        asked.append(env.current_group)
        done = env.step(int(np.flatnonzero(env.action_masks())[0]))[2]
    assert asked == env.instance.graph.depth_first_order.tolist()


def test_refinement_rewards_add_up_to_start_minus_best():
    problem = random_problem(3, num_groups=14, num_devices=3)
    env = RefinementEnv([problem], start="greedy", max_moves=40)
    env.reset(seed=0)
    start = simulate(problem, env.current_plan()).step_time_s
    _, rewards, info = play(
        env, 0, lambda e: np.random.default_rng(len(e.action_masks())).choice(np.flatnonzero(e.action_masks()[1:]) + 1)
    )
    assert sum(rewards) == pytest.approx(np.log(start / info["step_time_s"]))
    assert min(rewards) >= 0.0
    assert simulate(problem, info["device_of_group"]).step_time_s == info["step_time_s"]


def test_stop_keeps_the_best_classical_plan():
    problem = random_problem(4, num_groups=12, num_devices=3)
    env = RefinementEnv([problem])
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(0)
    assert terminated and reward == 0.0
    assert info["vs_best_baseline"] == pytest.approx(1.0)


def test_illegal_device_ends_with_the_infeasible_reward():
    env = PlacementEnv([random_problem(0, num_groups=6, num_devices=2)], max_devices=4)
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, True, False, False]
    _, reward, terminated, _, info = env.step(3)
    assert terminated and info["illegal"] and reward == pytest.approx(-5.0 - np.log(2.0))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)


def test_masks_keep_tight_memory_feasible():
    toy = memory_tight_pair()
    env = PlacementEnv([toy.problem])
    for seed in range(20):
        _, rewards, info = play(env, seed, random_legal(seed))
        assert info["feasible"], info
        assert rewards[-1] > -1


def test_mask_is_never_all_false_and_infeasible_problems_end_early():
    tight = random_problem(11, num_groups=10, num_devices=2, memory_factor=0.55)
    env = PlacementEnv([tight])
    for seed in range(10):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            mask = env.action_masks()
            assert mask.any()
            _, reward, terminated, _, info = env.step(int(np.flatnonzero(mask)[0]))
        if not info["feasible"]:
            assert reward <= -1.0


def test_toy_optimum_is_reached_by_the_best_of_all_actions():
    toy = fork_join(width=4, num_devices=2)
    env = PlacementEnv([toy.problem])
    best = min(play(env, seed, random_legal(seed))[2]["step_time_s"] for seed in range(200))
    assert best == pytest.approx(toy.optimal_step_s)


def test_bad_arguments_are_refused():
    problem = two_device_chain().problem
    with pytest.raises(InputError, match="observation must be"):
        PlacementEnv([problem], observation="graph")
    with pytest.raises(InputError, match="start must be"):
        RefinementEnv([problem], start="anywhere")
    env = RefinementEnv([problem])
    with pytest.raises(InputError, match=r"options\['problem'\]"):
        env.reset(options={"problem": 3})
    with pytest.raises(InputError, match=r"options\['plan'\]"):
        env.reset(options={"plan": [9] * problem.num_groups})


def test_rendering():
    problem = two_device_chain().problem
    env = RefinementEnv([problem], render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8 and picture.ndim == 3 and (picture != 255).any()
    text = PlacementEnv([problem], render_mode="ansi")
    text.reset(seed=0)
    assert f"{problem.num_groups} groups not placed" in text.render()


def test_measured_backend_takes_times_from_the_outside():
    from rlplace.envs import MeasuredBackend

    problem = random_problem(1, num_groups=8, num_devices=2)
    plans = []

    def measure(plan):
        plans.append(plan)
        if len(plans) == 1:
            raise MemoryError
        return 0.5

    backend = MeasuredBackend(measure)
    instance = make_instance(problem)
    assert not backend.evaluate(instance, instance.floor).feasible
    assert not backend.evaluate(instance, instance.floor).feasible and len(plans) == 1  # it is known
    other = (instance.floor + 1) % 2
    assert backend.evaluate(instance, other).step_time_s == backend.evaluate(instance, other).step_time_s == 0.5
    assert len(plans) == 2 and plans[0].problem == problem.fingerprint
    assert isinstance(backend, SimulatedBackend)
    assert rlplace.__version__


EXAMPLE = Path(__file__).parents[2] / "examples" / "other_algorithm.py"


@pytest.fixture(scope="module")
def instances():
    return [make_instance(random_problem(seed, num_groups=10, num_devices=3)) for seed in range(2)]


@pytest.mark.parametrize("env_class", [PlacementEnv, RefinementEnv])
def test_an_untrained_policy_is_the_heuristic(instances, env_class):
    env = env_class(instances)
    policies = [
        MaskablePPO(PlacerPolicy, env, policy_kwargs={"features": env.FEATURES}, seed=0).policy,
        A2C(UnmaskedPlacerPolicy, env, policy_kwargs={"features": env.FEATURES}, seed=0).policy,
    ]
    observation, _ = env.reset(seed=0)
    table = observation["candidates"].reshape(-1, len(env.FEATURES))
    weight = np.array([HEURISTIC.get(name, 0.0) for name in env.FEATURES])
    assert weight.any()
    real = observation["candidate_group"] >= 0
    scores = np.where(real, table @ weight, -np.inf)
    masks = env.action_masks()
    for policy in policies:
        probabilities = policy.get_distribution(policy.obs_to_tensor(observation)[0]).distribution.probs[0].detach().numpy()
        known = np.log(probabilities[real])
        np.testing.assert_allclose(known - known[0], scores[real] - scores[real][0], rtol=1e-3, atol=1e-3)
        masked = {"action_masks": masks} if isinstance(policy, PlacerPolicy) else {}
        assert masks[policy.predict(observation, deterministic=True, **masked)[0]]


@pytest.mark.slow
@pytest.mark.long
def test_the_example_runs():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["MaskablePPO", "TRPO", "PPO, SB3's policy", "agent"]
