"""Alternatives of groups: every figure is that of a simulation, and the verdict is honest."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlplace
from rlplace.errors import InputError
from rlplace.explanation.alternatives import alternatives, named_groups, weighty_groups
from rlplace.plan import make_plan
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.simulator.simulated_plan import run_plan
from tests.toys import memory_tight_pair, two_branches, unlike_pair


def choices(problem, devices, members, **fields):
    return alternatives(run_plan(problem, make_plan(problem, devices, planner="test", **fields)), members)


def test_a_group_that_fits_nowhere_else_says_how_many_bytes_are_short():
    toy = memory_tight_pair()
    (choice,) = choices(toy.problem, [0, 1], {"group1": [1]})
    assert choice.feasible and choice.better is None and choice.step_time_s == 5.0
    (other,) = choice.alternatives
    assert (other.device, other.feasible, other.step_time_s) == ("gpu0", False, 2.0)
    assert other.peak_bytes == 15 and "5 short" in other.reason
    assert choice.verdict.startswith("no other device is possible: gpu0 needs 15 bytes and has 10, 5 short")


def test_an_optimum_has_no_better_place():
    toy = two_branches()
    names = {name: [group] for group, name in enumerate(toy.problem.group_names)}
    found = choices(toy.problem, toy.optimal_device_of_group, names)
    assert len(found) == 7 and all(choice.better is None for choice in found)
    assert sum(choice.path_s for choice in found) == pytest.approx(toy.optimal_step_s)


def test_a_better_place_is_named():
    toy = unlike_pair()
    (choice,) = choices(toy.problem, [1, 1, 1], {"group0": [0]})
    assert choice.better is not None and choice.better.device == "gpu0" and choice.better.step_time_s == 6.0
    assert choice.verdict == "gpu0 would be better: 3000.000 ms less"


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_figures_are_those_of_simulations_and_causes_add_up(seed):
    problem = random_problem(seed, 10, 3, memory_factor=1.5)
    rng = np.random.default_rng(seed)
    devices = rng.integers(0, 3, 10)
    group = int(rng.integers(10))
    (choice,) = choices(problem, devices, {"it": [group]})
    assert {a.device for a in choice.alternatives} | {choice.device} == {"gpu0", "gpu1", "gpu2"}
    for other in choice.alternatives:
        there = devices.copy()
        there[group] = int(other.device[3:])
        line = simulate(problem, there)
        assert other.step_time_s == line.step_time_s and other.feasible == line.feasible
        assert other.peak_bytes == line.peak_memory_bytes[there[group]]
        assert sum(other.changes.values()) == pytest.approx(line.step_time_s - choice.step_time_s, abs=1e-12)
    if choice.better is not None and choice.feasible:
        assert choice.better.step_time_s < choice.step_time_s


def test_where_a_group_may_not_sit():
    problem = build_problem(
        "bars", time_s=[[1.0, np.nan], [1.0, 1.0]], tensors=[], memory_bytes=[None, None], group_device=[-1, 0]
    )
    first, second = choices(problem, [0, 0], {"a": [0], "b": [1]})
    assert first.alternatives[0].reason == "cannot run on gpu1" and second.alternatives[0].reason == "fixed to gpu0"
    assert first.verdict == "no other device is possible: cannot run on gpu1"


def test_groups_are_found_by_name_or_module(layers):
    problem = dataclasses.replace(layers(3), group_names=("h.0.attn", "h.0.attn#2", "h.1.mlp"))
    assert named_groups(problem, "h.0.attn#2") == {"h.0.attn#2": [1]}
    assert named_groups(problem, "h.0") == {"h.0": [0, 1]}
    with pytest.raises(InputError, match=r"unknown group or module 'h.1.mlq'; did you mean 'h.1.mlp'"):
        named_groups(problem, "h.1.mlq")


def test_a_module_moves_as_a_whole(layers):
    problem = layers(4, devices=2)
    (choice,) = choices(problem, [0, 0, 1, 1], {"half": [0, 1]})
    assert choice.groups == 2 and choice.device == "gpu0"
    assert choice.alternatives[0].step_time_s == simulate(problem, [1, 1, 1, 1]).step_time_s
    parts = choices(problem, [0, 0, 1, 1], {"all": [0, 1, 2, 3]})
    assert [(part.device, part.groups) for part in parts] == [("gpu0", 2), ("gpu1", 2)]
    assert parts[0].alternatives == choice.alternatives


def test_a_fixed_order_is_left_out_and_said_so(layers):
    problem = layers(2, devices=2)
    plan = make_plan(problem, [0, 1], planner="test", order=[[0, 2, 4], [1, 3, 5]])
    found = rlplace.explain(problem, plan, groups=1, hardware=False)
    assert any("fixes the order" in note for note in found.notes)
    assert found.groups[0].step_time_s == simulate(problem, [0, 1]).step_time_s


def test_the_groups_that_matter_most():
    problem = random_problem(1, 12, 2)
    run = run_plan(problem, make_plan(problem, np.arange(12) % 2, planner="test"))
    chosen = weighty_groups(run, 6)
    assert len(chosen) == 6 and all(problem.group_names[groups[0]] == name for name, groups in chosen.items())
    largest = problem.group_names[int(problem.resident_bytes.argmax())]
    assert largest in chosen


def test_large_clusters_are_looked_at_in_part():
    problem = build_problem("wide", time_s=[[1.0] * 40] * 3, tensors=[], memory_bytes=[None] * 40)
    found = rlplace.explain(problem, make_plan(problem, [39, 38, 39], planner="test"), groups=1, hardware=False)
    tried = {a.device for a in found.groups[0].alternatives} | {found.groups[0].device}
    assert len(tried) == 32 and {"gpu38", "gpu39"} <= tried
    assert any("32 of 40 devices" in note for note in found.notes)
