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
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import emulated
from benchmarks.emulated import BATCH, BYTES_PER_S, FLOPS, HOSTS, _sleeps, as_a_gpu, captured
from benchmarks.harness import add_row, arguments, markdown, missing, read_rows
from rlplace.cluster.presets import cpu_kind
from rlplace.measure.log import Ended
from rlplace.measure.session import Session
from rlplace.plan.plan import PlacementPlan
from rlplace.strategy.drafts import Draft, draft_of_strategy, kind_of
from rlplace.strategy.search.plan import ask, prediction
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tools.hosts import HostsSpec, cluster_of, emulated_hosts, launch

ROWS = Path(__file__).with_suffix(".rows.jsonl")
RULES = ("improvement", "calibrate", "list")
RUNS, STEPS, LIMIT_S, RATE = 5, 2, 180.0, 200e6

_SMALL = "hidden_size=256,num_hidden_layers=8,num_attention_heads=8,vocab_size=512"
emulated.MODELS.update(
    opt=f"hf:opt,{_SMALL},ffn_dim=1024,word_embed_proj_dim=256,max_position_embeddings=64,dropout=0,attention_dropout=0",
    qwen2=f"hf:qwen2,{_SMALL},intermediate_size=768,num_key_value_heads=4",
)
MODELS = tuple(emulated.MODELS)


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
    speeds = {"peak_flops": {"float32": FLOPS}, "memory_bandwidth_bytes_per_s": BYTES_PER_S}
    kind = msgspec.structs.replace(cpu_kind(1, 1 << 40, "sleeper"), **speeds)
    first, other, why_not, only = captured(model)

    def refused(draft: Draft) -> str | None:
        if len(set(draft.devices)) < HOSTS:
            return "it leaves hosts out"
        reason: str | None = None if why_not is None else why_not(draft)
        return reason

    machine = cluster_of(HostsSpec(HOSTS, wrong.told), kinds=[kind] * HOSTS)
    return ask(first, machine, BATCH, other=other, why_not=refused, only=only)


class Lab:
    """The hosts of a cell, with processes that run one strategy after the other; what was measured is kept."""

    def __init__(self, model: str, wrong: Wrong, question: SearchProblem) -> None:
        self.model, self.wrong, self.question = model, wrong, question
        self.known: dict[str, Ended] = {}
        self._stack, self._count, self._ending = contextlib.ExitStack(), 0, False
        self._job: Any = None
        self._said: list[dict[str, Any]] = []

    def __call__(self, plan: PlacementPlan) -> Ended:
        """Runs a plan, or says what became of it before."""
        assert plan.strategy is not None
        key = json.dumps(plan.strategy.to_dict(), sort_keys=True)
        if key not in self.known:
            self.known[key] = self._run(draft_of_strategy(plan.strategy, self.question.costs.names), plan)
        return self.known[key]

    def _run(self, draft: Draft, plan: PlacementPlan) -> Ended:
        assert plan.strategy is not None
        if self._job is None:
            self._start()
        sleeps = [_sleeps(self.question.costs, draft, stage) for stage in range(draft.stages)]
        cell = {
            "model": self.model, "name": "", "strategy": plan.strategy.to_dict(), "sleeps": sleeps,
            "factors": self.wrong.factors,
        }  # fmt: skip
        self._said.clear()
        target = self._folder / f"{self._count}.json"
        target.with_suffix(".part").write_text(json.dumps(cell))
        target.with_suffix(".part").rename(target)
        self._count += 1
        begin = time.monotonic()
        while not self._said and time.monotonic() < begin + LIMIT_S:
            try:
                self._job.check()
            except Exception as error:
                self.close()
                return Ended(status="crashed", reason=str(error).splitlines()[0][:300])
            time.sleep(0.05)
        if not self._said:
            self.close()
            return Ended(status="crashed", reason=f"it took more than {LIMIT_S:g} s")
        told = self._said[0]
        pace_s = tuple(1e-3 * factor for factor in self.wrong.factors)
        return Ended("done", step_s=tuple(told["step_s"]), pace_s=pace_s, stage_busy_s=tuple(told["stage_busy_s"]))

    def _start(self) -> None:
        self._count, self._ending = 0, False
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = self._stack.enter_context(emulated_hosts(HostsSpec(HOSTS, self.wrong.rates)))
        command = [sys.executable, "-m", "benchmarks.runs_emulated", "--worker", str(self._folder)]
        self._job = self._stack.enter_context(launch(hosts, command, env={"OMP_NUM_THREADS": "1"}, sink=self._hear))

    def _hear(self, rank: int, host: int, stream: int, line: str) -> None:
        if stream == 1 and line.startswith("{"):
            self._said.append(json.loads(line))
        elif stream == 2 and "Error" in line and not self._ending:
            print(f"[{rank}] {line}", file=sys.stderr)

    def close(self) -> None:
        """Ends the processes and removes the hosts."""
        self._ending = True  # what ranks say when others end first
        self._stack.close()
        self._job = None


def worker(folder: str) -> None:
    """Runs, in one process, strategies as their files appear."""
    import torch
    import torch.distributed as dist

    from rlplace.runtime.base.ranks import gather_objects, start_group

    torch.set_num_threads(1)
    emulated.STEPS = STEPS
    start_group("gloo", int(LIMIT_S))
    as_a_gpu()
    rank, number = dist.get_rank(), 0
    while True:
        path = Path(folder, f"{number}.json")
        if not path.exists():
            time.sleep(0.02)
            continue
        cell = json.loads(path.read_text())
        factor = cell["factors"][rank]
        for sleeps in cell["sleeps"]:
            sleeps["blocks"] = {name: [factor * s for s in seconds] for name, seconds in sleeps["blocks"].items()}
            sleeps["update_s"] *= factor
        stages = cell["strategy"]["stages"]
        emulated.CHUNKS["stages"] = [index for index, stage in enumerate(stages) if rank in stage["devices"]]
        seconds = emulated.run(cell)
        said = gather_objects(emulated.CHUNKS["spent_s"])
        busy_s = [max(one.get(f"stage {n}", 0.0) for one in said) for n in range(len(stages))] if len(stages) > 1 else []
        if rank == 0:
            print(json.dumps({"step_s": seconds, "stage_busy_s": busy_s}), flush=True)
        number += 1


def play(lab: Lab, plan: PlacementPlan, rule: str, seed: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Returns step time of the quickest run after each, and what became of them."""
    session = Session(lab.question, plan, lab, rule=rule, seed=seed)
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
            predicted=prediction(question.scores.evaluate(draft), BATCH, question.cluster),
        )  # fmt: skip
        lab = Lab(model, wrong, question)
        try:
            found = {rule: play(lab, plan, rule, seed) for rule in RULES}
        finally:
            lab.close()
        medians = [float(np.median(ended.step_s)) for ended in lab.known.values() if ended.status == "done"]
        least_s = min(medians)
        for rule, (best, said) in found.items():
            row = {"cluster": cluster, "model": model, "seed": seed, "rule": rule, "least_s": round(least_s, 4)}
            over = [round(value / least_s, 4) for value in best]
            add_row(ROWS, {**row, "measured": len(lab.known), "over": over, "runs": said})


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
        models=(MODELS, "names", MODELS),
        seeds=(3, "of every cell"),
        table="only the table",
        worker=("", "used inside"),
    )
    if options.worker:
        worker(options.worker)
    else:
        if not options.table:
            measure(options)
        print(table())
