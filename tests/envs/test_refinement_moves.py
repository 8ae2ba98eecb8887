"""Refinement-v0: what its moves are, which are legal, what they cost, and that episodes can be repeated."""

import numpy as np
import pytest

from rlplace.envs import MeasuredBackend, PlacementEnv, RefinementEnv, SimulatedBackend, make_instance, refinement
from rlplace.envs.instance import score
from rlplace.errors import InputError
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

PINNED = RefinementEnv.FEATURES.index("pinned_target")


def table(observation):
    return observation["candidates"].reshape(-1, len(RefinementEnv.FEATURES))


def test_a_move_does_what_is_offered():
    env = RefinementEnv([random_problem(1, num_groups=20, num_devices=3)], start="greedy")
    env.reset(seed=0)
    for _ in range(10):
        before, choice = env.current_plan().copy(), int(np.flatnonzero(env.action_masks())[-1])
        groups, devices = (part.copy() for part in env.move(choice))
        observation, _, _, _, _ = env.step(choice)
        expected = before.copy()
        expected[groups] = devices
        assert (expected != before).sum() == len(groups) > 0
        np.testing.assert_array_equal(env.current_plan(), expected)
        np.testing.assert_array_equal(observation["device_of_group"], expected)
    assert len(env.move(0)[0]) == len(env.move(99)[0]) == 0


def test_scores_of_moves_are_what_they_gain():
    instance = make_instance(random_problem(2, num_groups=16, num_devices=3, memory_factor=1.5))
    env = RefinementEnv([instance], start="greedy")
    env.reset(seed=3)
    calls = env.backend.calls
    gains, legal, plan = env.move_scores(), env.action_masks(), env.current_plan().copy()
    assert env.backend.calls == calls + legal.sum() - 1
    assert gains[0] == 0.0 and (np.isfinite(gains) == legal).all() and legal.sum() > 10
    simulator = SimulatedBackend().simulator(instance)
    now = score(*simulator.evaluate(plan), instance.reference_step_time_s)
    for k in np.flatnonzero(legal[1:]) + 1:
        moved = plan.copy()
        moved[env.move(k)[0]] = env.move(k)[1]
        assert gains[k] == pytest.approx(now - score(*simulator.evaluate(moved), instance.reference_step_time_s), abs=1e-12)
    best = int(gains.argmax())
    assert env.step(best)[1] == pytest.approx(max(gains[best], 0.0), abs=1e-12)


def test_masks_keep_provable_memory_within_the_limits():
    tried = 0
    for seed in range(12):
        problem = random_problem(seed, num_groups=16, num_devices=3, memory_factor=1.15, unlike=True)
        instance = make_instance(problem, compute_floor=False)
        env = RefinementEnv([instance], moves=64)
        env.reset(seed=seed)
        plan = env.current_plan()
        used = np.bincount(plan, weights=instance.pinned_bytes, minlength=3)
        if (used > instance.limit_bytes).any():
            continue
        for k in range(1, 64):
            groups, devices = env.move(k)
            if len(groups) == 0:
                assert not env.action_masks()[k]
                continue
            moved = plan.copy()
            moved[groups] = devices
            after = np.bincount(moved, weights=instance.pinned_bytes, minlength=3)
            fits = bool((after <= instance.limit_bytes).all())
            assert env.action_masks()[k] == fits
            tried += not fits
    assert tried > 20


def two_groups(*memory):
    """Returns groups of 10 and 20 bytes that send nothing, on two devices."""
    return build_problem(
        "two", time_s=[[1e-3] * 2] * 2, tensors=[TensorSpec(0, 0, [1])], memory_bytes=memory, resident_bytes=[10, 20]
    )


def legal_plans(problem, plan):
    """Plans after a move that is offered, and whether it is legal."""
    env = RefinementEnv([problem], moves=64)
    env.reset(seed=0, options={"plan": plan})
    found = {}
    for k in range(1, 64):
        groups, devices = env.move(k)
        if len(groups):
            moved = np.array(plan)
            moved[groups] = devices
            found[tuple(moved.tolist())] = bool(env.action_masks()[k])
    return found


@pytest.mark.parametrize(("room", "legal"), [(30, True), (29, False)])
def test_a_device_may_be_filled_to_the_last_byte(room, legal):
    assert legal_plans(two_groups(room, 40), [0, 1])[0, 0] == legal
    building = PlacementEnv([two_groups(room, 40)])
    building.reset(seed=0)
    building.step(0)
    assert building.action_masks().tolist() == [legal, True]


def test_moves_of_a_plan_that_does_not_fit_fill_no_device_further():
    """A first device of 20 holds 30, one and a half times what it has; the second has 10, then 40, then 19."""
    for room, legal in (
        (10, {(1, 0): True, (0, 1): False}),
        (40, {(1, 0): True, (0, 1): True}),
        (19, {(1, 0): True, (0, 1): True}),
    ):
        found = legal_plans(two_groups(20, room), [0, 0])
        assert {plan: found[plan] for plan in legal} == legal


