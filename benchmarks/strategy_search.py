"""The quality of the search for whole strategies: regret against long runs of three unlike searches, and brute force.

    python -m benchmarks.strategy_search [--problems 24] [--reference-s 60] [--rows FILE]
    python -m benchmarks.strategy_search --large                    512 devices
    python -m benchmarks.strategy_search --brute-force 200

Problems are random models (tests/strategy/random_costs.py) on preset clusters, of four kinds in turn: like devices, unlike
devices, little memory, unlike layers. The references are the search itself for a long time, annealing over its moves from
a random strategy, and evolution from random strategies; the best of all that any search found is what regret is measured
against. Every answer is evaluated again: one that does not fit ends the run. Seconds are processor time of one core, so that
a busy machine gives the same figures. What FILE has already is not run again: a run that was ended goes on, and to try a
changed search take "found_s" out of its rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.harness import Row, arguments, markdown, read_rows, write_rows
from rlplace import budget
from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.strategy.drafts import Draft, Mesh, plain_draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.fit import changed, fitted, other_choices
from rlplace.strategy.search.moves import Moves
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import OutOfBudgetError, SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import UniformOptions
from tests.strategy.brute_force import quicker, small_question
from tests.strategy.random_costs import random_costs

KINDS = ("like devices", "unlike devices", "little memory", "unlike layers")
LIKE = ("a100-80g:8", "h100:2x8,ib=400g", "a100-40g:4x8,ib=400g", "h100:8x8,ib=400g", "rtx4090:2x8,ib=100g", "l4:2x4,ib=100g")
UNLIKE = (
    "a100-80g:4+t4:4",
    "a100-80g:8+a100-40g:8",
    "v100:4+t4:4",
    "a100-80g:2x8+v100:2x8,ib=100g",
    "h100:8+l4:8",
    "h100:4x8+a100-80g:4x8,ib=400g",
)
LARGE = ("h100:64x8,ib=8x400g", "a100-80g:64x8,ib=400g")
CALLS = [100, 300, 1000, 3000]
SEEDS = 5_000
"""Of the reported problems; the search was tuned on others."""

budget.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]


def problem(seed: int, large: bool = False) -> tuple[str, SearchProblem]:
    """Returns a random problem and its kind."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    cluster = Cluster.preset(str(rng.choice(LARGE if large else UNLIKE if kind == "unlike devices" else LIKE)))
    blocks = int(rng.integers(12, 49))
    costs = random_costs(rng, cluster, blocks, tied=rng.random() < 0.3, alike=kind != "unlike layers")
    if kind == "unlike layers":
        slope = np.exp(rng.normal(0.0, 0.7, blocks))
        costs = dataclasses.replace(
            costs, forward=costs.forward * slope, activation=costs.activation * np.exp(rng.normal(0.0, 0.7, blocks)),
            classes=np.arange(blocks), ties=(),
        )  # fmt: skip
    batch = cluster.num_devices * int(rng.choice([2, 4, 8]))
    if kind == "little memory":
        devices = cluster.num_devices
        shared = Mesh(tuple(range(devices)), shard=devices, sharding=1)
        draft = plain_draft((0, blocks), [shared], microbatch=(batch // devices,), microbatches=(1,))
        need = max(DraftEvaluator(costs, roomy(cluster, 1e15)).evaluate(draft).peak_memory_bytes)
        cluster = roomy(cluster, need * rng.uniform(0.25, 0.7))
    return kind, SearchProblem(DraftEvaluator(costs, cluster), batch)


def roomy(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Returns the cluster with so much memory a device."""
    devices = tuple(dataclasses.replace(d, memory_bytes=int(memory_bytes), reserved_bytes=0) for d in cluster.devices)
    return dataclasses.replace(cluster, devices=devices)


class Walk:
    """The shared part of annealing and evolution: random starts, random neighbours, and a clock."""

    def __init__(self, question: SearchProblem, rng: Generator, seconds: float) -> None:
        self.tries, self.rng = Tries(question, time_limit_s=seconds), rng
        self.moves, self.options = Moves(question), list(UniformOptions(question).every())
        self.end_s = time.process_time() + seconds

    def start(self) -> Tried:
        """Returns a random uniform strategy that fits."""
        while time.process_time() < self.end_s:
            found = fitted(
                self.tries, self.options[int(self.rng.integers(len(self.options)))].draft(self.tries.problem.balance)
            )
            if found is not None:
                return found
        raise OutOfBudgetError

    def neighbours(self, at: Tried, count: int) -> Iterator[Tried]:
        """Yields some random neighbours that fit."""
        near = [(draft, False) for draft in self.moves.neighbours(at.draft, self.tries.problem.scores.evaluate(at.draft))]
        near += [(changed(at.draft, chosen), True) for chosen in other_choices(self.tries, at.draft, (1, 2))]
        for index in self.rng.permutation(len(near))[:count]:
            if time.process_time() > self.end_s:
                raise OutOfBudgetError
            draft, as_it_is = near[int(index)]
            found = self.tries.score(draft) if as_it_is else fitted(self.tries, draft)
            if found is not None and found.fits:
                yield found


def annealed(question: SearchProblem, seed: int, seconds: float) -> float:
    """Returns seconds of the best that annealing over random moves finds, from one random strategy."""
    rng = np.random.default_rng(seed)
    walk = Walk(question, rng, seconds)
    best_s, began = math.inf, time.process_time()
    try:
        at = walk.start()
        while True:
            best_s = min(best_s, at.step_s)
            heat = 0.1 * max(0.0, 1 - (time.process_time() - began) / seconds)
            for found in walk.neighbours(at, 4):
                if found.step_s < at.step_s or rng.random() < math.exp(-(found.step_s / at.step_s - 1) / max(heat, 1e-9)):
                    at = found
                    break
    except OutOfBudgetError:
        return min(best_s, walk.tries.best.step_s if walk.tries.best is not None and walk.tries.fitting() else math.inf)


def evolved(question: SearchProblem, seed: int, seconds: float, *, size: int = 20) -> float:
    """Evolves a population that starts at random, the better half of which has children each round: seconds of its best."""
    rng = np.random.default_rng(seed)
    walk = Walk(question, rng, seconds)
    try:
        while True:
            living = {found.draft: found for found in (walk.start() for _ in range(size))}
            for _ in range(100):
                parents = sorted(living.values(), key=lambda tried: tried.step_s)[: size // 2]
                children = [child for parent in parents for child in walk.neighbours(parent, 3)]
                chosen: dict[Draft, Tried] = {one.draft: one for one in (*parents, *children)}
                living = dict(sorted(chosen.items(), key=lambda item: item[1].step_s)[:size])
    except OutOfBudgetError:
        return walk.tries.best.step_s if walk.tries.best is not None and walk.tries.fitting() else math.inf


def answered(question: SearchProblem, **budget: float) -> tuple[float, int]:
    """Returns seconds of the answer, evaluated again, and evaluations; it fits."""
    fresh = dataclasses.replace(question, scores=DraftEvaluator(question.costs, question.cluster))
    answer = search(fresh, **budget)  # type: ignore[arg-type]
    best = answer.ranked[0]
    said = DraftEvaluator(question.costs, question.cluster).evaluate(best.draft)
    assert said.feasible and best.draft.strategy(question.costs.names).batch == question.batch
    return said.step_time_s, answer.calls


def row(seed: int, known: dict[str, Any], reference_s: float, large: bool, budgets: list[int]) -> dict[str, Any]:
    """Returns one problem: seconds of every search, those that are `known` as they are; without any where nothing fits."""
    kind, question = problem(seed, large)
    if not known:
        known = {
            "seed": seed,
            "kind": kind,
            "cluster": question.cluster.text,
            "blocks": len(question.costs.names),
            "batch": question.batch,
        }
    try:
        if budgets and "found_s" not in known:
            best_s, calls = answered(question, time_limit_s=5)
            found = {"5 s": best_s} | {f"{calls} calls": answered(question, calls=calls)[0] for calls in budgets}
            known |= {"calls_in_5_s": calls, "found_s": found}
        if reference_s and "references_s" not in known:
            references = {"search": answered(question, time_limit_s=reference_s)[0]}
            references["annealing"] = annealed(question, seed, reference_s)
            references["evolution"] = evolved(question, seed, reference_s)
            known |= {"reference_s": reference_s, "references_s": references}
    except InfeasibleError:
        return {"seed": seed}
    return known


def table(rows: list[Row]) -> str:
    """Makes the table of mean and worst regret in per cent by kind, for every budget and reference."""
    every = [{**r["found_s"], **r.get("references_s", {})} for r in rows]
    names, lines = list(dict.fromkeys(name for one in every for name in one)), []
    for kind in (*KINDS, "all"):
        some = [one for r, one in zip(rows, every, strict=True) if kind in (r["kind"], "all")]
        if some:
            regrets = [[one[name] / min(one.values()) - 1 for one in some] for name in names]
            cells = [f"{100 * float(np.mean(values)):.2f} ({100 * max(values):.1f})" for values in regrets]
            lines.append([f"{kind} ({len(some)})", *cells])
    return markdown(["", *names], lines)


def brute_force(count: int) -> None:
    """Compares answers on small problems with every strategy."""
    equal = 0
    for seed in range(count):
        asked = small_question(seed)
        mine_s = search(asked).ranked[0].step_s
        better = quicker(asked, mine_s * (1 - 1e-9))
        equal += better is None
        if better is not None:
            print(f"seed {seed} {asked.cluster.text}: {100 * (mine_s / better[0] - 1):.2f} % above the best", flush=True)
    print(f"{equal} of {count} equal")


def main() -> None:
    """Searches problems that have no row yet, and prints the table."""
    options = arguments(
        __doc__,
        problems=(24, "how many"),
        first=(SEEDS, "seed of the first problem"),
        reference_s=(60.0, "seconds of each of the three references; 0: none"),
        calls=(tuple(CALLS), "budgets beside 5 s"),
        large="512 devices",
        rows=(None, "JSONL with a row a problem; what it has is not run again"),
        brute_force=(0, "so many small problems against every strategy instead"),
    )
    if options.brute_force:
        return brute_force(options.brute_force)
    rows = {known["seed"]: known for known in read_rows(Path(options.rows))} if options.rows else {}
    search(problem(0)[1], calls=100)  # kernels are loaded
    seeds = range(options.first, options.first + options.problems)
    for seed in seeds:
        rows[seed] = row(seed, rows.get(seed, {}), options.reference_s, options.large, list(options.calls))
        print(json.dumps(rows[seed]), flush=True)
        if options.rows:
            write_rows(Path(options.rows), (rows[seed] for seed in sorted(rows)))
    print(table([rows[seed] for seed in seeds if "found_s" in rows[seed]]))


if __name__ == "__main__":
    main()
