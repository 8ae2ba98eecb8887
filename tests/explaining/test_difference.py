"""Two plans side by side: blocks and their effects are simulations, renamings change nothing, other problems are refused."""

import dataclasses
import json

import numpy as np
import pytest
from toys import two_device_chain, unlike_pair

import rlplace
from rlplace.errors import InputError
from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def plan(problem, devices, **fields):
    return make_plan(problem, devices, planner=fields.pop("planner", "test"), **fields)


def test_a_plan_does_not_differ_from_itself():
    problem = random_problem(0, 8, 3)
    found = rlplace.diff(problem, *(plan(problem, np.arange(8) % 3) for _ in range(2)))
    assert found.change_s == 0.0 and found.blocks == () and found.same_groups == 8 and found.settings == {}
    assert "8 groups sit alike, 0 differ" in found.text()


def test_blocks_are_moved_one_by_one():
    problem = dataclasses.replace(
        two_device_chain(4).problem, group_names=("a.0.x", "a.0.y", "a.1.x", "b")
    )  # fmt: skip
    first, second = plan(problem, [0, 0, 0, 0]), plan(problem, [0, 0, 1, 1])
    found = rlplace.diff(problem, first, second)
    assert found.change_s == 2.0 and found.same_groups == 2
    effects = {block.module: (block.source, block.destination, block.groups, block.effect_s) for block in found.blocks}
    assert effects == {"a.1": ("gpu0", "gpu1", ("a.1.x",), 4.0), "b": ("gpu0", "gpu1", ("b",), 2.0)}
    assert [block.module for block in found.blocks] == ["a.1", "b"]  # the largest effect first
    assert found.first.path == {"compute": 4.0} and found.second.path == {"compute": 4.0, "transfer": 2.0}


def test_like_devices_may_have_other_names():
    problem = random_problem(1, 12, 3, shape="chain")
    devices = np.repeat([0, 1, 2], 4)
    found = rlplace.diff(problem, plan(problem, devices), plan(problem, np.array([2, 0, 1])[devices]))
    assert found.blocks == () and found.same_groups == 12 and found.change_s == 0.0
    assert found.renamed == {"gpu0": "gpu1", "gpu1": "gpu2", "gpu2": "gpu0"}
    assert found.first.peak_bytes == found.second.peak_bytes
    one_apart = np.array([2, 0, 1])[devices]
    one_apart[0] = 0
    other = rlplace.diff(problem, plan(problem, devices), plan(problem, one_apart))
    assert [len(block.groups) for block in other.blocks] == [1] and other.blocks[0].destination == "gpu1"


def test_unlike_devices_keep_their_names():
    toy = unlike_pair()
    found = rlplace.diff(toy.problem, plan(toy.problem, [0, 1, 1]), plan(toy.problem, [1, 0, 0]))
    assert found.renamed == {} and found.same_groups == 0 and found.change_s == 6.0


def test_settings_that_differ(layers):
    problem = layers(4, devices=2)
    first = plan(problem, [0, 0, 1, 1], microbatches=2, schedule="1f1b")
    found = rlplace.diff(problem, first, plan(problem, [0, 0, 0, 0], replicas=[[0], [1]], recompute=[[0]]))
    assert found.settings == {
        "micro-batches": (2, 1), "schedule": ("1f1b", "list"), "replicas": (1, 2), "recomputed segments": (0, 1),
    }  # fmt: skip
    assert found.second.samples == 2 and "schedule: 1f1b in the first, list in the second" in found.text()
    json.dumps(found.to_dict(), allow_nan=False)


def test_an_infeasible_side(layers):
    problem = layers(3, devices=2, memory=60)
    found = rlplace.diff(problem, plan(problem, [0, 0, 1]), plan(problem, [0, 0, 0]))
    assert (found.first.feasible, found.second.feasible) == (True, False)
    assert not found.blocks[0].feasible and "does not fit alone" in found.text()
    assert found.blocks[0].effect_s == simulate(problem, [0, 0, 0]).step_time_s - found.first.step_time_s


def test_plans_of_two_problems(layers):
    problem, larger = layers(3, devices=2), layers(3, devices=2, inside=20, samples=2)
    first, second = plan(problem, [0, 0, 1]), plan(larger, [0, 1, 1])
    found = rlplace.diff(problem, first, second, other=larger)
    assert any("different problems" in note for note in found.notes) and len(found.blocks) == 1
    assert found.second.samples == 2
    with pytest.raises(InputError, match="plan is for problem"):
        rlplace.diff(problem, first, second)
    with pytest.raises(InputError, match=r"groups differ \(3 and 4, 3 names in common\)"):
        rlplace.diff(problem, first, plan(layers(4, devices=2), [0] * 4), other=layers(4, devices=2))
    with pytest.raises(InputError, match="uses gpu2, which the first's problem does not have"):
        rlplace.diff(problem, first, plan(layers(3, devices=3), [0, 1, 2]), other=layers(3, devices=3))


def test_a_fixed_order_is_said(layers):
    problem = layers(2, devices=2)
    found = rlplace.diff(problem, plan(problem, [0, 1], order=[[0, 2, 4], [1, 3, 5]]), plan(problem, [0, 0]))
    assert found.settings["order given"] == (True, False) and any("run by priority" in note for note in found.notes)
    assert found.blocks[0].effect_s == simulate(problem, [0, 0]).step_time_s - simulate(problem, [0, 1]).step_time_s
