"""Sessions of real runs on emulated hosts that are other than their description: which rule finds the best strategy soonest.

    sudo python -m benchmarks.runs_emulated                    all cells, three hours; rows that stand are not run again
    sudo python -m benchmarks.runs_emulated --clusters slow_host --models llama --seeds 1
    python -m benchmarks.runs_emulated --table

Four hosts with a slow device each, as in `benchmarks/emulated.py`: torch itself, real tensors over shaped links, and blocks
that sleep for their time. The description that the planner has is wrong on purpose: one host is slower than the others
(`slow_host`), one pair of hosts has a fifth of the rate (`slow_link`), links that are described as each pair's own are
shared by all that a host sends (`contended_link`), every host has a speed of its own (`unlike_speeds`). A session measures
five strategies, chosen by a rule; all rules share what was measured in a cell. The figure is the step time of the quickest
run over the least of the cell.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated import cell_of, devices_of
from benchmarks.emulated import question_of as question_on
from benchmarks.emulated_lab import Lab
from benchmarks.emulated_plans import HOSTS, MODELS
from benchmarks.harness import add_row, arguments, markdown, missing, read_rows
from rlplace.errors import RlplaceError
from rlplace.measure.log import Ended
from rlplace.measure.session import Session
from rlplace.plan.plan import PlacementPlan
from rlplace.strategy.drafts import draft_of_strategy, kind_of
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tools.hosts import HostsSpec, cluster_of

ROWS = Path(__file__).with_suffix(".rows.jsonl")
RULES = ("improvement", "calibrate", "list")
RUNS, STEPS, LIMIT_S, RATE = 5, 2, 180.0, 200e6


@dataclass(frozen=True)
class Wrong:
    """The difference between hosts and their description.

    Attributes:
        told: Rates as described: one for every card, or of every pair.
        rates: As they are.
        factors: On the time of blocks, by host.
    """

    told: Any
    rates: Any
    factors: tuple[float, ...] = (1.0,) * HOSTS


def _pairs(slow: tuple[int, int] | None = None) -> tuple[tuple[float, ...], ...]:
    def rate(a: int, b: int) -> float:
        return 0.0 if a == b else RATE / 5 if slow is not None and {a, b} == set(slow) else RATE

    return tuple(tuple(rate(a, b) for b in range(HOSTS)) for a in range(HOSTS))


def wrong_of(cluster: str, seed: int) -> Wrong:
    """Returns a cluster of a kind; the seed says which host or link, and how fast hosts are."""
    rng = np.random.default_rng([seed, 3])
    first, second = (int(host) for host in rng.permutation(HOSTS)[:2])
    if cluster == "slow_host":
        return Wrong(RATE, RATE, tuple(1.8 if host == first else 1.0 for host in range(HOSTS)))
    if cluster == "slow_link":
        return Wrong(_pairs(), _pairs((first, second)))
    if cluster == "contended_link":
        return Wrong(_pairs(), RATE)
    return Wrong(RATE, RATE, tuple(float(factor) for factor in rng.uniform(0.7, 1.7, HOSTS)))


CLUSTERS = ("slow_host", "slow_link", "contended_link", "unlike_speeds")


def question_of(model: str, wrong: Wrong) -> SearchProblem:
    """Says what the planner is asked; strategies use all hosts, as the processes of a launch are as many."""
    machine = cluster_of(HostsSpec(HOSTS, wrong.told), kinds=devices_of(model))
    return question_on(model, machine, lambda draft: "it leaves hosts out" if len(set(draft.devices)) < HOSTS else None)


class Cell:
    """The hosts of a cell, on which plans run; what was measured is kept."""

    def __init__(self, model: str, wrong: Wrong, question: SearchProblem) -> None:
        self.model, self.wrong, self.question = model, wrong, question
        self.known: dict[str, Ended] = {}
        self.lab = Lab(HostsSpec(HOSTS, wrong.rates), LIMIT_S)

    def __call__(self, plan: PlacementPlan) -> Ended:
        """Runs a plan, or says what became of it before."""
        assert plan.strategy is not None
        key = json.dumps(plan.strategy.to_dict(), sort_keys=True)
        if key not in self.known:
            draft = draft_of_strategy(plan.strategy, self.question.costs.names)
            cell = cell_of(self.model, draft, self.question.costs)
            try:
                told = self.lab({**cell, "steps": STEPS, "factors": self.wrong.factors})
            except RlplaceError as error:
                self.known[key] = Ended(status="crashed", reason=str(error).splitlines()[0][:300])
            else:
                pace_s = tuple(1e-3 * factor for factor in self.wrong.factors)
                self.known[key] = Ended(
                    "done", step_s=tuple(told["step_s"]), pace_s=pace_s, stage_busy_s=tuple(told["stage_busy_s"])
                )
        return self.known[key]


def play(cell: Cell, plan: PlacementPlan, rule: str, seed: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Returns step time of the quickest run after each, and what became of them."""
    session = Session(cell.question, plan, cell, rule=rule, seed=seed)
    best, said = [], []
    for number, (_, run) in enumerate(session.runs(RUNS)):
        done = [ran.step_s for ran in session.belief.observations if ran.step_s is not None]
        best.append(min(done, default=float("inf")))
        draft = session.belief.pool.drafts[session.belief.observations[number].candidate]
        said.append(
            {
                "kind": kind_of(draft), "schedule": draft.schedule, "microbatches": draft.microbatches, "bounds": draft.bounds,
                "order": [draft.places[place].devices for place in draft.place_of_stage],
                "predicted_s": round(run.predicted_s, 4), "expected_s": round(run.expected_s, 4),
                "step_s": [round(seconds, 4) for seconds in run.step_s], "reason": run.reason,
            }
        )  # fmt: skip
    return best + best[-1:] * (RUNS - len(best)), said


