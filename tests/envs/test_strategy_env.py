"""Strategy-v0: both checkers, masks against the executor's memory, rewards that add up, optima that are known by exhaustion."""

import dataclasses
import itertools
import math
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as check_sb3

from rlplace.agents.policy import PlacerPolicy
from rlplace.agents.problems.questions import DEALT, strategy_questions
from rlplace.cluster import Cluster
from rlplace.envs import StrategyEnv
from rlplace.envs.cluster import default_questions
from rlplace.envs.strategy_board import KINDS, MEMORY
from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import draft_of_strategy
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.moves import Moves
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.brute_force import quicker, small_question
from tests.strategy.random_costs import random_costs

EVERY = 600
"""More moves than any strategy of these questions has."""


def question(seed=0, text="a100-80g:4", share=1.0, **options):
    cluster = Cluster.preset(text)
    devices = tuple(dataclasses.replace(d, memory_bytes=int(d.memory_bytes * share), reserved_bytes=0) for d in cluster.devices)
    cluster = dataclasses.replace(cluster, devices=devices)
    return SearchProblem(DraftEvaluator(random_costs(np.random.default_rng(seed), cluster, 5), cluster), 8, **options)


ROOMY, UNLIKE = question(), question(1, "a100-80g:2+t4:2")
TIGHT = question(1, share=0.05)


def play(env, choose, **reset):
    """Rewards and infos of an episode, that of the reset first; `choose` gets the environment."""
    _, info = env.reset(**reset)
    rewards, infos, over = [], [info], False
    while not over:
        _, reward, over, cut, info = env.step(choose(env))
        assert not cut
        rewards.append(reward)
        infos.append(info)
    return rewards, infos


def at_random(seed):
    rng = np.random.default_rng(seed)

    def choose(env):
        moves = np.flatnonzero(env.action_masks()[1:]) + 1
        return int(rng.choice(moves)) if len(moves) else 0

    return choose


def greedy(env):
    return int(env.move_scores().argmax())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["uniform", "floor", "random"])
def test_both_checkers_have_nothing_to_say(start):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = gymnasium.make("rlplace/Strategy-v0", problems=[TIGHT, UNLIKE], start=start)
        check_env(whole.unwrapped, skip_render_check=False)
        check_sb3(StrategyEnv([ROOMY, question(1, "t4:2")], start=start))


def test_vector_environments_stack_infos():
    options = {"problems": [ROOMY, question(1, "t4:2")], "max_moves": 2, "moves": 8}
    envs = gymnasium.make_vec("rlplace/Strategy-v0", num_envs=3, vectorization_mode="sync", **options)
    _, infos = envs.reset(seed=0)
    assert infos["peak_memory_bytes"].shape == (3, 4) and infos["peak_memory_bytes"].dtype == np.int64
    for _ in range(2):
        _, _, over, _, infos = envs.step([int(np.flatnonzero(env.unwrapped.action_masks())[-1]) for env in envs.envs])
    assert over.all() and infos["compute_s"].shape == (3, 4) and infos["strategy"]["batch"].tolist() == [8] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "refused"), [(ROOMY, 0), (UNLIKE, 0), (TIGHT, 20)], ids=["roomy", "unlike", "tight"])
def test_masks_are_what_the_executor_says_of_every_move(asked, refused):
    """Every legal move ends within the memory of every device; every other has no choice for all blocks that does."""
    env = StrategyEnv(asked, moves=EVERY, max_moves=4, start="random")
    room = [device.memory_bytes for device in asked.cluster.devices]

    def fits(draft):
        try:
            said = asked.scores.evaluate(draft)
        except InputError:
            return False
        there = all(peak <= most for peak, most in zip(said.peak_memory_bytes, room, strict=True))
        cut = all(asked.costs.why_not(place.cut(size)) is None for place in draft.places for size in draft.microbatch)
        return there and cut and math.isfinite(said.step_time_s)

    def alike(draft):
        blocks = len(draft.recompute)
        for recompute, offload in itertools.product(range(3), range(3)):
            yield dataclasses.replace(draft, recompute=bytes([recompute]) * blocks, offload=bytes([offload]) * blocks)

    seen = {True: 0, False: 0}
    for episode in range(3):
        env.reset(seed=episode)
        choose, over = at_random(episode), False
        while not over:
            mask = env.action_masks()
            assert mask[0] and not mask[1 + len(env.offered) :].any()
            for legal, (kind, draft, after) in zip(mask[1:], env.offered, strict=False):
                seen[bool(legal)] += 1
                if not legal:
                    assert not any(fits(other) for other in ([draft] if kind == MEMORY else alike(draft)))
                    continue
                reached = after.draft
                assert fits(reached) and reached.batch == asked.batch
                assert after.step_s == asked.scores.evaluate(reached).step_time_s
                assert dataclasses.replace(reached, recompute=draft.recompute, offload=draft.offload) == draft
            *_, over, _, _ = env.step(choose(env))
    assert seen[True] > 20 and seen[False] >= refused


