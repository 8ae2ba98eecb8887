"""Devices have no numbers that count, from the timeline to the logits of moves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import renumbered

from rlplace.agents.bank import graph_tensors
from rlplace.agents.construct import construct
from rlplace.envs import make_instance
from rlplace.envs.guide.features import move_features
from rlplace.envs.guide.guide import Guide
from rlplace.planners.common.evaluate import Execution
from rlplace.problem.generate import random_problem


def logits_of(network, guide, count):
    with torch.no_grad():
        embed = network.encode(graph_tensors(guide.instance))
        first = torch.from_numpy(guide.groups[guide.ptr[:count]].astype(np.int64))
        return network.scores(torch.from_numpy(guide.table[:count]), embed[first])[0].numpy()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_moves(make_network, seed, microbatches):
    problem = random_problem(
        seed, num_groups=18, num_devices=4, unlike=seed % 2 == 1, memory_factor=(None, 1.6)[seed // 2], null_fraction=0.1
    )
    rng = np.random.default_rng(seed)
    new = rng.permutation(4).astype(np.int32)
    run = Execution(microbatches=microbatches)
    one, two = (
        Guide(make_instance(item, compute_floor=False, execution=run), 64, 3) for item in (problem, renumbered(problem, new))
    )
    plan = np.array([rng.choice(np.flatnonzero(row)) for row in problem.group_allowed], dtype=np.int32)
    one.look(plan)
    two.look(new[plan])
    assert len(set(one.view.load)) == 4  # of devices that are equally idle, a remedy would name the first two
    count = one.draw(plan)
    two.ptr[:], two.groups[:], two.kinds[:] = one.ptr, one.groups, one.kinds
    used = one.ptr[count]
    two.targets[:used] = new[one.targets[:used]]
    move_features(
        *two.arguments, new[plan], two.ptr, two.groups, two.targets, two.kinds, count, microbatches, new[plan], two.table
    )
    network = make_network(layers=2, seed=seed)
    assert np.abs(logits_of(network, one, count) - logits_of(network, two, count)).max() < 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_the_plan_that_is_constructed(make_network, seed):
    problem = random_problem(seed + 10, num_groups=12, num_devices=3, memory_factor=2.0)
    problem = replace(problem, time_s=problem.time_s * [1.0, 1.3, 1.7])  # between equal devices the lower number wins
    new = np.random.default_rng(seed).permutation(3).astype(np.int32)
    network = make_network("placement", layers=1, seed=seed)
    one, two = (
        construct(make_instance(item, compute_floor=False), network, np.random.default_rng(0), greedy=True)
        for item in (problem, renumbered(problem, new))
    )
    assert two.tolist() == new[one].tolist()
