"""Device maps of accelerate, in and out, and rounding of plans to modules."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch

import rlplace
from rlplace.errors import InputError
from rlplace.plan import PlacementPlan
from rlplace.plan.device_map import device_of_loss, device_of_op, round_to_modules, to_device_map
from rlplace.runtime.export.device_maps import complete_device_map, plan_from_device_map
from tests.runtime import small_models


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return small_models.gpt2()[0]


@pytest.fixture(scope="module")
def problem(model):
    inputs = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8, dtype=torch.long)}
    return rlplace.price(rlplace.capture(model, inputs), "h100:3,pcie", groups=40)


def devices_of(plan, prefix):
    """Devices of the groups that hold ops of a module and none of others."""
    found = set()
    for group, device in zip(plan.groups, plan.device_of_group.tolist(), strict=True):
        paths = {op.rpartition("/")[0] for op in group["ops"]}
        if paths and all(f"{path}.".startswith(f"{prefix}.") for path in paths):
            found.add(device)
    return found


LAYERS = {
    "transformer.wte": 0,
    "transformer.wpe": 0,
    "transformer.h.0": 0,
    "transformer.h.1": 2,
    "transformer.ln_f": 2,
    "lm_head": 0,
}


def test_a_map_that_accelerate_made_is_scored(model, problem):
    from accelerate import infer_auto_device_map

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    found = infer_auto_device_map(model, max_memory={0: size // 2, 1: size, 2: size})
    assert len(set(found.values())) > 1
    plan = plan_from_device_map(problem, found, model=model)
    line = rlplace.simulate(problem, plan)
    assert plan.predicted.feasible and plan.predicted.step_time_s == line.step_time_s
    inside = {path: devices_of(plan, path) for path in found}
    assert all(devices <= {found[path]} for path, devices in inside.items())
    assert {device for devices in inside.values() for device in devices} == set(found.values())


def test_most_specific_entry_wins_and_values_may_be_text(problem):
    everything = plan_from_device_map(problem, {"": 1})
    assert set(everything.device_of_group.tolist()) == {1}
    mixed = plan_from_device_map(problem, {"": "cuda:1", "transformer.h": torch.device("cuda", 2), "transformer.h.1": "0"})
    assert devices_of(mixed, "transformer.h.0") == {2} and devices_of(mixed, "transformer.h.1") == {0}
    assert set(mixed.device_of_group.tolist()) == {0, 1, 2}
    named = plan_from_device_map(problem, {"": "b", "transformer.h.1": "c"}, devices=["a", "b", "c"])
    assert devices_of(named, "transformer.h.1") == {2} and devices_of(named, "transformer.h.0") == {1}


def test_out_and_in_again_is_the_same_plan(sim, model, problem):
    from accelerate import dispatch_model
    from accelerate.utils import check_device_map

    plan = plan_from_device_map(problem, LAYERS)
    found = complete_device_map(plan, model)
    check_device_map(model, found)
    again = plan_from_device_map(problem, found, model=model)
    np.testing.assert_array_equal(again.device_of_group, plan.device_of_group)
    assert again.predicted.step_time_s == plan.predicted.step_time_s

    torch.manual_seed(1)
    inputs = small_models._text()
    placed = copy.deepcopy(model)
    named = complete_device_map(plan, model, [torch.device(name) for name in sim(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = dispatch_model(placed, named, force_hooks=True)
    assert {p.device for p in placed.parameters()} == {torch.device("sim:0"), torch.device("sim:2")}
    ours, theirs = placed(**inputs).loss, model(**inputs).loss
    torch.testing.assert_close(ours.detach().to("cpu"), theirs.detach())


def test_parameters_beside_children_get_an_entry(problem):
    class Beside(torch.nn.Module):
        """A parameter of its own, children on two devices, a module that never runs."""

        def __init__(self):
            super().__init__()
            self.token = torch.nn.Parameter(torch.zeros(4))
            self.a, self.b, self.idle = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.b(self.a(x + self.token)).sum()

    model = Beside()
    own = rlplace.price(rlplace.capture(model, (torch.ones(2, 4),)), "h100:2", groups=10)
    plan = plan_from_device_map(own, {"token": 1, "a": 1, "b": 0, "idle": 0}, model=model)
    assert devices_of(plan, "a") == {1} and devices_of(plan, "b") == {0}
    found = complete_device_map(plan, model)
    from accelerate.utils import check_device_map

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that "token" is no module
        check_device_map(model, found)
    assert found["a"] == 1 and found["b"] == 0 and {"token", "idle"} <= found.keys()
    assert plan_from_device_map(own, found, model=model).device_of_group.tolist() == plan.device_of_group.tolist()


def test_refusals(model, problem):
    for device_map, message in (
        ({}, "expected a dict of device by module path"),
        ({"": "disk"}, "loaded anew in every step, which is not simulated"),
        ({"": 3}, "3 is no device of the problem; it has 0, 1, 2"),
        ({"": "cpu"}, "'cpu' is no device of the problem"),
        ({"": 1.5}, "1.5 is no device; give a number"),
        ({"": 0, "transformer.hh.1": 1}, "did you mean 'transformer.h.1'.*give model= as well"),
        (
            {key: value for key, value in LAYERS.items() if key != "transformer.h.1"},
            "no entry covers 'transformer.h.1.*weights",
        ),
    ):
        with pytest.raises(InputError, match=message):
            plan_from_device_map(problem, device_map)
    with pytest.raises(InputError, match=r"did you mean 'transformer\.drop'"):
        plan_from_device_map(problem, {"": 0, "transformer.dropp": 1}, model=model)
    assert plan_from_device_map(problem, {"": 0, "transformer.drop": 1}, model=model).device_of_group.size
    with pytest.raises(InputError, match="2 devices named, the problem has 3"):
        plan_from_device_map(problem, {"": 0}, devices=[0, 1])
    with pytest.raises(InputError, match="the plan uses 3 devices, 1 named"):
        complete_device_map(plan_from_device_map(problem, LAYERS), model, ["cuda:0"])
    with pytest.raises(InputError, match="does not list the modules of its groups"):
        plan_from_device_map(dataclasses.replace(problem, group_ops=None, group_modules=None), {"": 0})
    tight = dataclasses.replace(
        problem, devices=tuple(dataclasses.replace(d, memory_bytes=1000, reserved_bytes=0) for d in problem.devices)
    )
    assert plan_from_device_map(tight, {"": 0}).predicted.feasible is False


def plan(ops, devices, **fields):
    groups = [{"name": f"g{i}", "modules": [], "ops": names} for i, names in enumerate(ops)]
    return PlacementPlan("0" * 64, "test", 0, np.array(devices, dtype=np.int32), **{"groups": groups, **fields})


def test_modules_go_where_most_of_their_ops_are():
    rounded = round_to_modules(plan([["a/x", "a/y"], ["a/z", "b/x"], ["b/y", "add"]], [0, 1, 2]))
    assert rounded.device_of_module == {"a": 0, "b": 1, "": 2}  # b is a tie: the lower device
    assert (rounded.ops, rounded.ops_moved) == (6, 2)


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
