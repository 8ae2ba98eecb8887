"""The static partition of `compiler`: exact on small graphs, against METIS, in stages, and what its objective is good for."""

import itertools

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.placement.published.compiler import Partitioner, fm, partition
from rlplace.placement.published.compiler.nets import problem_nets
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem


def sent_seconds(problem, devices):
    """Returns all transfers of a plan one after another, straight from the problem."""
    total = 0.0
    for tensor in range(problem.num_tensors):
        producer, owner = problem.tensor_producer[tensor], problem.tensor_owner[tensor]
        source = int(devices[problem.op_group[producer] if producer >= 0 else owner])
        readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
        for to in {int(devices[problem.op_group[reader]]) for reader in readers} - {source}:
            total += problem.links.transfer_s(source, to, int(problem.tensor_bytes[tensor]))
    return total


def loads(problem, devices):
    seconds = problem.group_time_s[np.arange(problem.num_groups), devices]
    return np.bincount(devices, weights=seconds, minlength=problem.num_devices)


@pytest.mark.parametrize("seed", range(24))
def test_small_partitions_are_optimal(seed):
    """Against every assignment whose loads respect the same limit: nothing has a smaller cut."""
    count = 2 + seed % 2
    groups, eps = 9 - 2 * (count == 3), 0.3
    shape = ("layered", "branchy", "chain")[seed % 3]
    problem = random_problem(seed, groups, count, shape=shape, shared_parameters=seed % 2, hosts=count if seed % 5 == 4 else 1)
    found = partition(problem, eps=eps)
    time_s = problem.group_time_s[:, 0]
    limit = max(time_s.sum() / count * (1 + eps), time_s.max()) * (1 + 1e-9)
    every = [np.array(d) for d in itertools.product(range(count), repeat=groups)]
    cuts = [sent_seconds(problem, d) for d in every if loads(problem, d).max() <= limit]
    assert found.cut_s == pytest.approx(sent_seconds(problem, found.device_of_group), abs=1e-15)
    if cuts:
        assert loads(problem, found.device_of_group).max() <= limit
        assert found.cut_s == pytest.approx(min(cuts), rel=1e-9, abs=1e-12)
    else:
        assert found.imbalance > eps


@pytest.mark.parametrize("groups", [900, 2500])
def test_two_passes_end_the_excess_of_everything_on_one_device(groups):
    """Small graphs take the best move of all, large ones one cell after another; loads and bytes are added up here again."""
    problem = random_problem(0, groups, 4, memory_factor=1.6)
    partitioner, part = Partitioner(problem, list(range(4)), 0.1, 1), np.zeros(groups, dtype=np.int32)
    for _ in range(2):
        assert fm.refine(part, False, groups, partitioner.level, partitioner.machine)
    assert (loads(problem, part) <= partitioner.limit[:, 0] * (1 + 1e-8)).all()
    assert (np.bincount(part, partitioner.level.footprint_bytes, 4) <= problem.memory_limit_bytes).all()


def two_cliques(size):
    """Returns two cliques of equal ops, all exchanging 4 bytes, joined by one byte."""
    tensors = []
    for first in (0, size):
        tensors += [TensorSpec(first + i, 4, list(range(first + i + 1, first + size))) for i in range(size - 1)]
    tensors.append(TensorSpec(0, 1, [size]))
    return build_problem("two_cliques", time_s=[[1.0, 1.0]] * (2 * size), tensors=tensors, memory_bytes=[None, None])


@pytest.mark.parametrize("size", [3, 8, 40])
def test_two_cliques_part_at_their_one_link(size):
    """The optimum: any other balanced split sends 4 bytes at least."""
    found = partition(two_cliques(size), eps=0.05)
    assert found.cut_s == 1.0 and found.imbalance == 0.0


def test_memory_is_respected_where_balance_alone_would_not():
    """Equal times, one heavy group among light ones: the heavy one needs a device to itself."""
    problem = build_problem(
        "heavy",
        time_s=[[1.0, 1.0]] * 4,
        tensors=[TensorSpec(i, 5 if i == 0 else 1, [i + 1]) for i in range(3)],
        memory_bytes=[100, 100],
        resident_bytes=[95, 10, 10, 10],
    )
    found = partition(problem, eps=1.0)
    heavy = found.device_of_group[0]
    assert (found.device_of_group == heavy).sum() == 1  # a cut of 5, although others cost 1


def test_nets_of_equal_readers_are_one():
    tensors = [TensorSpec(0, 3, [1, 2]), TensorSpec(0, 4, [2, 1]), TensorSpec(0, 5, [1])]
    nets = problem_nets(build_problem("three", time_s=[[1.0, 1.0]] * 3, tensors=tensors, memory_bytes=[None, None]))
    assert nets.size_bytes.tolist() == [7.0, 5.0] and nets.tensors.tolist() == [2.0, 1.0]


def test_groups_without_traffic_are_balanced():
    problem = build_problem("alone", time_s=[[1.0, 1.0]] * 8, tensors=[], memory_bytes=[None, None])
    found = partition(problem)
    assert found.cut_s == 0.0 and found.imbalance == 0.0


def test_faster_devices_get_more():
    problem = build_problem("unlike", time_s=[[1.0, 3.0]] * 40, tensors=[], memory_bytes=[None, None])
    assert np.bincount(partition(problem).device_of_group).tolist() == [30, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": [0, 0]}, "distinct"), ({"devices": [7]}, "0..3"),
        ({"eps": 0.0}, "eps must be above 0"), ({"bands": 0}, "bands at least 1"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        partition(random_problem(0, 8, 4), **arguments)
