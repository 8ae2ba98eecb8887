"""What makes an infeasible problem fit: exact shortages, and nothing is suggested that was not simulated to fit."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import rlplace
from rlplace.explanation.relax import FIXED, GROUP, NOWHERE, OTHER, STRATEGIES, TOTAL, relax
from rlplace.plan import make_plan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import memory_tight_pair


def by_name(found):
    return {trial.relaxation: trial for trial in found.trials}


def test_the_shortage_on_one_device_is_exact(layers):
    problem = layers(4, memory=80)
    # 16 resident bytes a layer, 10 kept by each forward; at the last of them, what the one before hands on, and its own byte.
    peak = int(simulate(problem, [0] * 4).peak_memory_bytes[0])
    assert peak == 4 * 16 + 4 * 10 + 1
    found = relax(problem, calls=8)
    assert found.shortage.constraint == TOTAL and found.shortage.proven
    assert found.shortage.short_bytes == found.shortage.proven_bytes == peak - 80
    assert found.shortage.device == "gpu0"


def test_activations_are_a_question_of_strategies(layers):
    """Activations of 30 bytes a layer, which only recomputation or a smaller micro-batch frees."""
    problem = layers(6, memory=6 * 16 + 60, inside=30)
    found = relax(problem, calls=8)
    assert found.shortage.short_bytes == 6 * 30 + 1 - 60
    assert found.lines()[-1] == STRATEGIES
    assert not by_name(found)["optimizer sgd, no state"].fits  # it frees 48 bytes
    assert by_name(found)["optimizer sgd, no state"].short_bytes == 6 * 30 + 1 - 60 - 48
    assert not any("more device" in name for name in by_name(found))  # the problem does not say how it would be linked
    assert any(name.endswith("on every device") for name in (trial.relaxation for trial in found.fitting))


def test_the_optimizer_is_what_makes_it_fit(layers):
    problem = layers(4, memory=4 * 16 + 41 - 20)
    found = relax(problem, calls=8)
    assert found.shortage.short_bytes == 20
    assert by_name(found)["optimizer sgd, no state"].fits
    adam = dataclasses.replace(problem, source={"graph": {"optimizer": "adam"}})
    trials = by_name(relax(adam, calls=8))
    assert trials["optimizer momentum, half the state"].short_bytes == 20 - 16  # half of 8 bytes in each of 4 layers
    assert trials["optimizer sgd, no state"].fits


def test_one_more_device_is_enough(layers):
    problem = layers(6, devices=2, memory=70)
    found = relax(problem, calls=64)
    assert found.shortage.constraint == TOTAL and found.shortage.proven_bytes == 6 * 16 + 6 * 10 - 140
    trial = by_name(found)["1 more device like gpu0"]
    assert trial.fits and trial.peak_bytes <= 70


def test_a_smaller_batch(layers):
    problem = layers(4, memory=4 * 16 + 45, samples=4)

    def at(samples):
        return layers(4, memory=4 * 16 + 45, samples=samples)

    found = relax(problem, at=at, calls=8)
    trials = by_name(found)
    assert not trials["a batch of 2"].fits and trials["a batch of 1"].fits
    assert trials["a batch of 1"].samples == 1 and trials["a batch of 1"].step_time_s == 4 * 3 + 4 * 0.5
    assert not any("batch" in name for name in by_name(relax(problem, calls=8)))  # that needs the model


def test_a_group_that_is_too_large_wants_finer_groups():
    def halves(parts):
        return build_problem(
            "large", time_s=[[1.0, 1.0]] * parts, tensors=[], memory_bytes=[10, 10], resident_bytes=[12 // parts] * parts
        )

    found = relax(halves(1), finer=lambda: halves(2), calls=8)
    assert found.shortage.constraint == GROUP and found.shortage.proven_bytes == 2
    assert by_name(found)["2 groups instead of 1"].fits
    assert not any("more device" in name for name in by_name(found))  # the group is too large for every device
    assert any(trial.relaxation.endswith("on every device") for trial in found.fitting)


def test_groups_fixed_to_a_device():
    problem = build_problem(
        "fixed", time_s=[[1.0, 1.0]] * 2, tensors=[], memory_bytes=[10, 100], resident_bytes=[6, 6], group_device=[0, 0]
    )
    found = relax(problem, calls=8)
    assert (found.shortage.constraint, found.shortage.device, found.shortage.short_bytes) == (FIXED, "gpu0", 2)


def test_what_no_memory_can_help():
    problem = build_problem("nowhere", time_s=[[np.nan, 1.0], [1.0, np.nan]], tensors=[], memory_bytes=[1, 1], group=[0, 0])
    found = relax(problem)
    assert found.shortage.constraint == NOWHERE and found.trials == () and found.shortage.proven_bytes == 0
    assert "no plan can meet it" in "\n".join(found.lines())


def test_a_plan_that_does_not_fit_where_another_does():
    toy = memory_tight_pair()
    plan = make_plan(toy.problem, [0, 0], planner="test")
    found = rlplace.explain(toy.problem, plan, calls=8)
    assert not found.feasible and found.what_if == ()
    assert found.relaxations.shortage.short_bytes == 5 and found.relaxations.shortage.device == "gpu0"
    assert not found.relaxations.shortage.proven
    (trial,) = found.relaxations.trials
    assert trial.relaxation == "another plan" and trial.fits and trial.step_time_s == 5.0
    assert "another plan" in found.text() and json.dumps(found.to_dict(), allow_nan=False)


def test_a_plan_where_ops_cannot_run():
    problem = build_problem("null", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None])
    found = rlplace.explain(problem, make_plan(problem, [1], planner="test"))
    assert found.bounds is None and found.relaxations.shortage.constraint == OTHER
    assert [t.relaxation for t in found.relaxations.fitting] == ["another plan"]
    assert "sit where they cannot run" in found.text()


def test_nothing_helps():
    """One op needs more than eight times the memory, and there is nothing to leave out."""
    problem = build_problem(
        "hopeless", time_s=[[1.0]] * 2, tensors=[TensorSpec(0, 100, [1])], memory_bytes=[10], phase=[0, 1], group=[0, 0]
    )
    found = relax(problem, calls=8)
    assert found.fitting == () and "nothing that was tried makes it fit" in found.lines()
    assert all(trial.short_bytes > 0 for trial in found.trials)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_proven_holds_for_every_plan(seed):
    """Of all 32 plans none lacks less than what is said of every plan."""
    problem = random_problem(seed, 5, 2, memory_factor=0.55 + 0.08 * seed)
    found = relax(problem, calls=0)
    limits = np.array([device.memory_bytes for device in problem.devices])
    least = min(
        int(np.maximum(simulate(problem, devices).peak_memory_bytes - limits, 0).sum())
        for devices in itertools.product(range(2), repeat=5)
    )
    assert found.shortage.proven_bytes <= least and (least > 0 or not found.shortage.proven)
