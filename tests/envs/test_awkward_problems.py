"""Environments on problems at the edge, and the memory that every plan needs."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.envs import make_instance
from rlplace.envs.instance import group_pinned_bytes, group_saved_bytes
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement.common.bounds import largest_op_bytes
from rlplace.problem import BACKWARD, FORWARD, Problem, problem_from_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

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
    """Returns two free replicas whose second ops are one all-reduce on the channels of the first two devices."""
    edges = [(0, 2), (1, 3), (2, 4), (3, 5)]
    return build_problem(
        "collective", time_s=[[1e-3] * 3] * 6, group=[0, 1, 0, 1, 0, 1], memory_bytes=[None] * 3, bandwidth_bytes_per_s=1e9,
        tensors=[TensorSpec(a, 1000, [b]) for a, b in edges], collectives=[([2, 3], [1, 3])],
    )  # fmt: skip


def made(name: str) -> Problem:
    return collective() if name == "collective" else problem_from_dict(problems()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*problems(), "collective"])
@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("observation", ["indexed", "full"])
def test_episodes_stay_finite(env_id: str, name: str, observation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instance = make_instance(made(name))
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


def three_layers():
    """Returns forward ops 0, 1, 2 in groups 0, 1, 2, backward ops 3, 4, 5 in groups 2, 1, 0; layers save 10, 20, 40 bytes."""
    return build_problem(
        "layers", time_s=[[1.0]] * 6, memory_bytes=[None], group=[0, 1, 2, 2, 1, 0], resident_bytes=[1, 2, 3],
        phase=[FORWARD] * 3 + [BACKWARD] * 3, temporary_bytes=[0, 500, 0, 0, 0, 0],
        tensors=[TensorSpec(0, 10, [1, 5]), TensorSpec(1, 20, [2, 4]), TensorSpec(2, 40, [3]), TensorSpec(3, 7, [4]),
                 TensorSpec(4, 8, [5])],
    )  # fmt: skip


def test_what_is_kept_for_the_backward_is_live_at_once():
    problem = three_layers()
    assert group_saved_bytes(problem).tolist() == [10.0, 20.0, 40.0]
    assert group_pinned_bytes(problem).tolist() == [11.0, 22.0, 43.0]


def test_what_several_ops_read_is_kept_once():
    problem = build_problem(
        "twice", time_s=[[1.0]] * 4, memory_bytes=[None], group=[0] * 4, phase=[FORWARD, BACKWARD, BACKWARD, BACKWARD],
        tensors=[TensorSpec(0, 30, [1, 2, 3]), TensorSpec(1, 1, [2]), TensorSpec(2, 1, [3])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [32.0]
    assert simulate(problem, [0]).peak_memory_bytes.tolist() == [32]


def test_an_op_needs_its_inputs_outputs_and_temporaries():
    assert largest_op_bytes(three_layers()).tolist() == [10.0 + 8.0, 10.0 + 20.0 + 500.0, 20.0 + 40.0]


def test_tensors_between_groups_are_nobodys():
    problem = build_problem(
        "apart",
        time_s=[[1.0]] * 2,
        memory_bytes=[None],
        group=[0, 1],
        phase=[FORWARD, BACKWARD],
        tensors=[TensorSpec(0, 9, [1])],
    )
    assert group_saved_bytes(problem).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_pivots_of_each_phase_count(phase):
    """What spans an op in the middle; the other phase has no ops here."""
    problem = build_problem(
        "spans", time_s=[[1.0]] * 3, memory_bytes=[None], group=[0, 0, 0], phase=[phase] * 3,
        tensors=[TensorSpec(0, 30, [2]), TensorSpec(0, 1, [1]), TensorSpec(1, 1, [2])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [32.0]


def test_what_is_read_before_another_is_made_is_not_live_with_it():
    problem = build_problem(
        "turns", time_s=[[1.0]] * 4, memory_bytes=[None], group=[0] * 4, phase=[FORWARD] * 4,
        tensors=[TensorSpec(0, 30, [1]), TensorSpec(1, 1, [2]), TensorSpec(2, 30, [3])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [31.0]
    assert simulate(problem, [0]).peak_memory_bytes.tolist() == [31]


def test_the_pivot_with_the_largest_total_counts():
    """Two branches of forward and backward that do not wait for each other: each is its own pivot."""
    problem = build_problem(
        "branches", time_s=[[1.0]] * 4, memory_bytes=[None], group=[0, 1, 0, 1], phase=[FORWARD, FORWARD, BACKWARD, BACKWARD],
        tensors=[TensorSpec(0, 5, [2]), TensorSpec(1, 50, [3])],
    )  # fmt: skip
    assert group_saved_bytes(problem).tolist() == [0.0, 50.0]


@given(seed=st.integers(0, 10**6))
def test_no_plan_takes_less(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, int(rng.integers(2, 12)), 3)
    devices = rng.integers(0, 3, problem.num_groups)
    line = simulate(problem, devices)
    saved, footprint = group_saved_bytes(problem), largest_op_bytes(problem)
    for device, item in enumerate(problem.devices):
        mine = devices == device
        if mine.any() and line.step_time_s is not None:
            live = max(saved[mine].sum(), footprint[mine].max())
            assert line.peak_memory_bytes[device] >= item.reserved_bytes + problem.resident_bytes[mine].sum() + live