def test_the_best_plan_stays_what_it_was():
    """Two good moves, two bad ones, and a good one that does not make up for these: the second one's plan and gain stay."""
    env = RefinementEnv([random_problem(2, num_groups=10, num_devices=3)], start="greedy", max_moves=5)
    env.reset(seed=1)
    rewards, plans = [], [env.current_plan().copy()]
    for good in (True, True, False, False, True):
        gains = env.move_scores()
        choice = gains[1:].argmax() if good else np.where(env.action_masks(), gains, np.inf)[1:].argmin()
        _, reward, done, _, info = env.step(int(choice) + 1)
        rewards.append(reward)
        plans.append(env.current_plan().copy())
    assert done
    simulator = SimulatedBackend().simulator(env.instance)
    scores = [score(*simulator.evaluate(plan), env.instance.reference_step_time_s) for plan in plans]
    assert scores[0] > scores[1] > scores[2] == min(scores) and scores[5] < scores[4]
    assert rewards == pytest.approx([scores[0] - scores[1], scores[1] - scores[2], 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(info["device_of_group"], plans[2])


def test_a_plan_that_fits_scores_no_worse_than_one_that_does_not():
    """However slow it is: a thousand times and ten to the thirtieth times the reference, beside a byte too many."""
    scores = [score(1e3, 0.0, 1.0), score(1e9, 0.0, 1e-21), score(1e-3, 1e-9, 1.0), score(np.inf, 0.0, 1.0)]
    assert scores == sorted(scores) and scores[0] == 5.0
    assert scores[1] == 5.0 and scores[2] == pytest.approx(5.0) and scores[3] == 20.0


def test_an_illegal_move_ends_the_episode():
    problem = random_problem(3, num_groups=16, num_devices=3, memory_factor=1.1)
    env = RefinementEnv([problem], moves=64)
    seen, _ = env.reset(seed=0)
    illegal = [k for k in range(1, 64) if len(env.move(k)[0]) and not env.action_masks()[k]]
    missing = [k for k in range(1, 64) if not len(env.move(k)[0])]
    over = float(table(seen)[illegal[0], PINNED]) - 1.0
    _, reward, done, _, info = env.step(illegal[0])
    assert done and info["illegal"] and reward == pytest.approx(-5.0 - np.log1p(over)) and over > 0
    assert missing == []


def test_plans_that_do_not_fit_can_be_mended():
    """From all groups on one device that holds half of them, every legal move keeps the worst device no worse."""
    problem = random_problem(5, num_groups=20, num_devices=3, memory_factor=2.0)
    env = RefinementEnv([problem], max_moves=60, moves=64)
    env.reset(seed=0, options={"plan": [0] * 20})
    total, done, least = 0.0, False, np.inf
    while not done:
        gains = env.move_scores()
        choice = int(gains[1:].argmax()) + 1
        _, reward, done, _, info = env.step(choice if gains[choice] > -1.0 else 0)
        total, least = total + reward, min(least, reward)
    assert info["feasible"] and total > 1.0 and least >= 0.0
    assert simulate(problem, info["device_of_group"]).feasible


def one_way():
    """Returns four ops in a chain; data can go from device 0 to 1 and from 1 to 2, nowhere else."""
    bandwidth = [[0.0, 1e9, 0.0], [0.0, 0.0, 1e9], [0.0, 0.0, 0.0]]
    tensors = [TensorSpec(i, 1000, [i + 1]) for i in range(3)]
    return build_problem(
        "one way", time_s=[[1e-3] * 3] * 4, tensors=tensors, memory_bytes=[None] * 3, bandwidth_bytes_per_s=bandwidth
    )


def test_a_plan_that_cannot_complete_is_refined_all_the_same():
    env = RefinementEnv([one_way()], max_moves=30)
    observation, _ = env.reset(seed=0, options={"plan": [2, 0, 2, 1]})
    assert not np.isfinite(simulate(one_way(), [2, 0, 2, 1]).step_time_s or np.inf)
    assert observation["context"][4] == 8.0  # score, cut off
    column = RefinementEnv.FEATURES.index("sent_change")
    total, steps, done = 0.0, 0, False
    while not done:
        assert np.isfinite(observation["candidates"]).all() and env.action_masks().sum() > 1
        gains = env.move_scores()
        # Moves that make a missing link needless shorten the transfers most.
        choice = int(np.where(env.action_masks()[1:], table(observation)[1:, column], np.inf).argmin()) + 1
        observation, reward, done, _, info = env.step(choice if not np.isfinite(env.state.best_s[0]) else 0)
        total, steps = total + reward, steps + 1
        assert np.isfinite(reward) and np.isfinite(gains[0])
    assert info["feasible"] and total > 10.0 and steps < 10


def test_no_move_from_one_device():
    env = RefinementEnv([random_problem(0, num_groups=5, num_devices=1)])
    observation, _ = env.reset(seed=0)
    assert env.action_masks().tolist() == [True] + [False] * 31
    assert not observation["candidates"].any() and (observation["candidate_group"] == -1).all()
    assert env.step(0)[2]


def test_the_last_observation_offers_nothing():
    env = RefinementEnv([random_problem(0, num_groups=9, num_devices=2)], max_moves=1)
    env.reset(seed=0)
    observation, _, done, _, _ = env.step(1)
    assert done and not observation["candidates"].any() and env.action_masks().sum() == 1


def test_episodes_repeat_in_any_order():
    problems = [random_problem(seed, num_groups=10, num_devices=3) for seed in range(4)]
    env, again = (RefinementEnv(problems, start="mixed") for _ in range(2))
    first = [env.reset(seed=seed, options={"problem": seed % 4})[0] for seed in range(8)]
    for seed in (5, 1, 7, 3, 0, 6, 2, 4):
        for key, value in again.reset(seed=seed, options={"problem": seed % 4})[0].items():
            np.testing.assert_array_equal(first[seed][key], value)


def test_starts():
    problem = random_problem(6, num_groups=20, num_devices=3)
    instance = make_instance(problem)
    best, mixed = RefinementEnv([instance]), RefinementEnv([instance], start="mixed")
    best.reset(seed=0)
    np.testing.assert_array_equal(best.current_plan(), instance.floor)
    changed = []
    for seed in range(30):
        mixed.reset(seed=seed)
        changed.append(int((mixed.current_plan() != instance.floor).sum()))
    assert 5 < sum(count == 0 for count in changed) < 25 and max(changed) > 2


def test_measured_times_count_and_simulated_ones_describe():
    problem = random_problem(1, num_groups=12, num_devices=2)
    seconds = iter([1.0, 0.25, 4.0])
    env = RefinementEnv([problem], backend=MeasuredBackend(lambda plan: next(seconds)), max_moves=2)
    plain = RefinementEnv([problem], max_moves=2)
    one, two = env.reset(seed=4)[0], plain.reset(seed=4)[0]
    np.testing.assert_array_equal(one["candidates"], two["candidates"])
    assert one["context"][4] != two["context"][4]
    _, reward, _, _, _ = env.step(1)
    assert reward == pytest.approx(np.log(4.0))
    _, reward, done, _, info = env.step(1)
    assert done and reward == 0.0 and info["step_time_s"] == 0.25 and env.backend.calls == 3


def test_any_object_with_evaluate_is_a_backend():
    class Constant:
        calls = 0

        def evaluate(self, instance, device_of_group):
            self.calls += 1
            return SimulatedBackend().evaluate(instance, device_of_group)

    env = RefinementEnv([random_problem(1, num_groups=8, num_devices=2)], backend=Constant())
    env.reset(seed=0)
    assert (np.isfinite(env.move_scores()) == env.action_masks()).all()
    assert env.backend.calls == env.action_masks().sum()


@pytest.mark.parametrize(
    "options", [{"plan": "best"}, {"plan": [0.5] * 8}, {"plan": [[0] * 8]}, {"plan": [0] * 7}, {"plan": [-1] * 8}, [3]]
)
def test_a_reset_that_is_refused_leaves_no_half_an_episode(options):
    env = RefinementEnv([random_problem(1, num_groups=8, num_devices=2)])
    env.reset(seed=0)
    with pytest.raises(InputError, match="options"):
        env.reset(options=options)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(1)
    env.reset()
    env.step(1)


@pytest.mark.parametrize("sizes", [{"moves": 1}, {"moves": 2.5}, {"moves": "many"}, {"max_moves": 0}, {"max_moves": None}])
def test_sizes_are_checked(sizes):
    with pytest.raises(InputError, match="moves"):
        RefinementEnv([random_problem(1, num_groups=8, num_devices=2)], **sizes)


def test_moves_that_do_not_help_are_taken_back():
    env = RefinementEnv(
        [random_problem(3, num_groups=30, num_devices=3)], start="greedy", max_moves=200, moves=8, keep="better"
    )
    rng, kept, back, drawn = np.random.default_rng(0), 0, 0, 0
    env.reset(seed=1)
    simulator = SimulatedBackend()
    standing, done = simulator.evaluate(env.instance, env.current_plan()), False
    while not done:
        before, offered = env.current_plan().copy(), env.action_masks()
        legal = np.flatnonzero(offered[1:]) + 1
        choice = int(rng.choice(legal)) if len(legal) else 0
        groups, devices = (part.copy() for part in env.move(choice))
        after = before.copy()
        after[groups] = devices
        result = simulator.evaluate(env.instance, after)
        observation, reward, done, _, _ = env.step(choice)
        if choice == 0:
            break
        if score_of(env, result) < score_of(env, standing):
            assert reward > 0 and (env.current_plan() == after).all()
            standing, kept = result, kept + 1
        else:
            assert reward == 0 and (env.current_plan() == before).all()
            back += 1
            left = offered.copy()
            left[choice] = False
            if done:
                break
            if left[1:].any():  # the same moves but one
                assert (env.action_masks() == left).all()
                assert not observation["candidates"].reshape(8, -1)[choice].any()
            else:
                drawn += 1
    assert kept > 5 and back > 20 and drawn > 1


def score_of(env, result):
    return refinement.score(result.step_time_s, result.relative_overflow, env.instance.reference_step_time_s)
