"""The common base of Placement-v0 and Refinement-v0: problems, spaces, episodes, rendering.

One compiled call steps the episodes of N environments on problems of a list. A single environment has one episode; vector
environments (`rlplace.envs.vector`) hold a single one with N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, lru_cache
from typing import Any, TypedDict

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.envs.backends import KEPT, Backend, Evaluation, SimulatedBackend, StepParts
from rlplace.envs.instance import PlacementInstance, make_instance
from rlplace.envs.observation import full_graph, load_and_pinned, observation_space
from rlplace.errors import InputError, show
from rlplace.problem import Problem
from rlplace.simulator import simulate
from rlplace.text import bytes_text, seconds_text

ENVIRONMENTS = PLACEMENT, REFINEMENT, STRATEGY, CLUSTER = (
    "rlplace/Placement-v0", "rlplace/Refinement-v0", "rlplace/Strategy-v0", "rlplace/Cluster-v0",
)  # fmt: skip
"""Ids of the environments; there are others on splits of problems, and `rlplace/Toy-v0`."""

APART = 64
"""Episodes from which several threads step them; fewer are stepped sooner by one."""

_ONE = np.zeros(1, dtype=np.int64)
"""The one episode of a single environment."""


def render_ansi(instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> str:
    """Returns one line per device: groups, work, provable memory, and a bar of the work."""
    load, pinned = load_and_pinned(instance, device_of_group)
    largest = max(float(load.max()), 1e-30)
    lines = []
    for index, device in enumerate(instance.problem.devices):
        count = int((device_of_group == index).sum())
        bar = "#" * round(30 * load[index] / largest)
        work, held = seconds_text(float(load[index])), bytes_text(float(pinned[index]))
        lines.append(f"{device.name:12s} {count:5d} groups {work:>10s} {held:>8s} {bar}")
    left = int((device_of_group < 0).sum())
    return "\n".join([*lines, f"{left} groups not placed"])


def render_rgb(instance: PlacementInstance, device_of_group: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Returns uint8 [height, 640, 3], one row per device with a coloured box per op; white while groups are missing."""
    from rlplace.explanation.report.lanes import empty_image, lanes_of, paint

    if (device_of_group < 0).any():
        return empty_image(instance.problem.num_devices)
    timeline = simulate(instance.problem, device_of_group)
    return paint(lanes_of(instance.problem, timeline))


Observation = dict[str, NDArray[Any]]
Infos = dict[str, Any]
Rows = NDArray[np.int64]


class Common(TypedDict, total=False):
    """Arguments of both environments; see their documentation."""

    backend: Backend | None
    max_devices: int | None
    max_groups: int | None
    observation: str
    render_mode: str | None


class NumberedEnv(gym.Env[Observation, np.int64]):
    """An environment of `num_problems` problems."""

    num_problems: int
    _done: bool

    def _check_action(self, action: Any) -> int:
        if self._done:
            raise RuntimeError("the episode is over; call reset()")
        try:
            known = self.action_space.contains(action)
        except OverflowError:  # a whole number beyond int64, in older gymnasium
            known = False
        if not known:
            raise InputError(f"action {show(action)} is not a whole number in 0..{self.action_space.n - 1}")  # type: ignore[attr-defined]
        return int(action)

    def draw_index(self, random: np.random.Generator, options: dict[str, Any] | None) -> int:
        """Returns the number of the problem of the next episode: ``options["problem"]``, or drawn.

        Raises:
            InputError: The options name no problem.
        """
        if not isinstance(options, (dict, type(None))):
            raise InputError(f"options must be a dictionary, found {show(options)}")
        chosen = (options or {}).get("problem")
        if chosen is None:
            return int(random.integers(self.num_problems))
        if isinstance(chosen, (int, np.integer)) and 0 <= chosen < self.num_problems:
            return int(chosen)
        raise InputError(f"options['problem'] must be a number below {self.num_problems}, found {show(chosen)}")


