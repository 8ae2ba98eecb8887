"""Rounding plans to modules and to accelerate's device maps."""

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.plan import PlacementPlan
from rlplace.plan.device_map import device_of_loss, device_of_op, round_to_modules, to_device_map


def plan(ops, devices, **fields):
    groups = [{"name": f"g{i}", "modules": [], "ops": names} for i, names in enumerate(ops)]
    return PlacementPlan("0" * 64, "test", 0, np.array(devices, dtype=np.int32), **{"groups": groups, **fields})


def test_modules_go_where_most_of_their_ops_are():
    rounded = round_to_modules(plan([["a/x", "a/y"], ["a/z", "b/x"], ["b/y", "add"]], [0, 1, 2]))
    assert rounded.device_of_module == {"a": 0, "b": 1, "": 2}  # b is a tie: the lower device
    assert (rounded.ops, rounded.ops_moved, rounded.modules_split) == (6, 2, 2)


def test_modules_under_two_paths_vote_once():
    rounded = round_to_modules(plan([["a/x"], ["b/y", "b/z"]], [0, 1]), {"a": "a", "b": "a"})
    assert rounded.device_of_module == {"a": 1}


def test_groups_without_ops_place_their_modules():
    groups = [{"name": "0", "modules": ["a", "b"]}, {"name": "1", "modules": ["c"]}]
    rounded = round_to_modules(plan([], [1, 0], groups=groups))
    assert rounded.device_of_module == {"a": 1, "b": 1, "c": 0}


def test_loss_function_is_no_op_of_the_model():
    with_loss = plan([["a/x"], ["loss_fn"]], [0, 1])
    assert device_of_op(with_loss) == {"a/x": 0}
    assert device_of_loss(with_loss) == 1
    assert device_of_loss(plan([["a/x"]], [0])) is None


def test_device_map_merges_subtrees():
    ops = [["emb/e", "h.0.attn/q", "h.0/add", "h.0.mlp/m"], ["h.1.attn/q"], ["h.1.mlp/m", "h.1/add", "head/l"]]
    assert to_device_map(plan(ops, [0, 1, 2])) == {"emb": 0, "head": 2, "h.0": 0, "h.1.attn": 1, "h.1.mlp": 2}
    assert to_device_map(plan(ops, [1, 1, 1])) == {"": 1}


def test_a_plan_without_groups_is_refused():
    with pytest.raises(InputError, match="made from a problem file"):
        to_device_map(plan([], [0], groups=None))


def test_accelerate_accepts_the_map():
    accelerate = pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    made = to_device_map(plan([["0/linear"], ["1.0/linear", "1.1/relu"]], [0, 1]))
    assert made == {"0": 0, "1": 1}
    accelerate.utils.modeling.check_device_map(model, made)
