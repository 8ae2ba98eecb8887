"""Collects labels with several processes: a file a case, none made twice, so that a run can be cut anywhere."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.agents.checkpoint import make_folder
from rlplace.agents.problems.sources import CaseSource
from rlplace.cluster.machines import usable_cores
from rlplace.envs.vector.base import PlacerVectorEnv
from rlplace.errors import InputError, show
from rlplace.files import fingerprint, read_json, write_json

FORMAT = "rlplace.labels"
VERSION = 1

Collect = Callable[..., Any]
"""Called with a case and the settings ``states``, ``moves``, ``seed``; what it returns is saved, unless it is None."""

_given: tuple[CaseSource, Collect] | None = None


def gather(
    source: CaseSource,
    folder: Path,
    *,
    cases: int,
    states: int,
    moves: int,
    seed: int,
    processes: int,
    report: Callable[[str], None],
    collect: Collect,
) -> list[Path]:
    """Labels of the first `cases` cases of a source; a source with fewer gives each of them several times.

    Args:
        source: Source of the cases.
        folder: Folder of the label files; existing ones stay.
        cases: Files to make; cases without labels leave gaps.
        states: Number of plans of a case.
        moves: Number of moves priced from each plan.
        seed: Seed of the plans and moves; the n-th file has the seed `seed` + n.
        processes: Number of processes; 0: one a core.
        report: Called with lines about the progress.
        collect: Makes what a file holds.

    Returns:
        The files, by number.

    Raises:
        InputError: The folder holds labels of other cases, or labels of the same cases with other settings.
    """
    check_labels(source, folder, states=states, moves=moves, seed=seed)
    endings = ("safetensors", "none")
    wanted = [number for number in range(cases) if not any(_file(folder, number, ending).exists() for ending in endings)]
    processes = min(processes or usable_cores(), max(1, len(wanted)))
    begin_s = time.monotonic()
    if wanted:
        report(f"making labels of {len(wanted)} cases with {processes} processes")
        work = [(number, str(folder), states, moves, seed) for number in wanted]
        if processes == 1:
            _begin(source, collect)
            done = map(_collect, work)
            for count, _ in enumerate(done, 1):
                _tell(count, len(wanted), begin_s, states * moves, report)
        else:
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(source, collect)) as pool:
                futures = [pool.submit(_collect, item) for item in work]
                try:
                    for count, future in enumerate(as_completed(futures), 1):
                        future.result()
                        _tell(count, len(wanted), begin_s, states * moves, report)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    return [path for path in (_file(folder, number) for number in range(cases)) if path.exists()]


def check_labels(source: CaseSource, folder: Path, *, states: int, moves: int, seed: int) -> None:
    """Records in the folder which cases its labels are of, or refuses a folder of others; arguments as in `gather`."""
    if source.count == 0:
        raise InputError("no problem to train on")
    shown = [source.case(number) for number in range(source.count or 1)]
    facts = [case.problem.fingerprint for case in shown]
    origin = {"problems": source.name, "cases": fingerprint({"cases": facts}), "states": states, "moves": moves, "seed": seed}
    path = folder / "origin.json"
    if not path.exists():
        make_folder(folder)
        write_json(path, {"format": FORMAT, "version": VERSION, **origin})
        return
    noted = read_json(path, FORMAT, VERSION)
    for key, value in origin.items():
        if noted.get(key) != value:
            raise InputError(
                f"{folder}: holds labels of another training: {key} {show(noted.get(key))}, now {show(value)}; remove that "
                "folder, or choose another --out"
            )


def _begin(source: CaseSource, collect: Collect) -> None:
    global _given
    import torch

    torch.set_num_threads(1)
    _given = source, collect


def _collect(work: tuple[int, str, int, int, int]) -> int:
    number, folder, states, moves, seed = work
    assert _given is not None
    source, collect = _given
    case = source.case(number if source.count is None else number % source.count)
    labels = collect(case, states=states, moves=moves, seed=seed + number)
    if labels is None:
        _file(Path(folder), number, "none").touch()
    else:
        labels.save(_file(Path(folder), number))
    return number


def _tell(count: int, wanted: int, begin_s: float, moves: int, report: Callable[[str], None]) -> None:
    if count % 20 == 0 or count == wanted:
        seconds = time.monotonic() - begin_s
        left = (wanted - count) * seconds / count
        report(f"{count}/{wanted} cases, about {count * moves / seconds:,.0f} labels a second, {left:.0f} s left")


def _file(folder: Path, number: int, ending: str = "safetensors") -> Path:
    """Returns the labels of a case; with the ending ``none`` it stands for a case that has none."""
    return folder / f"{number:05d}.{ending}"


class PlacerVecEnv(VecEnv):
    """N environments that are stepped together, for any algorithm of stable-baselines3 and sb3-contrib, masks included.

    >>> envs = gymnasium.make_vec("rlplace/Refinement-v0", num_envs=64, autoreset_mode="SameStep")      # doctest: +SKIP
    >>> model = MaskablePPO(PlacerPolicy, PlacerVecEnv(envs), policy_kwargs={"features": RefinementEnv.FEATURES})
    """

    def __init__(self, envs: Any) -> None:
        """Wraps.

        Args:
            envs: What `gymnasium.make_vec` makes of rlplace/Placement-v0 or rlplace/Refinement-v0 with
                ``autoreset_mode="SameStep"``.

        Raises:
            InputError: It is another environment, or has another mode.
        """
        if not isinstance(envs, PlacerVectorEnv) or envs.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP:
            raise InputError(
                'PlacerVecEnv wraps gymnasium.make_vec("rlplace/Placement-v0", num_envs=N, autoreset_mode="SameStep") or '
                f"Refinement-v0, found {envs!r}; for other environments use DummyVecEnv of stable-baselines3"
            )
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._actions = np.zeros(self.num_envs, dtype=np.int64)

    def reset(self) -> dict[str, NDArray[Any]]:  # type: ignore[override]
        """Begins all episodes, with the seeds and options that were set."""
        seed = None if self._seeds[0] is None else self._seeds
        observation, infos = self.envs.reset(seed=seed, options=self._options[0] or None)
        self.reset_infos = [{"problem": int(number)} for number in infos["problem"]]
        self._reset_seeds()
        self._reset_options()
        return observation

    def step_async(self, actions: NDArray[Any]) -> None:
        """Takes the actions of the next step."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Steps; an environment whose episode ended has its last info and ``terminal_observation``."""
        observation, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        said: list[dict[str, Any]] = [{"problem": number} for number in infos["problem"].tolist()]
        over = terminated | truncated
        if over.any():
            final = infos["final_info"]
            for e in np.flatnonzero(over).tolist():
                known = {name: values[e] for name, values in final.items() if name[0] != "_" and final[f"_{name}"][e]}
                said[e] = {
                    **{name: value.item() if np.ndim(value) == 0 else value for name, value in known.items()},
                    "terminal_observation": infos["final_obs"][e],
                    "TimeLimit.truncated": bool(truncated[e] and not terminated[e]),
                }  # fmt: skip
        return observation, rewards.astype(np.float32), over, said

    def close(self) -> None:
        """Ends the threads of the environments."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute, the same for each."""
        if attr_name == "action_masks":
            return [lambda e=e: self.envs.action_masks()[e] for e in self._chosen(indices)]
        return [
            getattr(self.envs if hasattr(self.envs, attr_name) else self.envs.single, attr_name) for _ in self._chosen(indices)
        ]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refused: environments that are stepped together have no attributes of their own."""
        raise InputError(f"{attr_name} cannot be set: these environments share what they are; make others")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Returns rows of a method of the vector environment, such as ``action_masks``."""
        rows = getattr(self.envs, method_name)(*method_args, **method_kwargs)
        return list(rows) if indices is None else [rows[e] for e in self._chosen(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """False for each: they are in no wrapper."""
        return [False for _ in self._chosen(indices)]

    def _chosen(self, indices: int | Iterable[int] | None) -> Sequence[int]:
        return range(self.num_envs) if indices is None else [indices] if isinstance(indices, int) else list(indices)
