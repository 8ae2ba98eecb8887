"""Labelled moves as Minari data sets: what every offered move of a plan would gain, along descents (docs/agent/data.md).

    python -m benchmarks.moves_dataset --split validation --out data
    MINARI_DATASETS_PATH=data python -c 'import minari; print(minari.load_dataset("rlplace/moves-validation-v0"))'

An episode of Refinement-v0 begins at a plan of the kinds that `rlplace.agents.move_ranking` labels, and goes on by its rule.
Equal seeds give equal data under equal versions; the program prints a hash of the content.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import arguments
from rlplace.agents.move_ranking import choose, starting_plans
from rlplace.agents.problems.cases import ProblemCase
from rlplace.agents.problems.splits import split_cases
from rlplace.envs.instance import make_instance
from rlplace.envs.refinement import RefinementEnv
from rlplace.errors import InputError, MissingError, RlplaceError

ENV_IDS = {
    "train": "rlplace/Refinement-train-v0",
    "validation": "rlplace/Refinement-val-v0",
    "test": "rlplace/Refinement-test-v0",
}

MOVES, STATES = 64, 16
"""Moves that are offered, stop among them, and steps of an episode."""


@dataclass(frozen=True, eq=False)
class Walk:
    """An episode: T steps, K moves; observations and gains have a row more, of its end.

    Attributes:
        seed, problem, start: What `reset` was called with; `start` int32 [G] is a plan.
        observations: By key, [T + 1, ...].
        actions: int64 [T].
        rewards: float64 [T].
        gains: float64 [T + 1, K], see `RefinementEnv.move_scores`; -inf where a move is not legal or does not exist.
    """

    seed: int
    problem: int
    start: NDArray[np.int32]
    observations: dict[str, NDArray[Any]]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float64]
    gains: NDArray[np.float64]


def make_walks(
    cases: Sequence[ProblemCase], *, seed: int, moves: int = MOVES, states: int = STATES
) -> tuple[RefinementEnv, list[Walk]]:
    """Walks on every case that has a plan, a few each.

    Args:
        cases: The cases; their place is the number of the problem.
        seed: Seed of all random choices.
        moves: Moves that are offered, stop among them.
        states: Most steps of a walk.
    """
    starts = [starting_plans(case, np.random.default_rng([seed, number])) for number, case in enumerate(cases)]
    instances = [
        make_instance(case.problem, floor=plans[0] if plans else None, compute_floor=False)
        for case, plans in zip(cases, starts, strict=True)
    ]
    env = RefinementEnv(instances, moves=moves, max_moves=states)
    walks = []
    for number, plans in enumerate(starts):
        for turn, plan in enumerate(plans):
            walks.append(walk(env, number, plan, seed=(seed * 10_000 + number) * 100 + turn))
    return env, walks


def walk(env: RefinementEnv, problem: int, start: NDArray[np.int32], *, seed: int) -> Walk:
    """Returns one descent with occasional other moves; it stops early where no move can be made."""
    rng = np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed, options={"problem": problem, "plan": start})
    observations, actions, rewards, gains, done = [observation], [], [], [], False
    while not done:
        gains.append(env.move_scores())
        choice = choose(-gains[-1][1:], rng)
        actions.append(0 if choice is None else choice + 1)
        observation, reward, done, _, _ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
    last = np.full(env.moves, -np.inf)
    last[0] = 0.0
    return Walk(
        seed,
        problem,
        start.astype(np.int32),
        {key: np.stack([item[key] for item in observations]) for key in observations[0]},
        np.array(actions, dtype=np.int64),
        np.array(rewards, dtype=np.float64),
        np.stack([*gains, last]),
    )


def content_hash(episodes: Iterable[tuple[Mapping[str, NDArray[Any]], NDArray[Any], NDArray[Any]]]) -> str:
    """Returns SHA-256 over observations, actions and gains of episodes, in order: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for observations, actions, gains in episodes:
        for name, array in [*sorted(observations.items()), ("actions", actions), ("gains", gains)]:
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def hash_of_dataset(dataset: Any) -> str:
    """Returns the same hash of a data set that Minari has loaded."""
    return content_hash((item.observations, item.actions, item.infos["gains"]) for item in dataset.iterate_episodes())


