"""Environments on problems at the edge: no time at all, missing links, no memory, groups that may sit nowhere."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlplace.envs import make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.planners.common.evaluate import Execution
from rlplace.problem import Problem, problem_from_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem

IDS = ("rlplace/Placement-v0", "rlplace/Refinement-v0")


def chain(groups: int = 8, devices: int = 3, time_s: Any = 1e-3, size: int = 1000) -> dict[str, Any]:
    off = [[float(i != j) for j in range(devices)] for i in range(devices)]
    return {
        "format": "rlplace.problem",
        "version": 1,
        "devices": [{"name": f"d{i}", "memory_bytes": None} for i in range(devices)],
        "links": {
            "bandwidth_bytes_per_s": [[1e9 * x for x in row] for row in off],
            "latency_s": [[1e-6 * x for x in row] for row in off],
        },
        "groups": [{"name": f"g{i}", "resident_bytes": 10} for i in range(groups)],
        "ops": [{"name": f"o{i}", "group": i, "phase": "forward", "time_s": time_s} for i in range(groups)],
        "tensors": [{"producer": i, "bytes": size, "consumers": [i + 1]} for i in range(groups - 1)],
    }


def problems() -> dict[str, dict[str, Any]]:
    found = {
        "zero": chain(time_s=0.0),
        "all zero": chain(time_s=0.0, size=0),
        "one device": chain(devices=1),
        "one": chain(1, 1),
    }
    for name, size in (("no links", 1000), ("no links, ordering edges", 0)):
        found[name] = chain(size=size)
        found[name]["links"]["bandwidth_bytes_per_s"] = [[0.0] * 3] * 3
    found["one way"] = chain()
    found["one way"]["links"]["bandwidth_bytes_per_s"] = [[0.0, 1e9, 0.0], [0.0, 0.0, 1e9], [0.0] * 3]
    found["no memory"] = chain()
    found["no memory"]["devices"] = [{"name": f"d{i}", "memory_bytes": 50, "reserved_bytes": 50} for i in range(3)]
    found["one device full"] = chain()
    found["one device full"]["devices"][0].update(memory_bytes=50, reserved_bytes=50)
    found["scattered"] = chain()
    for index, op in enumerate(found["scattered"]["ops"]):
        op["time_s"] = [1e-3 if index % 3 == device else None for device in range(3)]
    found["fixed"] = chain()
    for index, group in enumerate(found["fixed"]["groups"]):
        if index % 2:
            group["device"] = index % 3
    found["all fixed"] = chain()
    for index, group in enumerate(found["all fixed"]["groups"]):
        group["device"] = index % 3
    found["tiny and huge"] = chain()
    for index, op in enumerate(found["tiny and huge"]["ops"]):
        op["time_s"] = 10.0 ** (3 * index - 15)
    return found


def collective() -> Problem:
    """Two replicas, free to sit anywhere, whose second ops are one all-reduce on the channels of the first two devices."""
    edges = [(0, 2), (1, 3), (2, 4), (3, 5)]
    return build_problem(
        "collective", time_s=[[1e-3] * 3] * 6, group=[0, 1, 0, 1, 0, 1], memory_bytes=[None] * 3, bandwidth_bytes_per_s=1e9,
        tensors=[TensorSpec(a, 1000, [b]) for a, b in edges], collectives=[([2, 3], [1, 3])],
    )  # fmt: skip


def made(name: str) -> Problem:
    return collective() if name == "collective" else problem_from_dict(problems()[name])


EXECUTIONS = {"plain": Execution(), "4 x 1f1b": Execution(microbatches=4, schedule="1f1b"), "3 x list": Execution(3)}


@pytest.mark.parametrize("name", [*problems(), "collective"])
@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize(("observation", "execution"), [("indexed", "plain"), ("full", "4 x 1f1b"), ("indexed", "3 x list")])
def test_episodes_stay_finite(env_id: str, name: str, observation: str, execution: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instance = make_instance(made(name), execution=EXECUTIONS[execution])
        env = gymnasium.make(env_id, problems=[instance], observation=observation)
        rng = np.random.default_rng(0)
        for _ in range(2):
            seen, _ = env.reset(seed=0)
            for _ in range(100):
                assert env.observation_space.contains(seen)
                assert all(np.isfinite(value).all() for value in seen.values())
                mask = env.unwrapped.action_masks()
                assert mask.any()
                seen, reward, terminated, truncated, info = env.step(int(rng.choice(np.flatnonzero(mask))))
                assert np.isfinite(reward)
                if terminated or truncated:
                    break
            assert terminated
            assert not (info["feasible"] and name == "no memory")


@pytest.mark.parametrize("env_id", IDS)
def test_a_group_that_may_sit_nowhere_is_refused(env_id: str) -> None:
    data = chain()
    data["groups"][2]["device"] = 1
    data["ops"][2]["time_s"] = [1.0, None, 1.0]
    with pytest.raises(InfeasibleError, match="cannot run"):
        gymnasium.make(env_id, problems=[problem_from_dict(data)])


def test_a_plan_off_a_fixed_device_is_refused() -> None:
    data = chain()
    data["groups"][2]["device"] = 1
    env = gymnasium.make("rlplace/Refinement-v0", problems=[problem_from_dict(data)])
    env.reset(seed=0, options={"plan": [1] * 8})
    with pytest.raises(InputError, match="may not sit"):
        env.reset(seed=0, options={"plan": [0] * 8})


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("action", [-1, 99, "x", 1.5, None, 10**30])
def test_actions_outside_the_space_are_refused(env_id: str, action: Any) -> None:
    env = gymnasium.make(env_id, problems=random_problem(0, num_groups=5, num_devices=2)).unwrapped
    env.reset(seed=0)
    with pytest.raises(InputError, match="action"):
        env.step(action)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"problems": [5]}, "found int"), ({"problems": 5}, "found int"), ({"problems": []}, "at least one"),
     ({"backend": "fast"}, "backend"), ({"max_devices": 1}, "max_devices=1"), ({"max_groups": -1}, "max_groups=-1")],
)  # fmt: skip
@pytest.mark.parametrize("env_id", IDS)
def test_bad_arguments_are_refused(env_id: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        gymnasium.make(env_id, **arguments)
