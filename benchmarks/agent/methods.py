"""The methods: classical searches by name, agents by checkpoint, all called alike and started from the same plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agent.race import race
from benchmarks.agent.records import ABLATION, AGENT, RIVAL, Method
from benchmarks.ils import ils
from benchmarks.lns import lns
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.planner import Agent, load_agent
from rlplace.budget import Budget
from rlplace.errors import InputError, show, unknown_name
from rlplace.model.zoo.functions import guessed
from rlplace.placement import get_planner
from rlplace.placement.common.evaluate import Assignment, PlanEvaluator, ScoredAssignment
from rlplace.placement.common.floor import finish
from rlplace.placement.simple import random_plans
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem

SEARCHES = {"race": race, "lns": lns, "ils": ils}
"""Rivals that are no planners of the package."""

TUNED = {"lns": {"balance": 0.1, "noise": 2.0}}
"""Settings by the validation cases that are not those of the module, whose own are those of `benchmarks.zoo`."""

RIVALS = ("annealing", "local_search", *SEARCHES, "random")
_BATCH = 16


def chosen_methods(rivals: Sequence[str], agents: Sequence[str], ablations: Sequence[str]) -> list[Method]:
    """Returns the methods of the tables.

    Args:
        rivals: Names of classical searches, some with ``,option=value``.
        agents: ``LABEL=CHECKPOINT`` or ``CHECKPOINT`` a training seed.
        ablations: ``LABEL=CHECKPOINT,option=value,...`` each.
    """
    methods = [rival(text) for text in rivals]
    methods += [learned(text, AGENT) for text in agents] + [learned(text, ABLATION) for text in ablations]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two methods are called {name}; give one another label, LABEL=CHECKPOINT")
    return methods


def rival(text: str) -> Method:
    """Returns a classical search by ``NAME``, or with options of its own as ``NAME,option=value``."""
    name, *rest = text.split(",")
    if name not in RIVALS:
        raise unknown_name("method", name, RIVALS)
    options = TUNED.get(name, {}) | options_of(rest, f"method {show(text)}")
    return Method(" ".join([name, *rest]), RIVAL, options=options)


def learned(text: str, role: str = AGENT) -> Method:
    """Returns an agent from ``CHECKPOINT`` or ``LABEL=CHECKPOINT``, with ``,option=value`` for `Agent.place` after it.

    The option ``untrained=1`` replaces the weights that rank moves by those of a network that was never trained, which is the
    heuristic; ``unbuilt=1`` leaves out the plans that the graph network builds.
    """
    first, *rest = text.split(",")
    label, _, checkpoint = first.rpartition("=")
    return Method(
        label or Path(checkpoint).name,
        role,
        checkpoint,
        weights_fingerprint(checkpoint),
        options_of(rest, f"method {show(text)}"),
    )


def options_of(items: Sequence[str], where: str) -> dict[str, Any]:
    """Returns options of a planner from ``key=value`` each; `where` starts the message of an error."""
    options = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"{where}: expected option=value after its name, found {show(item)}")
        options[key] = guessed(value)
    return options


def place_of(method: Method) -> Callable[..., PlacementPlan]:
    """Returns the function of a method: `place(problem, *, seed, start, calls or time_limit_s)`."""
    if method.role == RIVAL:
        name = method.name.partition(" ")[0]
        own = {"random": random_search, **SEARCHES}
        return partial(own[name] if name in own else get_planner(name), **method.options)
    options = dict(method.options)
    assert method.checkpoint is not None
    without = bool(options.pop("untrained", False)), bool(options.pop("unbuilt", False))
    return partial(_agent(method.checkpoint, *without).place, **options)


def random_search(
    problem: Problem, *, seed: int, start: Any, calls: int | None = None, time_limit_s: float | None = None
) -> PlacementPlan:
    """Returns the best of the start and of the random plans of the planner `random`, each simulated once and none repaired."""
    evaluator = PlanEvaluator(problem, Budget(calls, time_limit_s))
    draws: Iterator[Assignment] = random_plans.candidates(problem, seed, samples=1 << 60)
    first = next(draws) if start is None else np.asarray(start, dtype=np.int32)
    best, score = first, evaluator.score(first)
    evaluator.budget.used = 0
    while evaluator.budget.share() < 1.0:
        left = evaluator.budget.calls - evaluator.budget.used
        plans = np.stack(list(islice(draws, int(min(_BATCH, left)))))
        for plan, found in zip(plans, map(evaluator.score, plans), strict=True):
            if found.objective_s < score.objective_s:
                best, score = plan.copy(), found
    return finish(problem, ScoredAssignment(best, score, np.zeros(0, dtype=np.int64)), planner="random", seed=seed)


def weights_fingerprint(checkpoint: str) -> str:
    """Returns SHA-256 over the network's sizes, and names, shapes and values of its weights."""
    agent = load_agent(checkpoint)
    network = agent.checkpoint.network
    digest = hashlib.sha256(f"{type(network).__name__} {network.settings()}".encode())
    parts = [part.state_dict() for part in (agent.guide, agent.builder) if part is not None]
    for name, tensor in (item for part in parts for item in sorted(part.items())):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@cache
def _agent(checkpoint: str, untrained: bool, unbuilt: bool) -> Agent:
    agent = load_agent(checkpoint)
    if unbuilt:
        agent = replace(agent, builder=None)
    if untrained:
        torch.manual_seed(0)
        agent = replace(agent, guide=PlacerNetwork(features=agent.guide.features, **agent.guide.settings()).eval())
    return agent
