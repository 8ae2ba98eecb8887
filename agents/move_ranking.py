"""Pre-training for `rlplace/Refinement-v0`: the policy learns from simulated moves which of them gain.

The data set holds plans where searches pass: the answers of the one-shot planners, plans near them, descents from there, and
plans that annealing reaches after some time. A set of moves is drawn from each plan and each move is simulated once. The target
of a plan is a softmax of the gains of its moves, the loss the cross-entropy of the policy's softmax to it. Plans where no move
gains weigh nothing. S plans, K moves, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor

from rlplace.agents.policies import Policy, read_by
from rlplace.agents.problems.cases import ProblemCase
from rlplace.envs.guide.features import FEATURES, NUM_FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.files import read_bytes, write_bytes
from rlplace.placement import get_planner
from rlplace.placement.common.evaluate import PlanEvaluator, descent_s
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.search import floor_answers

FILL = 1.15
"""Moves that provably fill a device beyond this share of its memory are not priced."""

CASES, STATES, KEPT = 8, 8, 1024
"""Cases of a batch, plans of each, and files that are kept in memory."""

_EXPLORE = 0.3  # share of steps to a random move that costs at most `_LOSS`
_LOSS, _GAIN = 0.05, 0.1  # losses and gains beyond these count as these
_STEEPNESS = 0.01  # otherwise a move that gains 1 % more is e times as likely
_DEEP = (300, 3000)  # simulations of annealing before two of the starts
_SHARPNESS = 0.003  # a move that gains 0.3 % more is e times as likely in the target
_FULL = 0.02  # a plan whose best move gains this much or more has full weight
_RANKS = (1, 4, 16)
_PINNED = FEATURES.index("pinned_target")


@dataclass(frozen=True, eq=False)
class PricedMoves:
    """Simulated moves of one case.

    Attributes:
        features: float16 [S, K, F], see `rlplace.envs.guide.features`.
        change: float32 [S, K], log of `descent_s` after the move over that before, at most that of a factor of
            1,000 (a step that cannot complete); NaN where there is no move.
    """

    features: NDArray[np.float16]
    change: NDArray[np.float32]

    def save(self, path: Path) -> None:
        """Writes a file, atomically."""
        write_bytes(path, save_arrays({"features": self.features, "change": self.change}))

    @staticmethod
    def load(path: Path) -> PricedMoves:
        """Reads a file of `save`.

        Raises:
            InputError: The file is damaged, or holds arrays of other types or shapes.
        """
        payload = read_bytes(path)
        try:
            arrays = load_arrays(payload)
            moves = PricedMoves(arrays["features"], arrays["change"])
        except Exception as error:  # safetensors raises its own type for every kind of damage
            raise InputError(f"{path}: not a file of labels ({type(error).__name__}); remove it to have it made anew") from None
        features, change = moves.features, moves.change
        fits = features.ndim == 3 and features.shape[2] == NUM_FEATURES and change.shape == features.shape[:2]
        if not fits or features.dtype != np.float16 or change.dtype != np.float32:
            raise InputError(f"{path}: its arrays are not of the shapes and types of labels; remove it to have it made anew")
        if not np.isfinite(features).all() or np.isinf(change).any():
            raise InputError(f"{path}: holds numbers that are not finite; remove it to have it made anew")
        return moves


def collect_moves(case: ProblemCase, *, states: int, moves: int, seed: int) -> PricedMoves | None:
    """Returns priced moves of one case; None when it has one device, or no plan of it can complete.

    Args:
        case: The case.
        states: Number of plans whose moves are priced.
        moves: Number of moves drawn from each plan.
        seed: Seed of all random choices.
    """
    problem, rng = case.problem, np.random.default_rng(seed)
    starts = starting_plans(case, rng) if problem.num_devices > 1 else []
    if not starts:
        return None
    guide = Guide(make_instance(problem, floor=starts[0], compute_floor=False), moves, seed)
    rows: list[tuple[NDArray[np.float16], NDArray[np.float32]]] = []
    for number, start in enumerate(starts):
        share = (states * (number + 1)) // len(starts) - (states * number) // len(starts)
        rows += _descend(guide, start, share, rng)
    return PricedMoves(*(np.stack(column) for column in zip(*rows, strict=True))) if rows else None


def starting_plans(case: ProblemCase, rng: Generator) -> list[NDArray[np.int32]]:
    """Returns plans from which descents start: the floor, another planner's answer, the floor after random changes, and plans
    that annealing reaches.
    """
    problem = case.problem
    try:
        check_possible(problem)
    except InfeasibleError:
        return []
    answers = [answer for _, answer in floor_answers(PlanEvaluator(problem))]
    answers = sorted((a for a in answers if a.score.step_time_s != np.inf), key=lambda answer: answer.score.objective_s)
    if not answers:
        return []
    starts = [answers[0].devices]
    others = [a.devices for a in answers[1:] if not np.array_equal(a.devices, starts[0])]
    if others:
        starts.append(others[int(rng.integers(min(3, len(others))))])
    changed = starts[0].copy()
    share = rng.choice([0.03, 0.1, 0.3])
    for group in np.flatnonzero(rng.random(len(changed)) < share):
        changed[group] = rng.choice(np.flatnonzero(problem.group_allowed[group]))
    starts.append(changed)
    for calls in _DEEP:
        try:
            seed = int(rng.integers(1 << 30))
            starts.append(get_planner("annealing")(problem, start=starts[0], calls=calls, seed=seed).device_of_group)
        except InfeasibleError:
            continue
    return starts


def _descend(
    guide: Guide, start: NDArray[np.int32], states: int, rng: Generator
) -> list[tuple[NDArray[np.float16], NDArray[np.float32]]]:
    """Returns features and changes of the moves of `states` plans along one descent with occasional random moves."""
    rows = []
    plan, moves = np.array(start, dtype=np.int32), len(guide.table)
    for _ in range(states):
        if guide.simulator.evaluate(plan)[0] == np.inf:
            break
        before = descent_s(*guide.look(plan))
        count = guide.draw(plan)
        which = np.flatnonzero(guide.table[:count, _PINNED] <= FILL)
        if before == 0.0 or len(which) < 2:
            break
        price = np.array([descent_s(*outcome) for outcome in zip(*guide.price(plan, which), strict=True)])
        change = np.log(np.clip(price, 1e-3 * before, 1e3 * before) / before)
        features, changes = np.zeros((moves, NUM_FEATURES), dtype=np.float16), np.full(moves, np.nan, dtype=np.float32)
        features[: len(which)], changes[: len(which)] = guide.table[which], change
        rows.append((features, changes))
        choice = choose(np.where(np.isfinite(price), change, np.inf), rng)
        if choice is None:
            break
        plan = guide.moved(plan, int(which[choice]))
    return rows


def choose(change: NDArray[np.float64], rng: Generator) -> int | None:
    """Draws the next move of a descent: mostly one that gains, sometimes any that costs little.

    Args:
        change: float64 [M], log of the step time after each move over that before; infinite where it cannot complete.
        rng: Random numbers.

    Returns:
        Its index in `change`; None where no move can be made.
    """
    if rng.random() < _EXPLORE:
        weight = np.where(change < _LOSS, 1.0, 1e-9)
    else:
        gain = np.clip(-change, -_LOSS, _GAIN)
        weight = np.exp((gain - gain.max(initial=-_LOSS)) / _STEEPNESS)
    weight = np.where(np.isfinite(change), weight, 0.0)
    return int(rng.choice(len(change), p=weight / weight.sum())) if weight.sum() > 0 else None


def _priced(path: Path) -> PricedMoves:
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _read(path: Path, written_ns: int) -> PricedMoves:
    return PricedMoves.load(path)


def set_standard(network: Policy, files: Sequence[Path]) -> None:
    """Standardises features by their mean and spread over some files of priced moves."""
    rows = []
    for path in files[:64]:
        moves = _priced(path)
        rows.append(moves.features[::8][np.isfinite(moves.change[::8])].astype(np.float32))
    table = np.concatenate(rows)
    network.standardise(read_by(network, table.mean(axis=0)), read_by(network, table.std(axis=0) + 1e-2))


def summary(network: Policy, files: Sequence[Path]) -> str:
    """Returns the line of a model card about held-out files."""
    share = captured_gain(network, files)
    return "of the best gain " + ", ".join(f"{100 * value:.1f} % by the first {rank}" for rank, value in share.items())


def captured_gain(network: Policy, files: Sequence[Path]) -> dict[int, float]:
    """Returns the share of the best move's gain that the best of the 1, 4 and 16 highest scored moves has, over all plans."""
    captured, best = np.zeros(len(_RANKS)), 0.0
    for path in files:
        moves = _priced(path)
        with torch.no_grad():
            logits = network.scores(None, read_by(network, moves.features)).numpy()
        gain = np.clip(np.where(np.isfinite(moves.change), -moves.change, -1.0), -1.0, _GAIN)
        logits[~np.isfinite(moves.change)] = -np.inf
        ranked = np.take_along_axis(gain, np.argsort(-logits, axis=1), axis=1)
        best += gain.max(axis=1).clip(min=0.0).sum()
        captured += [ranked[:, :rank].max(axis=1).clip(min=0.0).sum() for rank in _RANKS]
    return {rank: float(share) for rank, share in zip(_RANKS, captured / max(best, 1e-12), strict=True)}


