"""Problem sets to train on and to test on.

``synthetic``: random layered graphs. ``zoo``: captured zoo models and synthetic graphs, on clusters of 2 to 8 devices with
links from NVLink to Ethernet, memory from loose to tight. A folder or file name: the ``*.problem.json`` files in it. Test
problems of the named sets come from other seeds, other sizes and model families that training does not see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.problem.toys import random_problem
from rlplace.simulator import simulate

TRAIN_MODELS = (
    ("zoo:inception", 64, 64),
    ("zoo:lstm", 64, 64),
    ("zoo:transformer,layers=4", 32, 256),
    ("zoo:moe_toy", 8192, 64),
    ("zoo:nasnet", 256, 64),
    ("zoo:mlp", 4096, 64),
)
"""Models with the batch and sequence length they are captured at."""
TEST_MODELS = (("zoo:dlrm", 4096, 64), ("zoo:unet", 32, 64))
"""Whole families that training does not see."""

CLUSTERS = ("a100-80g:2", "a100-80g:4", "v100:4,pcie", "v100:2x2,eth=25g", "a100-40g:2+v100:2", "t4:4", "h100:8")
TEST_CLUSTERS = ("a100-40g:4,pcie", "v100:8", "l4:2+t4:2")

_TIGHTNESS = (None, 2.0, 1.3)
"""Memory of all devices together over the need of one device; None leaves the preset's memory."""


def training_problems(
    name: str, *, seed: int = 0, cluster: str | None = None, progress: Callable[[str], None] = print
) -> list[Problem]:
    """The problems of a set to train on."""
    if name == "synthetic":
        return _synthetic(48, seed)
    if name == "zoo":
        return capture_problems(TRAIN_MODELS, (cluster,) if cluster else CLUSTERS, seed, progress) + _synthetic(24, seed)
    return load_problems(name)


def held_out_problems(
    name: str, *, seed: int = 0, cluster: str | None = None, progress: Callable[[str], None] = print
) -> list[Problem]:
    """The problems that the closing table of `rlplace train` is made on; never trained on."""
    unseen = _synthetic(6, seed + 10_000)
    if name == "zoo":
        return capture_problems(TEST_MODELS, (cluster,) if cluster else TEST_CLUSTERS, seed + 10_000, progress) + unseen
    return unseen


def load_problems(path: str | Path) -> list[Problem]:
    """All ``*.problem.json`` files of a folder, or one file."""
    path = Path(path)
    if path.is_dir():
        found = sorted(path.glob("*.problem.json"))
        if not found:
            raise InputError(f"{path}: the folder holds no *.problem.json file; make one with 'rlplace capture'")
        return [Problem.load(item) for item in found]
    if path.is_file():
        return [Problem.load(path)]
    raise InputError(f"unknown problem set {str(path)!r}; known: synthetic, zoo, or a folder of *.problem.json files")


def with_memory(problem: Problem, factor: float | None) -> Problem:
    """The problem with every device's memory set to factor x (peak of the whole step on one device) / devices."""
    if factor is None:
        return problem
    free = tuple(dataclasses.replace(device, memory_bytes=None) for device in problem.devices)
    unlimited = dataclasses.replace(problem, devices=free)
    allowed = np.flatnonzero(problem.group_allowed.all(axis=0))
    if len(allowed) == 0:
        return problem
    alone = simulate(unlimited, np.full(problem.num_groups, allowed[0], dtype=np.int32))
    peak = int(alone.peak_memory_bytes[allowed[0]]) - problem.devices[allowed[0]].reserved_bytes
    tight = tuple(
        dataclasses.replace(device, memory_bytes=int(factor * peak / problem.num_devices) + device.reserved_bytes + 1)
        for device in problem.devices
    )
    return dataclasses.replace(problem, devices=tight, name=f"{problem.name}, memory x{factor:g}")


def _synthetic(count: int, seed: int) -> list[Problem]:
    rng = np.random.default_rng(seed)
    problems = []
    for number in range(count):
        groups, devices = int(rng.integers(20, 120)), int(rng.choice([2, 3, 4, 4, 8]))
        problem = random_problem(seed * 1000 + number, num_groups=groups, num_devices=devices)
        problems.append(with_memory(problem, _TIGHTNESS[number % len(_TIGHTNESS)]))
    return problems


def capture_problems(
    models: tuple[tuple[str, int, int], ...], clusters: tuple[str, ...], seed: int, progress: Callable[[str], None]
) -> list[Problem]:
    """Every model on every cluster, with 48 to 128 groups and loose to tight memory, both drawn from `seed`.

    Args:
        models: MODEL, batch and sequence length.
        clusters: CLUSTER texts.
        seed: Of the draws.
        progress: Called with what is captured.
    """
    from rlplace.cluster.spec import Cluster
    from rlplace.cost.price import price
    from rlplace.graph.capture import capture
    from rlplace.zoo import load_model

    rng = np.random.default_rng(seed)
    problems = []
    for spec, batch, seq in models:
        progress(f"capturing {spec}")
        loaded = load_model(spec, batch=batch, seq=seq)
        graph = capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=loaded.name)
        for text in clusters:
            groups = int(rng.choice([48, 80, 128]))
            problem = price(graph, Cluster.preset(text), groups=groups)
            problem = dataclasses.replace(problem, name=f"{spec} on {text}")
            problems.append(with_memory(problem, _TIGHTNESS[int(rng.integers(len(_TIGHTNESS)))]))
    return problems
