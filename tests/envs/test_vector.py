"""Vector environments against the single ones, bit for bit, in every autoreset mode; seeds, threads, stable-baselines3."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO

from rlplace.agents.policy import PlacerPolicy, PlacerVecEnv, UnmaskedPlacerPolicy
from rlplace.agents.problems.training import limit_memory
from rlplace.envs import MeasuredBackend, PlacementEnv, RefinementEnv, base, make_instance
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import memory_tight_chain

KINDS = {"Placement": PlacementEnv, "Refinement": RefinementEnv}


@pytest.fixture(scope="module")
def bank():
    """Problems of unlike sizes, some whose memory is so tight that episodes end early or are repaired."""
    problems = [random_problem(seed, num_groups=6 + 5 * seed, num_devices=2 + seed % 3) for seed in range(4)]
    tight = [limit_memory(problem, 1.02) for problem in problems[1:3]]
    return [make_instance(problem) for problem in (*problems, *tight, memory_tight_chain().problem)]


def vector(kind, count, **options):
    return gym.make_vec(f"rlplace/{kind}-v0", num_envs=count, vectorization_mode="vector_entry_point", **options)


def assert_same(a, b, path="info"):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key}]")
    elif isinstance(a, np.ndarray) and a.dtype == object:
        for one, other in zip(a, b, strict=True):
            assert (one is None) == (other is None), path
            if one is not None:
                assert_same(one, other, path)
    else:
        assert np.asarray(a).dtype == np.asarray(b).dtype, path
        np.testing.assert_array_equal(a, b, err_msg=path)


def actions_of(masks, rng):
    """Draws actions, mostly legal ones."""
    chosen = [rng.choice(np.flatnonzero(mask)) if rng.random() < 0.97 else rng.integers(len(mask)) for mask in masks]
    return np.array(chosen, dtype=np.int64)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)), mode=st.sampled_from(["NextStep", "SameStep"]), count=st.integers(1, 7),
    seed=st.integers(0, 2**31), observation=st.sampled_from(["indexed", "full"]),
    start=st.sampled_from(["best", "mixed", "greedy"]), keep=st.sampled_from(["always", "better"]),
    moves=st.sampled_from([3, 32]),
)  # fmt: skip
def test_equal_to_single_environments_bit_for_bit(bank, kind, mode, count, seed, observation, start, keep, moves):
    options = {"problems": bank, "observation": observation} | (
        {"start": start, "max_moves": 5, "keep": keep, "moves": moves} if kind == "Refinement" else {}
    )
    single = SyncVectorEnv([lambda: KINDS[kind](**options)] * count, autoreset_mode=mode)
    ours, rng = vector(kind, count, autoreset_mode=mode, **options), np.random.default_rng(seed)
    for one, other in zip(single.reset(seed=seed), ours.reset(seed=seed), strict=True):
        assert_same(one, other)
    for _ in range(25):
        masks = np.stack(single.call("action_masks"))
        np.testing.assert_array_equal(masks, ours.action_masks())
        actions = actions_of(masks, rng)
        for one, other in zip(single.step(actions), ours.step(actions), strict=True):
            assert_same(one, other)
    ours.close()


def test_plans_that_are_mended_are_the_same(bank):
    single, ours = SyncVectorEnv([lambda: PlacementEnv(bank)] * 8), vector("Placement", 8, problems=bank)
    rng, mended = np.random.default_rng(1), 0
    single.reset(seed=2), ours.reset(seed=2)
    for _ in range(60):
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in ours.action_masks()])
        want, found = single.step(actions), ours.step(actions)
        for one, other in zip(want, found, strict=True):
            assert_same(one, other)
        if found[2].any():
            mended += int(found[4]["repaired"].sum())
    assert mended > 3


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(bank, kind, monkeypatch):
    monkeypatch.setattr(base, "APART", 2)
    runs = []
    for threads in (1, 2, 3):
        envs, rng, seen = vector(kind, 9, problems=bank, threads=threads), np.random.default_rng(0), []
        seen.append(envs.reset(seed=4))
        for _ in range(20):
            seen.append(envs.step(actions_of(envs.action_masks(), rng)))
        envs.close()
        runs.append(seen)
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            for a, b in zip(one, two, strict=True):
                assert_same(a, b)


def test_a_reward_of_ones_own_and_a_limit_of_steps(bank):
    def reward(step_s, reference_s):
        return -step_s / reference_s

    options = {"problems": bank, "start": "greedy", "reward": reward}
    single = SyncVectorEnv([lambda: gym.wrappers.TimeLimit(RefinementEnv(**options), 3)] * 5)
    ours, rng = vector("Refinement", 5, max_episode_steps=3, **options), np.random.default_rng(2)
    single.reset(seed=1), ours.reset(seed=1)
    rewarded = truncated = 0
    for _ in range(30):
        actions = actions_of(ours.action_masks(), rng)
        want, found = single.step(actions), ours.step(actions)
        for one, other in zip(want, found, strict=True):
            assert_same(one, other)
        rewarded, truncated = rewarded + (found[1] > 0).sum(), truncated + found[3].sum()
    assert rewarded and truncated


def test_disabled_autoreset_and_a_mask_of_resets(bank):
    ours = vector("Refinement", 3, problems=bank, autoreset_mode="Disabled")
    assert ours.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    with pytest.raises(RuntimeError, match=r"\[0, 1, 2\] are over; call reset"):
        ours.step(np.zeros(3, dtype=np.int64))
    ours.reset(seed=0)
    ours.step(np.array([0, 1, 0]))
    with pytest.raises(RuntimeError, match=r"\[0, 2\] are over"):
        ours.step(np.ones(3, dtype=np.int64))
    _, infos = ours.reset(options={"reset_mask": np.array([True, False, True]), "problem": 2})
    assert infos["_problem"].tolist() == [True, False, True] and infos["problem"][[0, 2]].tolist() == [2, 2]
    ours.step(np.zeros(3, dtype=np.int64))


def test_seeds_are_those_of_single_environments(bank):
    ours = vector("Placement", 3, problems=bank)
    ours.reset(seed=[5, None, 7])
    again = vector("Placement", 3, problems=bank)
    again.reset(seed=5)
    assert ours.np_random_seed[0] == again.np_random_seed[0] == 5 and again.np_random_seed[2] == 7
    with pytest.raises(InputError, match="expected one number or 3, found 2"):
        ours.reset(seed=[1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": MeasuredBackend(lambda plan: 1.0)}, "vectorization_mode='sync'"),
        ({"num_envs": 0}, "num_envs and threads must be whole numbers"),
        ({"threads": 0}, "num_envs and threads must be whole numbers"),
        ({"problems": []}, "at least one problem"),
    ],
)
def test_what_it_cannot_do_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        gym.make_vec("rlplace/Placement-v0", vectorization_mode="vector_entry_point", **{"num_envs": 2, **options})


@pytest.mark.parametrize("actions", [np.array([0, 99]), np.zeros(3, dtype=np.int64), np.zeros(2), np.array([-1, 0])])
def test_wrong_actions_are_refused(bank, actions):
    ours = vector("Placement", 2, problems=bank)
    ours.reset(seed=0)
    with pytest.raises(InputError, match=r"actions must be whole numbers \[2\] in 0\.\."):
        ours.step(actions)


@pytest.mark.parametrize("kind", KINDS)
def test_stable_baselines3_trains_on_them(bank, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs = PlacerVecEnv(vector(kind, 6, problems=bank, autoreset_mode="SameStep"))
        features = {"features": KINDS[kind].FEATURES}
        model = MaskablePPO(PlacerPolicy, envs, n_steps=8, batch_size=48, seed=0, policy_kwargs=features)
        before = [parameter.detach().clone() for parameter in model.policy.parameters()]
        model.learn(96)
        assert any((a != b).any() for a, b in zip(before, model.policy.parameters(), strict=True))
        PPO(UnmaskedPlacerPolicy, envs, n_steps=8, batch_size=48, seed=0, policy_kwargs=features).learn(48)


def test_the_last_observation_and_info_of_an_episode_reach_stable_baselines3(bank):
    envs = PlacerVecEnv(vector("Refinement", 2, problems=bank, autoreset_mode="SameStep"))
    envs.seed(3)
    first = envs.reset()
    again = SyncVectorEnv([lambda: RefinementEnv(bank)] * 2)
    last, *_, info = again.reset(seed=3), again.step(np.zeros(2, dtype=np.int64))
    np.testing.assert_array_equal(first["candidates"], last[0]["candidates"])
    _, rewards, over, infos = envs.step(np.zeros(2, dtype=np.int64))
    assert over.all() and rewards.dtype == np.float32
    for e in range(2):
        assert infos[e]["feasible"] is True and infos[e]["TimeLimit.truncated"] is False
        assert infos[e]["step_time_s"] == info[-1]["step_time_s"][e]
        np.testing.assert_array_equal(infos[e]["terminal_observation"]["candidates"], info[0]["candidates"][e])


def test_only_vector_environments_that_begin_anew_in_the_same_step_are_wrapped(bank):
    for envs in (SyncVectorEnv([lambda: RefinementEnv(bank)]), vector("Refinement", 2, problems=bank), RefinementEnv(bank)):
        with pytest.raises(InputError, match="SameStep"):
            PlacerVecEnv(envs)


def test_the_last_info_says_what_devices_do(bank):
    env = PlacementEnv(bank)
    env.reset(seed=0, options={"problem": 2})
    over = False
    while not over:
        _, _, over, _, info = env.step(int(np.flatnonzero(env.action_masks())[0]))
    problem = bank[2].problem
    line = simulate(problem, info["device_of_group"][: problem.num_groups])
    used = problem.num_devices
    np.testing.assert_array_equal(info["compute_s"][:used], line.busy_s)
    np.testing.assert_array_equal(info["peak_memory_bytes"][:used], line.peak_memory_bytes)
    np.testing.assert_allclose(info["compute_s"] + info["idle_s"], [line.step_time_s] * used + [0.0] * (env.max_devices - used))
    sent = np.zeros(env.max_devices)
    np.add.at(sent, line.transfer_source, line.transfer_end_s - line.transfer_start_s)
    np.testing.assert_allclose(info["transfer_s"], sent)
