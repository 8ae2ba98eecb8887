"""The problems that the agent is trained on: an endless stream, reproducible case by case, in bounded memory.

A case is drawn from its seed and its number alone, so that a run can resume anywhere and processes can share a stream. A
bounded number of captured models, new ones every `REFRESH` cases, is grouped, priced and executed anew for every case; the
other cases are synthetic graphs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.agents.problems.cases import ProblemCase, is_branchy
from rlplace.agents.problems.graphs import FAMILIES, Recipe, draw_cluster, draw_hosts, draw_size, priced, variant
from rlplace.cluster.links import Links
from rlplace.envs.instance import group_made_bytes
from rlplace.errors import unknown_name
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

_SPEED_SPREADS = (0.0, 0.0, 0.15, 0.5)
_LINK_SPREADS = (0.0, 0.0, 0.3, 0.8)
_LINK_FACTORS = (0.25, 1.0, 1.0, 4.0)
_ROUNDS = 6


def vary_hardware(problem: Problem, rng: Generator) -> Problem:
    """Returns the problem with a random factor on the speed of every device and on the bandwidth of every pair of devices.

    Factors are lognormal with a spread that is drawn too and is 0 in half of the draws; all links get one more common factor.
    The result has no source, as it no longer is what its cluster's text describes.
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
    """Returns the problem with times and links rounded to nine digits: the last bit of a machine's exp does not show."""
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
    factor: float | None = None,
    *,
    shares: NDArray[np.float64] | None = None,
) -> Problem:
    """Returns the problem with memory limits that are `factor` times what a contiguous split of the model needs.

    The groups, in topological order, are cut into one span a device, so that the spans' peaks, each relative to its device's
    share of the memory, are nearly equal; the largest of these peaks is the unit. That split is a plan that fits at any factor
    of at least 1: 1 is barely feasible for it, 3 comfortable.

    Args:
        problem: The problem.
        factor: Memory relative to that of a contiguous split; None leaves the problem unchanged.
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
    weight = group_made_bytes(problem) + 1.0
    target = share.copy()
    for _ in range(_ROUNDS):
        line = simulate(free, _spans(problem, weight, target))
        need = (line.peak_memory_bytes - reserved) / share
        unit = min(unit, float(need.max()))
        target *= (need.mean() / np.maximum(need, 0.05 * need.mean())) ** 0.7
    devices = tuple(
        dataclasses.replace(device, memory_bytes=device.reserved_bytes + math.ceil(factor * unit * part) + 1)
        for device, part in zip(problem.devices, share.tolist(), strict=True)
    )
    return dataclasses.replace(problem, devices=devices)


def _spans(problem: Problem, weight: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns int32 [G]: groups in topological order, cut so that device d's weight is near its part of `target`."""
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


SYNTHETIC = "synthetic"
SHAPES = ("layered", "branchy", "chain")
"""Shapes of synthetic graphs that training sees."""
ALL_FAMILIES = (*FAMILIES, SYNTHETIC)
ZOO_FAMILIES = (*(name for name in FAMILIES if name.startswith("zoo:")), SYNTHETIC)
"""Families that need no further package."""

SYNTHETIC_SHARE = 0.4
GRAPHS = 24
"""Captured models that are in use at a time."""
REFRESH = 960
"""Cases that are drawn from one set of captured models."""
GROUPS = (16, 200)
BRANCHED_GROUPS = {"zoo:inception": (48, 200), "zoo:moe_toy": (32, 200)}
"""Range of groups of families whose branches would be merged in fewer."""
LOOSE_SHARE = 0.3
TIGHTNESS = (1.0, 3.0)
"""Range of memory factors, log-uniform, of cases whose memory is limited; see `limit_memory`."""
UNLIKE_MEMORY_SHARE = 0.2
MEMORY_SHARES = (1.0, 1.0, 2.0, 4.0)
"""Relative memory of the devices in a fifth of these cases; else the cluster's."""


def training_case(
    seed: int,
    number: int,
    *,
    families: Sequence[str] = ALL_FAMILIES,
    cluster: str | None = None,
    refresh: int = REFRESH,
) -> ProblemCase:
    """Returns case `number` of the stream with this seed; the same in every process.

    Args:
        seed: Seed of the stream.
        number: Number of the case, from 0.
        families: Families to draw from, out of `ALL_FAMILIES`.
        cluster: Text of the one cluster that captured models are priced for; None draws one a case.
        refresh: Cases after which other models take their place.
    """
    for name in families:
        if name not in ALL_FAMILIES:
            raise unknown_name("model family", name, ALL_FAMILIES)
    rng = np.random.default_rng([seed, number])
    models = tuple(name for name in ALL_FAMILIES if name in families and name != SYNTHETIC)
    synthetic = not models or (SYNTHETIC in families and rng.random() < SYNTHETIC_SHARE)
    if synthetic:
        family, problem = _synthetic(rng)
    else:
        slot = (number // refresh) * GRAPHS + int(rng.integers(GRAPHS))
        family, recipe = variant(models, seed, slot)
        problem = _priced(rng, recipe, cluster, BRANCHED_GROUPS.get(family, GROUPS))
    factor = None if rng.random() < LOOSE_SHARE else log_uniform(rng, *TIGHTNESS)
    shares = rng.choice(MEMORY_SHARES, problem.num_devices) if rng.random() < UNLIKE_MEMORY_SHARE else None
    problem = limit_memory(problem, factor, shares=shares)
    name = f"train-{seed}-{number}"
    return ProblemCase(name, family, dataclasses.replace(problem, name=f"{name} {problem.name}"), is_branchy(problem))


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """Returns a number whose logarithm is uniform."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _priced(rng: Generator, recipe: Recipe, cluster: str | None, groups: tuple[int, int]) -> Problem:
    text = cluster or draw_cluster(rng)
    problem = priced(recipe, text, round(log_uniform(rng, *groups)), on=text)
    return problem if cluster else vary_hardware(problem, rng)


def _synthetic(rng: Generator) -> tuple[str, Problem]:
    shape, size = str(rng.choice(SHAPES)), draw_size(rng)
    problem = random_problem(
        int(rng.integers(2**31)),
        num_groups=round(log_uniform(rng, *GROUPS)),
        num_devices=size,
        shape=shape,
        width=int(rng.integers(2, 9)),
        training=bool(rng.random() < 0.9),
        unlike=bool(rng.random() < 0.35),
        comm_ratio=log_uniform(rng, 0.05, 2.0),
        hosts=draw_hosts(rng, size),
        shared_parameters=int(rng.integers(1, 5)) if rng.random() < 0.3 else 0,
        null_fraction=0.05 if rng.random() < 0.1 else 0.0,
    )
    return f"{SYNTHETIC}:{shape}", vary_hardware(problem, rng)
