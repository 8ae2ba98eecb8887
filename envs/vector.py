"""Vector environments: seeds, autoreset and infos as in `gymnasium.vector.SyncVectorEnv`, episodes of a `PlacerEnv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rlplace.envs.base import Infos, Observation, PlacerEnv
from rlplace.envs.instance import PlacementInstance
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv
from rlplace.errors import InputError, show


class PlacerVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """N environments on problems of a list, stepped together; see the subclasses.

    Everything that N single environments of `gymnasium.vector.SyncVectorEnv` return is returned, bit for bit, but rendering.

    Attributes:
        single: The environment that holds the N episodes.
    """

    kind: type[PlacerEnv]
    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        *,
        threads: int = 2,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Prepares.

        Args:
            num_envs: N.
            threads: Threads that step them.
            autoreset_mode: When an episode that is over begins anew, see `gymnasium.vector.AutoresetMode`.
            max_episode_steps: Steps after which an episode is truncated; None: never.
            options: Arguments of the single environment.
        """
        single = self.kind(**options)
        if not isinstance(num_envs, int) or num_envs < 1 or not isinstance(threads, int) or threads < 1:
            raise InputError(
                f"num_envs and threads must be whole numbers of at least 1, found {show(num_envs)} and {show(threads)}"
            )
        if not single.simulates:
            raise InputError(
                "vector environments simulate; for another backend use gymnasium.make_vec(..., vectorization_mode='sync')"
            )
        self.single, self.num_envs = single, num_envs
        self.metadata = {**self.metadata, "autoreset_mode": AutoresetMode(autoreset_mode)}
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space  # type: ignore[assignment]
        self.observation_space = batch_space(single.observation_space, num_envs)  # type: ignore[assignment]
        self.action_space = batch_space(single.action_space, num_envs)
        self._limit = math.inf if max_episode_steps is None else max_episode_steps
        self._taken = np.zeros(num_envs, dtype=np.int64)
        self._over = np.ones(num_envs, dtype=bool)  # no episode has begun
        self._random = [seeding.np_random(None) for _ in range(num_envs)]
        single.hold(num_envs, threads)

    @property
    def instances(self) -> Sequence[PlacementInstance]:
        """The bank of instances."""
        return self.single.instances

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The random numbers of each environment."""
        return tuple(generator for generator, _ in self._random)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Their seeds."""
        return tuple(seed for _, seed in self._random)

    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Infos]:
        """Begins episodes; options: ``reset_mask`` bool [N] chooses environments, the others are those of the single one."""
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + e for e in range(self.num_envs)]
        seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise InputError(f"seed: expected one number or {self.num_envs}, found {len(seeds)}")
        options = dict(options or {})
        mask = options.pop("reset_mask", np.ones(self.num_envs, dtype=bool))
        if not (isinstance(mask, np.ndarray) and mask.shape == (self.num_envs,) and mask.dtype == np.bool_ and mask.any()):
            raise InputError(f"options['reset_mask'] must be a bool array [{self.num_envs}] with a True")
        rows = np.flatnonzero(mask)
        for e in rows.tolist():
            if seeds[e] is not None:
                self._random[e] = seeding.np_random(seeds[e])
        self._restart(rows, options)
        return self.single.observe(), self._numbers(mask)

    def step(self, actions: NDArray[np.int64]) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], Infos]:
        """Returns one step of every environment; the autoreset mode says what becomes of those whose episode is over."""
        chosen = np.asarray(actions)
        count = self.single.action_space.n  # type: ignore[attr-defined]
        if chosen.shape != (self.num_envs,) or chosen.dtype.kind not in "iu" or not ((chosen >= 0) & (chosen < count)).all():
            raise InputError(f"actions must be whole numbers [{self.num_envs}] in 0..{count - 1}, found {show(actions)}")
        mode = self.metadata["autoreset_mode"]
        begin = np.flatnonzero(self._over)
        if len(begin) and mode is not AutoresetMode.NEXT_STEP:
            raise RuntimeError(f"the episodes of environments {begin.tolist()} are over; call reset()")
        rows = np.flatnonzero(~self._over)
        rewards, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        closing = self.single.advance(rows, chosen.astype(np.int64), rewards)
        terminated[list(closing)] = True
        self._taken[rows] += 1
        truncated = ~self._over & (self._taken >= self._limit)
        if len(begin):
            self._restart(begin, {})
        over = terminated | truncated
        infos = self._numbers(np.ones(self.num_envs, dtype=bool))
        if mode is AutoresetMode.SAME_STEP and over.any():
            last, numbers = self.single.observe(), self.single.index.copy()
            for e in np.flatnonzero(over).tolist():
                final = {"problem": int(numbers[e]), **closing.get(e, {})}
                seen = {name: values[e] for name, values in last.items()}
                infos = self._add_info(infos, {"final_obs": seen, "final_info": final}, e)
            self._restart(np.flatnonzero(over), {})
            infos["problem"] = self.single.index.copy()
        else:
            for e, info in closing.items():
                infos = self._add_info(infos, info, e)
            self._over = over
        return self.single.observe(), rewards, terminated, truncated, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns bool [N, actions], True where an action is legal; never all False in a row."""
        return self.single.state.legal.copy()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the rows of a method of the environments, such as ``action_masks``."""
        return tuple(getattr(self, name)(*args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each environment; all have the same but for the method ``action_masks``."""
        if name == "action_masks":
            return tuple(lambda e=e: self.single.state.legal[e].copy() for e in range(self.num_envs))
        return (getattr(self if hasattr(self, name) else self.single, name),) * self.num_envs

    def _restart(self, rows: NDArray[np.int64], options: dict[str, Any]) -> None:
        """Begins the episodes of some environments."""
        for e in rows.tolist():
            self.single.index[e] = self.single.draw_index(self._random[e][0], options)
        self._over[rows], self._taken[rows] = False, 0
        self.single.begin(rows, self.np_random, options)

    def _numbers(self, mask: NDArray[np.bool_]) -> Infos:
        """Returns the entries of every info: the number of the problem."""
        return {"problem": np.where(mask, self.single.index, 0), "_problem": mask.copy()}

    def close_extras(self, **_: Any) -> None:
        """Ends the threads."""
        self.single.close()


class PlacementVectorEnv(PlacerVectorEnv):
    """N times `rlplace.envs.PlacementEnv`, for ``gymnasium.make_vec("rlplace/Placement-v0", num_envs=N)``."""

    kind = PlacementEnv


class RefinementVectorEnv(PlacerVectorEnv):
    """N times `rlplace.envs.RefinementEnv`, for ``gymnasium.make_vec("rlplace/Refinement-v0", num_envs=N)``."""

    kind = RefinementEnv


def warm_up() -> None:
    """Compiles the kernel of construction, or loads it."""
    PlacementVectorEnv(1, threads=1).reset(seed=0)
