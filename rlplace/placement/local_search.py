"""Bottleneck-guided descent from the floor.

Problem: step time of the executor itself, as in `annealing`. A step ends when its critical chain ends: walking back from the
last event, every op on the chain started when an input arrived or when its device became free. A transfer on the chain is
removed by joining its two groups on either side; a wait for a busy device is removed by moving the waiting group, or the one
that ran before it, to an idler device. These moves are ranked by the seconds they remove less the transfers they add, and the
first one that improves is made. At a local optimum a few random moves are made, and the descent continues from there; it
returns to the best answer when that did not pay.

Paper: guided moves are in the spirit of critical-path local search for scheduling (van Laarhoven, Aarts, Lenstra, "Job shop
scheduling by simulated annealing", 1992); restarts by small kicks are iterated local search (Lourenco, Martin, Stutzle, 2003).

Departures: none from a fixed algorithm; this is rlplace's own combination.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np

from rlplace.errors import InputError, show, whole_number
from rlplace.placement.common import kernels
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph, traffic
from rlplace.placement.common.oparrays import op_arrays
from rlplace.placement.search import Move, MoveMaker, PlacementSearch, search_planner
from rlplace.problem import Problem
from rlplace.simulator import Timeline


@dataclass(frozen=True)
class LocalSearchSettings:
    """Parameters of the search, tuned on the validation split; see docs/planners.md.

    Attributes:
        tries: Guided moves tried from one assignment before random ones.
        random_tries: Random moves tried from one assignment before a kick.
        kick: Most random moves of a kick.
        kick_worse: Largest increase of the step time by a kick, relative to the best one: the descent would not return from
            more within a budget.
    """

    tries: int = 12
    random_tries: int = 12
    kick: int = 6
    kick_worse: float = 0.03

    def __post_init__(self) -> None:
        for name in ("tries", "random_tries", "kick"):
            whole_number(getattr(self, name), f"local_search: {name}", 1)
        if not 0.0 <= self.kick_worse < math.inf:
            raise InputError(f"local_search: kick_worse must not be negative, found {show(self.kick_worse)}")


@search_planner(LocalSearchSettings, doc=__doc__)
def local_search(search: PlacementSearch, seed: int, settings: LocalSearchSettings) -> None:
    """Spends the search's budget; `seed` is the seed of the kicks."""
    moves, rng = MoveMaker(search.evaluator.problem, seed), Random(seed)
    explored: set[bytes] = set()
    while moves.movable and search.budget.share() < 1.0:
        descend(search, moves, explored, settings)
        if search.score.objective_s > search.best_score.objective_s:
            search.restart()
        for _ in range(rng.randint(1, settings.kick)):
            kick = moves.draw(search.assignment)
            if kick and search.budget.share() < 1.0:
                score = search.evaluate(kick)
                if score.descent_s <= (1.0 + settings.kick_worse) * search.best_score.descent_s:
                    search.accept(kick, score)


def descend(search: PlacementSearch, moves: MoveMaker, explored: set[bytes], settings: LocalSearchSettings) -> None:
    """Improves until neither guided nor random moves do, or the budget is spent.

    Guided moves are the same whenever the search comes back to an assignment, so they are tried there only once.
    """
    improved = True
    while improved and search.budget.share() < 1.0:
        improved = False
        here = search.assignment.tobytes()
        guided: list[Move] = []
        if here not in explored:
            line = search.evaluator.timeline(search.assignment)
            guided = [move for _, move in ranked_moves(search.evaluator.problem, line, search.assignment, settings.tries)]
        explored.add(here)
        for index in range(len(guided) + settings.random_tries):
            if search.budget.share() >= 1.0:
                return
            move = guided[index] if index < len(guided) else moves.draw(search.assignment)
            if not move:
                continue
            score = search.evaluate(move)
            if score.step_time_s == math.inf or score.descent_s > search.score.descent_s:
                continue
            # Random moves also drift sideways: much of a plan is off the critical chain and can move freely.
            improved = score.descent_s < search.score.descent_s
            if improved or index >= len(guided):
                search.accept(move, score)
            if improved:
                break


def ranked_moves(problem: Problem, line: Timeline, assignment: Assignment, limit: int) -> list[tuple[float, Move]]:
    """Finds moves that shorten the critical chain of a timeline, most promising first.

    Args:
        problem: The problem.
        line: Timeline of the assignment.
        assignment: int32 [G].
        limit: Most moves to return.

    Returns:
        Rows (estimated saving in seconds, move of one group).
    """
    if line.step_time_s is None:
        return []
    graph = group_graph(problem)
    devices = np.array(assignment, dtype=np.int32)
    saved = np.zeros((problem.num_groups, problem.num_devices))
    touched = np.zeros(saved.shape, dtype=np.bool_)
    arrival_s = np.full((problem.num_tensors, problem.num_devices), -1.0)
    arrival_s[line.transfer_tensor, line.transfer_destination] = line.transfer_end_s
    by_start = np.lexsort((line.end_s, line.start_s))
    run = kernels.Execution(by_start, line.device_of_op, line.start_s, line.end_s, arrival_s)
    kernels.chain_savings(run, op_arrays(problem), np.argsort(line.busy_s, kind="stable"), saved, touched)
    # Moves off overflowing devices are worth the penalty that they take away.
    over = line.peak_memory_bytes - problem.capacity_bytes
    crowded, roomy = np.flatnonzero(over[devices] > 0), np.argsort(over, kind="stable")[:2]
    excess, capacity = over[devices[crowded]], problem.capacity_bytes[devices[crowded]]
    penalty_s = 3.0 * line.step_time_s * np.minimum(graph.footprint_bytes[crowded], excess) / capacity
    saved[crowded[:, None], roomy] += penalty_s[:, None]
    touched[crowded[:, None], roomy] = True
    touched &= problem.group_allowed
    touched[np.arange(problem.num_groups), devices] = False
    groups, targets = np.nonzero(touched)
    if len(groups) == 0:
        return []
    rows = kernels.all_communication(np.arange(problem.num_groups), devices, traffic(problem))
    here = devices[groups]
    added = rows[groups, targets] - rows[groups, here] + graph.time_s[groups, targets] - graph.time_s[groups, here]
    worth = saved[groups, targets] - added
    kept = np.argsort(-worth, kind="stable")[:limit]
    return [(float(worth[row]), [(int(groups[row]), int(targets[row]))]) for row in kept]