def batch_loss(network: Policy, files: Sequence[Path], rng: Generator) -> Tensor:
    """Returns the loss of a batch that is drawn from some files."""
    chosen = [_priced(files[i]) for i in rng.choice(len(files), min(CASES, len(files)), replace=False)]
    rows = [rng.choice(len(moves.change), min(STATES, len(moves.change)), replace=False) for moves in chosen]
    features = np.concatenate([moves.features[row] for moves, row in zip(chosen, rows, strict=True)])
    change = np.concatenate([moves.change[row] for moves, row in zip(chosen, rows, strict=True)])
    return ranking_loss(network.scores(None, read_by(network, features)), torch.from_numpy(change))


def ranking_loss(logits: Tensor, change: Tensor) -> Tensor:
    """Returns the cross-entropy of a softmax of logits to one of gains, less the entropy of the latter, weighted by the best
    gain.

    Args:
        logits: float32 [S, K], scores of the moves.
        change: float32 [S, K], NaN where there is no move; see `PricedMoves`.
    """
    exists = torch.isfinite(change)
    gain = torch.where(exists, -change, -_LOSS).clamp(-_LOSS, _GAIN)
    target = torch.where(exists, gain / _SHARPNESS, -torch.inf).softmax(1)
    log_probability = torch.where(exists, logits, -1e9).log_softmax(1)
    divergence = target * (torch.log(target.clamp(min=1e-12)) - torch.where(exists, log_probability, 0.0))
    weight = (gain.max(1).values.clamp(0.0, _FULL) / _FULL).sqrt()
    return (weight * divergence.sum(1)).sum() / weight.sum().clamp(min=1e-6)
