"""Changes to a priced problem: other device speeds and links, and memory from loose to barely feasible."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import PLAIN, Execution
from rlplace.problem import Links, Problem
from rlplace.simulator import simulate

_SPEED_SPREADS = (0.0, 0.0, 0.15, 0.5)
_LINK_SPREADS = (0.0, 0.0, 0.3, 0.8)
_LINK_FACTORS = (0.25, 1.0, 1.0, 4.0)
_ROUNDS = 6


def vary_hardware(problem: Problem, rng: Generator) -> Problem:
    """The problem with a random factor on the speed of every device and on the bandwidth of every pair of devices.

    Factors are lognormal with a spread that is drawn too and is 0 in half of the draws; all links get one more common factor.
    The result no longer says where it came from, as it is not what its cluster's text says.
    """
    count = problem.num_devices
    slow = np.exp(float(rng.choice(_SPEED_SPREADS)) * rng.standard_normal(count))
    pair = float(rng.choice(_LINK_SPREADS)) * np.triu(rng.standard_normal((count, count)), 1)
    wide = float(rng.choice(_LINK_FACTORS)) * np.exp(pair + pair.T)
    links = problem.links
    return dataclasses.replace(
        problem,
        time_s=problem.time_s * slow,
        links=Links(links.bandwidth_bytes_per_s * wide, links.latency_s, links.channels),
        source=None,
    )


def settle(problem: Problem) -> Problem:
    """The problem with times and links rounded to nine digits: the last bit of a machine's exp does not show."""
    return dataclasses.replace(
        problem,
        time_s=_rounded(problem.time_s),
        links=Links(_rounded(problem.links.bandwidth_bytes_per_s), _rounded(problem.links.latency_s), problem.links.channels),
        tensor_transfer_s={tensor: _rounded(matrix) for tensor, matrix in problem.tensor_transfer_s.items()},
        source=None,
    )


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    flat = [float(f"{value:.9g}") for value in values.ravel().tolist()]
    return np.array(flat, dtype=np.float64).reshape(values.shape)


def limit_memory(
    problem: Problem,
    execution: Execution = PLAIN,
    factor: float | None = None,
    *,
    shares: NDArray[np.float64] | None = None,
) -> Problem:
    """The problem with memory limits that are `factor` times what a contiguous split of the model needs.

    The groups, in topological order, are cut into one span a device, so that the spans' peaks, each relative to its device's
    share of the memory, are nearly equal; the largest of these peaks is the unit. That split is a plan that fits at any factor
    of at least 1: 1 is barely feasible for it, 3 comfortable.

    Args:
        problem: The problem.
        execution: How its steps are executed: micro-batches in flight need memory too.
        factor: See above; None leaves the problem as it is.
        shares: float64 [D], relative memory of the devices; None: as the problem's own limits.
    """
    if factor is None:
        return problem
    limits = problem.memory_limit_bytes
    share = np.array(shares, dtype=np.float64) if shares is not None else np.where(np.isfinite(limits), limits, 1.0)
    share /= share.max()
    reserved = np.array([device.reserved_bytes for device in problem.devices])
    free = dataclasses.replace(
        problem, devices=tuple(dataclasses.replace(device, memory_bytes=None) for device in problem.devices)
    )
    unit = math.inf
    weight = _group_bytes(problem)
    target = share.copy()
    for _ in range(_ROUNDS):
        line = simulate(free, _spans(problem, weight, target), **execution.arguments)
        need = (line.peak_memory_bytes - reserved) / share
        unit = min(unit, float(need.max()))
        target *= (need.mean() / np.maximum(need, 0.05 * need.mean())) ** 0.7
    devices = tuple(
        dataclasses.replace(device, memory_bytes=device.reserved_bytes + math.ceil(factor * unit * part) + 1)
        for device, part in zip(problem.devices, share.tolist(), strict=True)
    )
    return dataclasses.replace(problem, devices=devices)


def _group_bytes(problem: Problem) -> NDArray[np.float64]:
    """float64 [G], resident bytes and bytes of all tensors that a group produces."""
    need = problem.resident_bytes.astype(np.float64)
    is_output = problem.tensor_producer >= 0
    np.add.at(need, problem.op_group[problem.tensor_producer[is_output]], problem.tensor_bytes[is_output])
    return need + 1.0


def _spans(problem: Problem, weight: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.int32]:
    """int32 [G]: groups in topological order, cut so that device d's weight is near its part of `target`."""
    first = np.full(problem.num_groups, problem.num_ops)
    np.minimum.at(first, problem.op_group[problem.topological_order], np.arange(problem.num_ops))
    order = np.argsort(first, kind="stable")
    middle = np.cumsum(weight[order]) - weight[order] / 2
    cuts = np.cumsum(target) / target.sum() * weight.sum()
    devices = np.empty(problem.num_groups, dtype=np.int32)
    devices[order] = np.minimum(np.searchsorted(cuts, middle), problem.num_devices - 1)
    lost = np.flatnonzero(~problem.group_allowed[np.arange(problem.num_groups), devices])
    for group in lost.tolist():  # the nearest device that may hold it
        allowed = np.flatnonzero(problem.group_allowed[group])
        devices[group] = allowed[np.abs(allowed - devices[group]).argmin()]
    return devices