def episode_of(item: Walk) -> dict[str, Any]:
    """Makes the fields of an episode as Minari takes them."""
    ends = [*[False] * (len(item.actions) - 1), True]
    own = {"seed": item.seed, "options": {"problem": item.problem, "plan": item.start}, "infos": {"gains": item.gains}}
    seen = {name: getattr(item, name) for name in ("observations", "actions", "rewards")}
    return {**own, **seen, "terminations": ends, "truncations": [False] * len(ends)}


def write_dataset(
    walks: Sequence[Walk], env: RefinementEnv, dataset_id: str, folder: Path, *, spec: Any = None, about: str = ""
) -> Any:
    """Writes a Minari data set.

    Args:
        walks: The episodes.
        env: The environment that they are of.
        dataset_id: ``namespace/name-vN``.
        folder: Root of data sets.
        spec: Registered environment by which ``dataset.recover_environment()`` makes the same problems again; None: none does.
        about: Description.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        InputError: The data set is there already.
        MissingError: Minari is not installed.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
    except ImportError:
        raise MissingError("Minari is missing: pip install 'rlplace[data]'") from None
    if (folder / dataset_id).exists():
        raise InputError(f"{folder / dataset_id}: is there already; remove it, or name another --out")
    shown = copy.copy(env)
    shown.spec = spec
    with warnings.catch_warnings(), patch.dict(os.environ, MINARI_DATASETS_PATH=str(folder)):
        warnings.simplefilter("ignore", UserWarning)  # about an e-mail address and a permalink
        return minari.create_dataset_from_buffers(
            dataset_id,
            [EpisodeBuffer(**episode_of(item)) for item in walks],
            env=shown,
            algorithm_name="descent with exploration (rlplace.agents.move_ranking)",
            author="The rlplace authors",
            description=about,
            data_format="hdf5",
        )


def facts(name: str, walks: Sequence[Walk], dataset: Any, digest: str) -> Iterator[str]:
    """Yields lines about a data set that was made."""
    gains = np.concatenate([item.gains[:-1] for item in walks])
    size = sum(file.stat().st_size for file in Path(dataset.storage.data_path).rglob("*") if file.is_file())
    yield f"{name}: {dataset.total_episodes} episodes, {dataset.total_steps} steps, {size / 1e6:.1f} MB"
    offered = np.isfinite(gains[:, 1:])
    yield f"{offered.sum()} labelled moves, {(gains[:, 1:][offered] > 0).mean():.1%} of them gain"
    yield f"sha256 of observations, actions and gains: {digest}"


def main(words: Sequence[str] | None = None) -> int:
    """Makes a data set and prints its hash; returns the exit code."""
    options = arguments(
        __doc__,
        words=words,
        split=("validation", "which problems", ENV_IDS),
        out=(Path("data"), "root of data sets, made where it is missing"),
        seed=(0, "of all random choices"),
        moves=(MOVES, "moves that are offered, stop among them"),
        states=(STATES, "most steps of an episode"),
        count=(0, "only the first cases; the environment cannot be recovered then"),
    )
    try:
        cases = split_cases(options.split, progress=lambda line: print(line, file=sys.stderr))
        chosen = cases[: options.count or None]
        env, walks = make_walks(chosen, seed=options.seed, moves=options.moves, states=options.states)
        spec = None
        if len(chosen) == len(cases):
            spec = copy.deepcopy(gymnasium.spec(ENV_IDS[options.split]))
            spec.kwargs.update(moves=options.moves, max_moves=options.states)
        digest = content_hash((item.observations, item.actions, item.gains) for item in walks)
        about = f"What moves of plans gain, {options.split} split, seed {options.seed}. Apache-2.0. Content sha256 {digest}."
        name = f"rlplace/moves-{options.split}-v0"
        options.out.mkdir(parents=True, exist_ok=True)
        dataset = write_dataset(walks, env, name, options.out.resolve(), spec=spec, about=about)
    except RlplaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(facts(name, walks, dataset, digest)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