def test_offered_moves_are_the_neighbours_of_the_local_search():
    env = StrategyEnv(UNLIKE, start="random", moves=EVERY)
    env.reset(seed=8)
    draft = env.now.draft
    every = set(Moves(UNLIKE).neighbours(draft, UNLIKE.scores.evaluate(draft))) - {draft}
    offered = env.boards[0].moves(draft, EVERY, np.random.default_rng(0))
    assert {other for kind, other, _ in offered if kind != MEMORY} == every and len(every) > 50
    few = env.boards[0].moves(draft, 12, np.random.default_rng(1))
    assert len(few) == 12 and {other for _, other, _ in few} <= {other for _, other, _ in offered}
    assert {kind for kind, *_ in few} == {kind for kind, *_ in offered}
    drawn = {other for seed in range(300) for _, other, _ in env.boards[0].moves(draft, 12, np.random.default_rng(seed))}
    assert drawn == {other for _, other, _ in offered}


def test_what_space_and_runtime_refuse_is_illegal():
    few = Space.parse("tensor=1 schedule=1f1b")
    asked = question(2, space=few, why_not=lambda draft: "too many" if draft.stages > 3 else None)
    env = StrategyEnv(asked, moves=EVERY, max_moves=3)
    for episode in range(4):
        env.reset(seed=episode)
        choose, over = at_random(episode), False
        while not over:
            led = [after.draft for *_, after in env.offered if after is not None]
            assert led and all(draft.stages <= 3 and draft.schedule in (None, "1f1b") for draft in led)
            assert all(place.tensor == 1 for draft in led for place in draft.places)
            *_, over, _, _ = env.step(choose(env))
    env.reset(seed=0)
    illegal = np.flatnonzero(~env.action_masks())
    _, reward, over, _, info = env.step(int(illegal[0]))
    assert over and reward == -5.0 and info["illegal"] and Strategy.from_dict(info["strategy"]).batch == 8
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["uniform", "floor", "random"])
def test_rewards_add_up_to_the_log_of_what_was_won(start):
    asked = [ROOMY, UNLIKE, TIGHT]
    env = StrategyEnv(asked, start=start, max_moves=6, moves=16)
    for episode in range(6):
        rewards, infos = play(env, at_random(episode), seed=episode)
        took_s = [info["step_time_s"] for info in infos[:-1]]
        best_s = min(*took_s, env.now.step_s)
        assert infos[-1]["step_time_s"] == best_s and min(rewards) >= 0.0
        assert sum(rewards) == pytest.approx(math.log(took_s[0] / best_s), abs=1e-12)
        answer = search(env.question, calls=200)
        alone = next(tried for tried in answer.ranked if not tried.draft.beside)
        assert infos[-1]["vs_best_baseline"] == best_s / alone.step_s
        draft = draft_of_strategy(Strategy.from_dict(infos[-1]["strategy"]), env.question.costs.names)
        assert env.question.scores.score(draft) == (best_s, 0.0) and draft.batch == env.question.batch
        if start == "uniform":
            assert took_s[0] == answer.uniform.step_s
    speed = StrategyEnv(asked, start="random", max_moves=6, reward=lambda step_s, floor_s: 1.0 / step_s)
    rewards, infos = play(speed, greedy, seed=1)
    assert sum(rewards) == pytest.approx(1.0 / infos[-1]["step_time_s"] - 1.0 / infos[0]["step_time_s"])