def measure(options: argparse.Namespace) -> None:
    """Plays all rules in every cell that has no rows yet, and adds them."""
    asked = [(c, model, seed) for seed in range(options.seeds) for model in options.models for c in options.clusters]
    for cluster, model, seed in missing(ROWS, asked, "cluster", "model", "seed"):
        wrong = wrong_of(cluster, seed)
        question = question_of(model, wrong)
        draft = search(question, calls=400).ranked[0].draft
        plan = PlacementPlan(
            "0" * 64, "strategy", 0, np.zeros(0, dtype=np.int32), strategy=draft.strategy(question.costs.names),
            predicted=prediction(question.scores.evaluate(draft), draft.batch, question.cluster),
        )  # fmt: skip
        cell = Cell(model, wrong, question)
        try:
            found = {rule: play(cell, plan, rule, seed) for rule in RULES}
        finally:
            cell.lab.close()
        medians = [float(np.median(ended.step_s)) for ended in cell.known.values() if ended.status == "done"]
        least_s = min(medians)
        for rule, (best, said) in found.items():
            row = {"cluster": cluster, "model": model, "seed": seed, "rule": rule, "least_s": round(least_s, 4)}
            over = [round(value / least_s, 4) for value in best]
            add_row(ROWS, {**row, "measured": len(cell.known), "over": over, "runs": said})


def table() -> str:
    """Makes the table of geometric means by cluster and rule after 1, 2, 3 and 5 runs."""
    over: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for row in read_rows(ROWS):
        for cluster in (row["cluster"], "all"):
            over[cluster, row["rule"]].append(row["over"])
    lines = []
    for cluster, rule in product((*CLUSTERS, "all"), dict.fromkeys(rule for _, rule in over)):
        if rows := over.get((cluster, rule)):
            means = np.exp(np.log(np.minimum(np.array(rows), 3.0)).mean(axis=0))
            lines.append([cluster, rule, len(rows), *(f"{means[number - 1]:.3f}" for number in (1, 2, 3, 5))])
    return markdown(["cluster", "rule", "sessions", "1", "2", "3", "5"], lines)


if __name__ == "__main__":
    options = arguments(
        __doc__,
        clusters=(CLUSTERS, "how hosts differ", CLUSTERS),
        models=(tuple(name for name, model in MODELS.items() if model.kind == "plain"), "names", MODELS),
        seeds=(3, "of every cell"),
        table="only the table",
    )
    if not options.table:
        measure(options)
    print(table())