class PlacerEnv(NumberedEnv):
    """Base of the environments; see the subclasses.

    Attributes:
        count: N, number of episodes that are stepped together.
        threads: Threads that step them.
        index: int64 [N], number of each episode's problem.
    """

    state: Any  # arrays of the episodes, `plan` int32 [N, max_groups] and `legal` bool [N, actions] among them
    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        problems: Sequence[Problem | PlacementInstance] | None,
        *,
        backend: Backend | None = None,
        max_devices: int | None = None,
        max_groups: int | None = None,
        observation: str = "indexed",
        render_mode: str | None = None,
    ) -> None:
        if isinstance(backend, str) or not (backend is None or callable(getattr(backend, "evaluate", None))):
            raise InputError(f"backend must have evaluate, as SimulatedBackend() has, found {show(backend)}")
        if observation not in ("indexed", "full"):
            raise InputError(f"observation must be 'indexed' or 'full', found {observation!r}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise InputError(f"render_mode must be one of {self.metadata['render_modes']}, found {render_mode!r}")
        chosen = _problem_list(problems) if problems is not None else default_instances()
        self.instances = [item if isinstance(item, PlacementInstance) else make_instance(item) for item in chosen]
        self.num_problems = len(self.instances)
        largest = max(instance.problem.num_groups for instance in self.instances)
        widest = max(instance.problem.num_devices for instance in self.instances)
        self.max_groups = largest if max_groups is None else max_groups
        self.max_devices = widest if max_devices is None else max_devices
        if largest > self.max_groups or widest > self.max_devices:
            raise InputError(
                f"the problems have up to {largest} groups and {widest} devices; max_groups={self.max_groups} and "
                f"max_devices={self.max_devices} do not hold them"
            )
        self.backend: Backend = SimulatedBackend() if backend is None else backend
        self.render_mode = render_mode
        self.full = [full_graph(instance, self.max_groups) for instance in self.instances] if observation == "full" else None
        self.simulates = type(self.backend) is SimulatedBackend
        self.parts_of = lru_cache(KEPT)(StepParts)
        self.hold(1, 1)
        self._done = True

    def hold(self, count: int, threads: int) -> None:
        """Makes room for the episodes of `count` environments, before the first one begins."""
        self.count, self.threads, self.index = count, threads, np.zeros(count, dtype=np.int64)

    def _make_spaces(self, candidates: int, features: int) -> None:
        full = self.full is not None
        self.observation_space = observation_space(self.max_groups, candidates, features, full)  # type: ignore[assignment]
        self.action_space = spaces.Discrete(candidates)  # type: ignore[assignment]

    @property
    def instance(self) -> PlacementInstance:
        """The instance of the current episode."""
        return self.instances[self.index[0]]

    def begin(self, rows: Rows, random: Sequence[np.random.Generator], options: Mapping[str, Any]) -> None:
        """Begins the episodes of some environments, whose `index` is set.

        Args:
            rows: int64 [n].
            random: Random numbers of every environment.
            options: Options of `reset`.
        """
        raise NotImplementedError

    def advance(self, rows: Rows, actions: NDArray[np.int64], rewards: NDArray[np.float64]) -> dict[int, Infos]:
        """Steps environments and fills their rewards.

        Args:
            rows: int64 [n].
            actions: int64 [N].
            rewards: float64 [N], changed.

        Returns:
            The last infos of the episodes that end, by environment.
        """
        raise NotImplementedError

    def observe(self) -> Observation:
        """Returns the observations of all environments, each array with a first dimension of N."""
        state = self.state
        seen: Observation = {"graph": self.index.astype(np.int32)[:, None], "device_of_group": state.plan.copy()}
        if (full := self.full) is not None:
            seen |= {key: np.stack([full[i][key] for i in self.index.tolist()]) for key in full[0]}
        seen |= {"candidates": state.table.copy(), "candidate_group": state.group.copy(), "context": state.context.copy()}
        return seen

    @cached_property
    def _pool(self) -> ThreadPoolExecutor | None:
        return ThreadPoolExecutor(self.threads - 1) if self.threads > 1 else None

    def _spread(self, call: Callable[[Rows, int], object], rows: Rows) -> None:
        """Calls ``call(rows, thread)`` for parts of the rows, which run at the same time."""
        if self._pool is None or len(rows) < APART:
            call(rows, 0)
            return
        parts = np.array_split(rows, self.threads)
        others = [self._pool.submit(call, part, number + 1) for number, part in enumerate(parts[1:])]
        call(parts[0], 0)
        for other in others:
            other.result()

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Seed of the random numbers; None goes on with those of before.
            options: ``problem`` chooses the problem by its number; see the environment for others.
        """
        super().reset(seed=seed)
        self._done = True  # until the reset is through
        self.index[0] = self.draw_index(self.np_random, options)
        self.begin(_ONE, [self.np_random], options or {})
        self._done = False
        return self._first(), {"problem": int(self.index[0])}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        rewards = np.zeros(1)
        closing = self.advance(_ONE, np.array([self._check_action(action)]), rewards)
        self._done = bool(closing)
        info = closing.get(0, {"problem": int(self.index[0])})
        return self._first(), float(rewards[0]), self._done, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns bool [number of actions], True where the action is legal; never all False."""
        masks: NDArray[np.bool_] = self.state.legal[0].copy()
        return masks

    def current_plan(self) -> NDArray[np.int32]:
        """Returns int32 [G], the plan so far; -1 where a group is not placed yet."""
        plan: NDArray[np.int32] = self.state.plan[0, : self.instance.problem.num_groups]
        return plan

    def _first(self) -> Observation:
        return {name: values[0] for name, values in self.observe().items()}

    def _padded(self, device_of_group: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns int32 [max_groups], -1 padding: one shape for all problems, also in `info`, which vector environments
        stack.
        """
        padded = np.full(self.max_groups, -1, dtype=np.int32)
        padded[: len(device_of_group)] = device_of_group
        return padded

    def closing_info(self, index: int, step_time_s: float, relative_overflow: float, plan: NDArray[np.int32]) -> dict[str, Any]:
        """Returns the entries of the last info of an episode about its plan.

        Args:
            index: Number of the problem.
            step_time_s: Of the plan.
            relative_overflow: Of the plan.
            plan: int32 [G].
        """
        instance, result = self.instances[index], Evaluation(float(step_time_s), float(relative_overflow))
        parts = self.parts_of(instance)(plan)
        info: dict[str, Any] = {
            "problem": index,
            "feasible": result.feasible,
            "step_time_s": result.step_time_s,
            "relative_overflow": result.relative_overflow,
            "device_of_group": self._padded(plan),
            **{name: np.pad(values, (0, self.max_devices - len(values))) for name, values in parts.items()},
        }
        if result.feasible:
            info["vs_best_baseline"] = result.step_time_s / instance.reference_step_time_s
        return info

    def render(self) -> Any:
        """Returns device loads as text, or a picture of the timeline as uint8 [height, width, 3]."""
        if self.render_mode == "ansi":
            return render_ansi(self.instance, self.current_plan())
        if self.render_mode == "rgb_array":
            return render_rgb(self.instance, self.current_plan())
        return None


def check_moves(start: str, starts: Sequence[str], moves: int, max_moves: int) -> None:
    """Raises InputError where `start` is not in `starts`, or moves are not in their range."""
    if start not in starts:
        raise InputError(f"start must be one of {', '.join(starts)}, found {start!r}")
    if not (isinstance(moves, int) and isinstance(max_moves, int) and moves >= 2 and max_moves >= 1):
        raise InputError(
            f"moves must be a whole number of at least 2 (one is stop) and max_moves of at least 1, found {show(moves)} "
            f"and {show(max_moves)}"
        )


def _problem_list(problems: Any) -> list[Problem | PlacementInstance]:
    if isinstance(problems, (Problem, PlacementInstance)):
        return [problems]
    chosen = list(problems) if isinstance(problems, Iterable) else [problems]
    if not chosen:
        raise InputError("an environment needs at least one problem")
    for item in chosen:
        if not isinstance(item, (Problem, PlacementInstance)):
            raise InputError(f"problems: expected rlplace problems, found {type(item).__name__}; Problem.load reads a file")
    return chosen


@cache
def default_instances() -> tuple[PlacementInstance, ...]:
    """Returns three small random problems, so that ``gymnasium.make`` works without arguments."""
    from rlplace.problem.generate import random_problem

    return tuple(make_instance(random_problem(seed, num_groups=12 + 4 * seed, num_devices=3)) for seed in range(3))


def greedy_fit(instance: PlacementInstance) -> NDArray[np.int32]:
    """Returns a plan made for memory alone: largest groups first, each to the allowed device with the lowest filling
    after it.
    """
    devices = instance.problem.num_devices
    plan = np.zeros(instance.problem.num_groups, dtype=np.int32)
    used = np.zeros(devices)
    capacity = np.where(np.isfinite(instance.limit_bytes), instance.limit_bytes, 1e18)
    for group in np.argsort(-instance.pinned_bytes, kind="stable"):
        filling = (used + instance.pinned_bytes[group] + 1.0) / np.maximum(capacity, 1.0)
        filling[~instance.allowed[group]] = np.inf
        plan[group] = int(np.argmin(filling))
        used[plan[group]] += instance.pinned_bytes[group]
    return plan