@pytest.mark.slow
def test_a_seed_decides_everything_whatever_was_evaluated_before():
    runs = []
    for warm in range(2):
        asked = [question(0), question(1, "t4:2")]
        env = StrategyEnv(asked, start="random", moves=8, max_moves=5)
        for seed in range(10 * warm):
            play(StrategyEnv(asked, moves=40), at_random(seed), seed=seed)
        seen = []
        for seed in (3, 4):
            observation, info = env.reset(seed=seed)
            seen += [*observation.values(), info["step_time_s"]]
            choose, over = at_random(0), False
            while not over:
                observation, reward, over, _, info = env.step(choose(env))
                seen += [*observation.values(), reward]
            seen.append(str(info["strategy"]))
        runs.append(seen)
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_figures_are_those_that_a_plan_announces():
    """Those of the block executor stand in a plan beside its rivals; of the ops one by one a plan says nearly the same."""
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.plan import predict

    asked = default_questions()[0]
    answer = search(asked, calls=60)
    announced = predict(asked, answer, OpLevel(asked))
    env = StrategyEnv(asked)
    told = [one for one in announced.strategies if one["step_time_s"] is not None]
    alone = [one for one in told if len(Strategy.from_dict(one["strategy"]).pipelines) == 1]
    assert len(alone) > 3
    for entry in alone:
        _, info = env.reset(seed=0, options={"strategy": entry["strategy"]})
        assert info["step_time_s"] == entry["step_time_s"]
        assert (info["peak_memory_bytes"] <= [device.memory_bytes for device in asked.cluster.devices]).all()
        assert env.current_strategy().to_dict() == entry["strategy"]
    _, info = env.reset(seed=0, options={"strategy": answer.ranked[0].draft.strategy(asked.costs.names).to_dict()})
    assert info["step_time_s"] == pytest.approx(announced.step_time_s, rel=0.1)


def test_devices_work_wait_or_idle_for_the_whole_step():
    env = StrategyEnv([UNLIKE, question(0, "t4:2")], start="random", moves=16, max_moves=4)
    for seed in range(6):
        _, infos = play(env, at_random(seed), seed=seed)
        count = env.question.cluster.num_devices
        for info in infos:
            spent = info["compute_s"] + info["transfer_s"] + info["idle_s"]
            np.testing.assert_allclose(spent[:count], info["step_time_s"], rtol=1e-9)
            assert not spent[count:].any() and info["peak_memory_bytes"].shape == (4,)
        used = list(Strategy.from_dict(infos[-1]["strategy"]).devices)
        assert set(np.flatnonzero(info["compute_s"])) == set(used) == set(np.flatnonzero(info["peak_memory_bytes"]))


def test_stages_and_moves_are_described_as_they_are():
    env = StrategyEnv([UNLIKE, TIGHT], start="random", moves=EVERY)
    for seed in range(6):
        observation, info = env.reset(seed=seed)
        strategy, names = env.current_strategy(), env.STAGE_FEATURES
        rows = dict(zip(names, observation["stages"].reshape(env.max_stages, -1).T, strict=True))
        used = len(strategy.stages)
        assert (observation["place"] >= 0).sum() == used and not any(row[used:].any() for row in rows.values())
        shares = zip(info["peak_memory_bytes"], env.question.cluster.devices, strict=True)
        full = [peak / device.memory_bytes for peak, device in shares]
        for number, stage in enumerate(strategy.stages):
            found = {name: rows[name][number] for name in names}
            assert 2 ** found["devices"] == pytest.approx(len(stage.devices), rel=1e-6)
            degrees = sum(found[axis] for axis in ("replicas", "shared", "tensor", "context"))
            assert 2**degrees == pytest.approx(len(stage.devices), rel=1e-6)
            assert found["blocks"] * 5 == pytest.approx(len(stage.blocks)) and found["level"] * 3 == pytest.approx(
                stage.sharding
            )
            assert found["recomputed"] * len(stage.blocks) == pytest.approx(len(stage.recompute))
            assert found["offloaded"] * len(stage.blocks) == pytest.approx(len(stage.offload))
            assert found["full"] == pytest.approx(max(full[device] for device in stage.devices), rel=1e-6)
            busy = sum(info[key][stage.devices[0]] for key in ("compute_s", "transfer_s", "idle_s"))
            parts = [found[name] for name in names if name.startswith("in ")]
            assert sum(parts) == pytest.approx(busy / info["step_time_s"]) == pytest.approx(1.0, abs=1e-5)
            assert found["in compute"] > 0 and len(set(names)) == len(names)
        table, legal = observation["candidates"].reshape(EVERY, -1), env.action_masks()
        assert set(np.flatnonzero(observation["candidate_group"] >= 0)) == set(np.flatnonzero(legal[1:]) + 1)
        scores = env.move_scores()
        for action in np.flatnonzero(legal[1:]) + 1:
            row, led = dict(zip(env.FEATURES, table[action], strict=True)), env.offered[action - 1][2].draft
            assert sum(row[kind] for kind in KINDS) == row[KINDS[observation["candidate_group"][action]]] == 1.0
            assert row["lowers"] == pytest.approx(scores[action], abs=1e-6)
            more = math.log2(len(led.devices) / len(strategy.devices))
            assert row["more devices"] == pytest.approx(more, abs=1e-6)
        assert scores[0] == 0.0 and not table[~legal].any() and (scores[~legal] == -np.inf).all()


