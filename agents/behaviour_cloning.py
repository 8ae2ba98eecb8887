"""Pre-training for `rlplace/Placement-v0`: cloning of the decisions that build the best plan of a search.

Every plan is built in both orders of the groups. N decisions, D devices, G groups, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from rlplace.agents.checkpoint import read_tensors
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.policies import Policy, narrowed
from rlplace.agents.problems.cases import ProblemCase
from rlplace.agents.search import GuidedSearch
from rlplace.envs.construction import CONSTRUCTION_FEATURES, NUM_CONSTRUCTION, construct, construction_bank, construction_state
from rlplace.envs.guide.features import FEATURES
from rlplace.envs.instance import PlacementInstance, make_instance, side_by_side
from rlplace.envs.observation import GraphArrays, graph_arrays
from rlplace.errors import InfeasibleError, InputError
from rlplace.files import write_bytes
from rlplace.placement.common.evaluate import PlanEvaluator
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.search import floor_answers
from rlplace.problem import Problem

CASES, KEPT = 32, 8192
"""Cases of a batch, and files that are kept in memory."""

_LAST_QUICK = "round_robin"


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A demonstration: the decisions that build the plan of one case.

    Attributes:
        nodes, source, target, values: See `GraphArrays`.
        candidates: float16 [N, D * F], features of the devices as the environment observes them.
        group: int32 [N], the group that is placed.
        legal: bool [N, D].
        device: int64 [N], its device in the plan.
    """

    nodes: Tensor
    source: Tensor
    target: Tensor
    values: Tensor
    candidates: Tensor
    group: Tensor
    legal: Tensor
    device: Tensor

    def save(self, path: Path) -> None:
        """Writes a file, atomically."""
        write_bytes(path, save_tensors({field.name: getattr(self, field.name).contiguous() for field in fields(self)}))

    @staticmethod
    def load(path: Path) -> Demonstration:
        """Reads a file of `save`.

        Raises:
            InputError: The file is damaged.
        """
        tensors = read_tensors(path)
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        rows, wide = shapes.get("legal", (0, 0)) if len(shapes.get("legal", ())) == 2 else (0, 0)
        if set(tensors) != {field.name for field in fields(Demonstration)} or not (
            rows and shapes["candidates"] == (rows, wide * NUM_CONSTRUCTION) and shapes["group"] == shapes["device"] == (rows,)
        ):
            raise InputError(f"{path}: not a file of decisions of this version; remove it to have it made anew")
        return Demonstration(**tensors)


def collect_demonstration(case: ProblemCase, *, states: int, moves: int, seed: int) -> Demonstration | None:
    """Returns the demonstration of one case; None when it has one device, or no plan is known that fits.

    Args:
        case: The case.
        states: Times `moves`, the simulations of the search. An untrained network guides it: nothing depends on weights.
        moves: See `states`.
        seed: Seed of the search.
    """
    start = quick_plan(case.problem)
    if start is None:
        return None
    instance = make_instance(case.problem, floor=start)
    search = GuidedSearch(instance, PlacerNetwork(features=FEATURES), start, seed=seed)
    search.run(calls=states * moves)
    return demonstration_of(instance, search.best_plan) if search.best.feasible else None


def quick_plan(problem: Problem) -> NDArray[np.int32] | None:
    """Returns int32 [G], the best feasible plan of the planners that take milliseconds; None without one or with one device."""
    try:
        check_possible(problem)
    except InfeasibleError:
        return None
    answers = []
    for name, answer in floor_answers(PlanEvaluator(problem)):
        answers.append(answer)
        if name == _LAST_QUICK:
            break
    best = min(answers, key=lambda answer: answer.score.objective_s, default=None)
    return best.devices if best is not None and best.score.feasible and problem.num_devices > 1 else None


def demonstration_of(instance: PlacementInstance, plan: NDArray[np.int32]) -> Demonstration:
    """Returns the decisions that build a feasible plan: a branch at a time, and branches side by side."""
    both = (instance, side_by_side(instance))
    bank, state = tuple(construction_bank(both)), construction_state(2, *instance.allowed.shape)
    state.instance[:] = (0, 1)
    rows, actions, found = np.arange(2), np.zeros(2, dtype=np.int64), []
    construct(bank, tuple(state), rows, actions, True)
    for _ in range(len(plan)):
        group = state.group[:, 0].copy()
        actions[:] = plan[group]
        found.append((state.table.astype(np.float16), group, state.legal.copy(), actions.copy()))
        construct(bank, tuple(state), rows, actions, False)
    columns = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
    return Demonstration(*map(torch.from_numpy, graph_arrays(instance)), *columns)


_load = lru_cache(maxsize=KEPT)(Demonstration.load)


def cloning_loss(network: Policy, files: Sequence[Path], rng: np.random.Generator) -> Tensor:
    """Returns the cross-entropy of the policy to the decisions of a batch of files, each with equal weight."""
    chosen = [_load(files[i]) for i in rng.choice(len(files), min(CASES, len(files)), replace=False)]
    network.know([GraphArrays(one.nodes, one.source, one.target, one.values) for one in chosen])
    widest = max(one.legal.shape[1] for one in chosen)
    number = torch.cat([torch.full((len(one.group), 1), n) for n, one in enumerate(chosen)])
    room = [widest - one.legal.shape[1] for one in chosen]
    pad = nn.functional.pad
    candidates = torch.cat([pad(one.candidates, (0, n * NUM_CONSTRUCTION)) for one, n in zip(chosen, room, strict=True)])
    groups = [one.group[:, None].expand_as(one.legal) for one in chosen]
    groups_of_devices = torch.cat([pad(group, (0, n), value=-1) for group, n in zip(groups, room, strict=True)])
    legal = torch.cat([pad(one.legal, (0, n)) for one, n in zip(chosen, room, strict=True)])
    seen = {"graph": number, "candidates": candidates.float(), "candidate_group": groups_of_devices}
    logits = network.look(narrowed(seen, network.features, CONSTRUCTION_FEATURES))[0]
    weight = torch.cat([torch.full((len(one.group),), 1.0 / len(one.group)) for one in chosen]) / len(chosen)
    device = torch.cat([one.device for one in chosen])
    entropy = nn.functional.cross_entropy(logits.masked_fill(~legal, -1e9), device, reduction="none")
    return (weight * entropy).sum()


def summary(network: Policy, files: Sequence[Path]) -> str:
    """Returns the line of a model card about held-out files."""
    with torch.no_grad():
        likely = float(torch.exp(-cloning_loss(network, files, np.random.default_rng(0))))
    return f"a device of the plan has probability {likely:.3f}"
