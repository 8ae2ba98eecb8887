"""A plan that ran out of memory makes the fullest device smaller, and nothing else."""

import dataclasses

import numpy as np
import pytest

from rlplace.agents.tuning.belief import with_less_room
from rlplace.measured.trial import Trial
from rlplace.planners.common.evaluate import PLAIN
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

PROBLEM = random_problem(5, 10, 2, memory_factor=4.0)


def trial(plan, status):
    steps = (1.0,) if status == "done" else ()
    return Trial(PROBLEM.fingerprint, "", tuple(map(int, plan)), 1, "list", status, steps)


ALL_ON = [np.full(10, device, dtype=np.int32) for device in (0, 1)]


def test_nothing_failed_nothing_changes():
    assert with_less_room(PROBLEM, [trial(ALL_ON[0], "done"), trial(ALL_ON[1], "crashed")], PLAIN) is PROBLEM


@pytest.mark.parametrize("device", [0, 1])
def test_the_failed_plan_no_longer_fits(device):
    smaller = with_less_room(PROBLEM, [trial(ALL_ON[device], "out_of_memory")], PLAIN)
    assert not simulate(smaller, ALL_ON[device]).feasible
    assert smaller.devices[1 - device] == PROBLEM.devices[1 - device]
    unlimited = dataclasses.replace(PROBLEM, devices=tuple(dataclasses.replace(d, memory_bytes=None) for d in PROBLEM.devices))
    limited = with_less_room(unlimited, [trial(ALL_ON[device], "out_of_memory")], PLAIN)
    assert limited.devices[device].memory_bytes is not None and limited.devices[1 - device].memory_bytes is None


def test_what_has_worked_still_fits():
    almost = ALL_ON[0].copy()
    almost[np.argmin(PROBLEM.resident_bytes)] = 1
    smaller = with_less_room(PROBLEM, [trial(ALL_ON[0], "out_of_memory"), trial(almost, "done")], PLAIN)
    assert simulate(smaller, almost).feasible