def test_the_best_offered_move_never_ends_behind_the_uniform_start():
    for asked in (ROOMY, UNLIKE, TIGHT, question(5, "h100:2x2,ib=400g")):
        rewards, infos = play(StrategyEnv(asked, moves=EVERY), greedy, seed=0)
        assert infos[-1]["step_time_s"] <= search(asked, calls=200).uniform.step_s and min(rewards) >= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1003, 1006, 1014, 1016, 1027])
def test_the_best_offered_moves_lead_from_uniform_to_the_optimum(seed):
    """Where no strategy of one pipeline beats the end, by exhaustion."""
    env = StrategyEnv(small_question(seed), moves=EVERY)
    rewards, infos = play(env, greedy, seed=0)
    assert sum(rewards) > 0.0 and infos[-1]["vs_best_baseline"] == pytest.approx(1.0)
    assert quicker(env.question, infos[-1]["step_time_s"] * (1 - 1e-9)) is None


def test_stock_maskable_ppo_learns_in_it():
    env = StrategyEnv([ROOMY, question(2, "t4:2")], start="random", moves=8, max_moves=8)
    model = MaskablePPO(PlacerPolicy, env, n_steps=64, batch_size=32, seed=0, policy_kwargs={"features": StrategyEnv.FEATURES})
    before = [value.clone() for value in model.policy.network.parameters()]
    model.learn(256)
    after = list(model.policy.network.parameters())
    assert any((one != other).any() for one, other in zip(before, after, strict=True))
    assert all(value.isfinite().all() for value in after)


def test_what_is_no_start_or_question_is_refused():
    env = StrategyEnv(ROOMY)
    env.reset(seed=0)
    good = env.current_strategy().to_dict()
    with pytest.raises(InputError, match="batch of 8"):
        env.reset(options={"strategy": {**good, "batch": 16, "microbatches": [2 * count for count in good["microbatches"]]}})
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)
    with pytest.raises(InputError, match="below 1"):
        env.reset(options={"problem": 1})
    for wrong in ({"start": "best"}, {"moves": 1}, {"max_moves": 0}, {"problems": []}):
        with pytest.raises(InputError):
            StrategyEnv(**{"problems": ROOMY, **wrong})
    env.reset(seed=0)
    with pytest.raises(InputError, match="whole number"):
        env.step(16)


def test_splits_share_no_model_and_the_unseen_no_cluster():
    for one, other in itertools.combinations(("train", "val", "test"), 2):
        for part in (0, 1):
            assert not set(DEALT[one][part]) & set(DEALT[other][part])
    assert set(DEALT["branchy"][0]) < set(DEALT["test"][0])
    assert all(name.startswith("zoo:") for split in ("train", "branchy") for name in DEALT[split][0])
    with pytest.raises(InputError, match="unknown split 'tests'"):
        strategy_questions("tests")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "branchy"])
def test_questions_of_the_splits_that_need_no_transformers_have_moves(split):
    env = StrategyEnv(strategy_questions(split))
    assert len(env.boards) == 10
    for number in range(len(env.boards)):
        _, info = env.reset(seed=0, options={"problem": number})
        assert info["vs_best_baseline"] >= 1.0 and env.action_masks().sum() > 4
