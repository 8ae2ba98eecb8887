"""`PlacerVecEnv`: a vector environment of this package as stable-baselines3 wants one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.envs.vector.base import PlacerVectorEnv
from rlplace.errors import InputError


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
        """An attribute, the same for each."""
        if attr_name == "action_masks":
            return [lambda e=e: self.envs.action_masks()[e] for e in self._chosen(indices)]
        return [
            getattr(self.envs if hasattr(self.envs, attr_name) else self.envs.single, attr_name) for _ in self._chosen(indices)
        ]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refused: environments that are stepped together have no attributes of their own."""
        raise InputError(f"{attr_name} cannot be set: these environments share what they are; make others")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Rows of a method of the vector environment, such as ``action_masks``."""
        rows = getattr(self.envs, method_name)(*method_args, **method_kwargs)
        return list(rows) if indices is None else [rows[e] for e in self._chosen(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """False for each: they are in no wrapper."""
        return [False for _ in self._chosen(indices)]

    def _chosen(self, indices: int | Iterable[int] | None) -> Sequence[int]:
        return range(self.num_envs) if indices is None else [indices] if isinstance(indices, int) else list(indices)
