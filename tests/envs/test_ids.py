"""Every id: both checkers with warnings as errors, specs, vector entry points; the toy family and its optimum."""

import dataclasses
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import rlplace
from rlplace.agents.problems import ids
from rlplace.envs import EDGE_FEATURES, NODE_FEATURES, make_instance, toy
from rlplace.errors import InputError
from rlplace.placement import get_planner
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.measure.worlds import question

IDS = sorted(name for name in gym.registry if name.startswith("rlplace/"))
SPLIT = [name for name in IDS if name.count("-") == 2]


@pytest.fixture
def small_splits(monkeypatch):
    """Replaces the splits, which take minutes to make; tests/agents checks their contents."""
    bank = tuple(make_instance(random_problem(seed, num_groups=8 + seed, num_devices=2 + seed)) for seed in range(2))
    asked = []
    monkeypatch.setattr(ids, "instances_of", lambda split: asked.append(split) or bank)
    monkeypatch.setattr(ids, "strategy_questions", lambda split: asked.append(split) or (question(0), question(1)))
    return asked


def test_every_kind_has_every_split():
    kinds = {name.split("/")[1].split("-")[0] for name in SPLIT}
    assert {"Placement", "Refinement", "Strategy"} <= kinds
    for kind in kinds:
        assert {f"rlplace/{kind}-{split}-v0" for split in ids.SPLITS} <= set(SPLIT)


WHOLE = [(name, {"observation": "full"}) for name in ("rlplace/Placement-v0", "rlplace/Refinement-v0")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in IDS), *WHOLE])
def test_both_checkers_have_nothing_to_say(name, options, small_splits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(name, **options)
        check_env(env.unwrapped, skip_render_check=False)
        sb3_check_env(env, warn=True)
    assert env.spec.max_episode_steps >= 64
    if name in SPLIT:
        assert set(small_splits) == {name.split("-")[1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IDS if gym.registry[name].vector_entry_point])
def test_vector_entry_points_are_what_make_vec_takes(name, small_splits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs = gym.make_vec(name, num_envs=3)
    observation, _ = envs.reset(seed=0)
    assert envs.observation_space.contains(observation)
    for _ in range(4):
        observation, *_ = envs.step(np.argmax(envs.action_masks(), axis=1))
        assert envs.observation_space.contains(observation)
    assert envs.spec.id == name and envs.single_action_space == gym.make(name).action_space


def test_columns_of_the_full_observation_have_names():
    env = gym.make("rlplace/Placement-v0", observation="full").unwrapped
    observation, _ = env.reset(seed=0)
    groups = env.max_groups
    assert observation["nodes"].shape == (groups * len(NODE_FEATURES),)
    assert observation["edge_features"].shape == (8 * groups * len(EDGE_FEATURES),)
    work = observation["nodes"].reshape(groups, -1)[: env.instance.problem.num_groups, NODE_FEATURES.index("work")]
    np.testing.assert_allclose(work, env.instance.graph.mean_time_s / env.instance.ideal_s, rtol=1e-6)


def test_the_optimum_of_a_toy_is_one_that_a_slower_search_finds_too():
    problem = dataclasses.replace(toy.toy_problem(4))
    plan, best_s = toy.optimum(problem)
    assert simulate(problem, plan).feasible and simulate(problem, plan).step_time_s == best_s
    steps = []
    for number in range(problem.num_devices**problem.num_groups):
        devices = np.array(np.unravel_index(number, (problem.num_devices,) * problem.num_groups))
        line = simulate(problem, devices)
        steps.append(line.step_time_s if line.feasible else np.inf)
    assert min(steps) == best_s


def test_the_optimum_earns_nothing_less_and_passes_the_mark_which_heft_and_chance_do_not():
    env = gym.make("rlplace/Toy-v0").unwrapped
    mark = gym.spec("rlplace/Toy-v0").reward_threshold
    assert mark == toy.PASS_MARK
    rng, earned = np.random.default_rng(0), {"optimum": [], "chance": []}
    for number, instance in enumerate(env.instances):
        for player, rewards in earned.items():
            env.reset(seed=0, options={"problem": number})
            over = False
            while not over:
                legal = np.flatnonzero(env.action_masks())
                action = instance.floor[env.current_group] if player == "optimum" else rng.choice(legal)
                _, reward, over, _, _ = env.step(int(action))
            rewards.append(reward)
    assert earned["optimum"] == [0.0] * len(env.instances)
    assert np.mean(earned["chance"]) < mark
    steps = []
    for instance in env.instances:
        try:
            steps.append(get_planner("heft")(instance.problem).predicted.step_time_s / instance.reference_step_time_s)
        except rlplace.InfeasibleError:
            pass
    assert min(steps) >= 1.0 and -np.mean(np.log(steps)) < mark


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match="unknown split 'tests'"):
        ids.instances_of("tests")
