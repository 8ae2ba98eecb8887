"""Data sets of labelled moves: made, loaded by Minari, replayed in an environment of one's own to the same gains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.moves_dataset import content_hash, hash_of_dataset, make_walks, write_dataset
from rlplace.agents.problems.cases import ProblemCase
from rlplace.envs.refinement import RefinementEnv
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

CASES = [
    ProblemCase("a", "random", random_problem(1, 14, 3, shape="branchy")),
    ProblemCase("b", "random", random_problem(2, 9, 2, memory_factor=1.5)),
]


def test_a_data_set_replays_to_the_same_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    env, walks = make_walks(CASES, seed=3, moves=12, states=5)
    assert {item.problem for item in walks} == {0, 1} and len(walks) >= 6
    write_dataset(walks, env, "rlplace/moves-tiny-v0", tmp_path)
    with pytest.raises(InputError, match="is there already"):
        write_dataset(walks, env, "rlplace/moves-tiny-v0", tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    dataset = minari.load_dataset("rlplace/moves-tiny-v0")
    assert hash_of_dataset(dataset) == content_hash((item.observations, item.actions, item.gains) for item in walks)
    assert dataset.total_episodes == len(walks)
    own = RefinementEnv([case.problem for case in CASES], moves=12, max_moves=5)  # makes its floors itself
    seen = 0
    for episode, facts in zip(dataset.iterate_episodes(), dataset.storage.get_episode_metadata(range(len(walks))), strict=True):
        observation, _ = own.reset(seed=facts["seed"], options=dict(facts["options"]))
        for step, action in enumerate(episode.actions):
            assert all(np.array_equal(observation[key], episode.observations[key][step]) for key in observation)
            assert np.array_equal(own.move_scores(), episode.infos["gains"][step])
            observation, reward, done, _, _ = own.step(action)
            assert reward == episode.rewards[step] and done == episode.terminations[step]
            seen += int(np.isfinite(episode.infos["gains"][step][1:]).sum())
    assert seen > 100


def test_a_gain_is_the_logarithm_of_two_simulated_step_times() -> None:
    env, walks = make_walks(CASES[:1], seed=5, moves=12, states=3)
    first = walks[0]
    problem = CASES[0].problem
    before = simulate(problem, first.start).step_time_s
    env.reset(seed=first.seed, options={"problem": 0, "plan": first.start})
    legal = [move for move in range(1, 12) if np.isfinite(first.gains[0][move])]
    assert len(legal) > 4
    for move in legal:
        groups, devices = env.move(move)
        plan = first.start.copy()
        plan[groups] = devices
        after = simulate(problem, plan).step_time_s
        assert before is not None and after is not None
        assert first.gains[0][move] == pytest.approx(np.log(before / after), abs=1e-12)


def test_the_content_follows_from_the_seed() -> None:
    def digest(seed: int) -> str:
        walks = make_walks(CASES[1:], seed=seed, moves=8, states=3)[1]
        return content_hash((item.observations, item.actions, item.gains) for item in walks)

    assert digest(1) == digest(1) != digest(2)
