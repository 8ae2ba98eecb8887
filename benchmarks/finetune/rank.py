"""What every rank of an emulated cluster runs: rank 0 makes the cells, the others time plans.

Started by `benchmarks.finetune`; the settings are one JSON argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

import rlplace
from benchmarks.finetune.clusters import CLUSTERS, MODELS, Emulated
from benchmarks.finetune.rivals import AnnealingProposer, BayesProposer, InTurn, RandomProposer
from rlplace.agents.planner import load_agent
from rlplace.agents.tuning.proposer import AgentProposer
from rlplace.agents.tuning.tune import first_plans, tune
from rlplace.cost.timings import PlanTiming
from rlplace.measured.campaign import Campaign
from rlplace.measured.race import Race
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Budget
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.runtime.distributed.job import job
from rlplace.runtime.distributed.job.live import PlanService, job_site, open_service
from rlplace.runtime.distributed.ranks import broadcast_object
from rlplace.zoo import load_model

FIRST = 8
"""Plans that every method begins with."""

UNTUNED_CALLS = 4096
JUDGED = 5  # rounds in which the answers of all methods are timed in turn
JUDGED_STEPS = 4


@dataclass(frozen=True, eq=False)
class Workload:
    """A model on a cluster, on rank 0."""

    problem: Problem
    service: PlanService


class Rank:
    """One rank; opens models when rank 0 says so."""

    def __init__(self, cluster: Emulated) -> None:
        self.device = job.start_job(job.JobOptions(device="cpu"))
        self.cluster = cluster
        self._services: dict[str, PlanService] = {}
        self._problems: dict[str, Problem] = {}

    def serve(self) -> None:
        """On ranks other than 0."""
        while name := broadcast_object(None):
            self._open(name).serve()

    def open(self, name: str) -> Workload:
        """On rank 0; `release` the service before the next one is opened."""
        broadcast_object(name)
        service = self._open(name)
        return Workload(self._problems[name], service)

    def end(self) -> None:
        """On rank 0: lets the others go."""
        broadcast_object(None)

    def _open(self, name: str) -> PlanService:
        if name not in self._services:
            model = MODELS[name]
            loaded = load_model(model.text, batch=model.batch, seq=model.seq)
            problem = slept = None
            if dist.get_rank() == 0:
                graph = rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss, optimizer="adam")
                problem = rlplace.price(graph, self.cluster.believed(), groups=model.groups)
                slept = self.cluster.slept(problem)
                self._problems[name] = problem
            self._services[name] = open_service(loaded, problem, self.device, replay=True, slept=slept)
        return self._services[name]


class Shared:
    """A method's timer: what another method has measured is taken over, and counts; a plan asked for again is timed anew."""

    def __init__(self, service: PlanService, known: dict[tuple[int, ...], PlanTiming]) -> None:
        self._service, self._known, self._asked = service, known, set[tuple[int, ...]]()

    def __call__(self, plan: PlacementPlan, race: Race) -> PlanTiming:
        key = tuple(plan.device_of_group.tolist())
        again = key in self._asked
        self._asked.add(key)
        if key in self._known and not again:
            return self._known[key]
        timing = self._service(plan, race)
        self._known.setdefault(key, timing)
        return timing


class Cells:
    """Rank 0: makes the cells that are not there yet."""

    def __init__(self, rank: Rank, settings: dict[str, Any], site: str, store: TrialStore) -> None:
        self.rank, self.settings, self.site, self.store = rank, settings, site, store
        self.out = Path(settings["out"])
        self.agent = load_agent(settings["agent"])

    def run(self) -> None:
        done = {(row["model"], row["seed"]) for row in read_rows(self.out) if row["cluster"] == self.rank.cluster.name}
        for seed in self.settings["seeds"]:
            for model in self.settings["models"]:
                if (model, seed) not in done:
                    self._cell(model, seed)

    def _cell(self, model: str, seed: int) -> None:
        work = self.rank.open(model)
        problem = work.problem
        untuned = self.agent.place(problem, calls=UNTUNED_CALLS, seed=seed).device_of_group
        first = first_plans(problem, FIRST, first=untuned, seed=seed)
        answers = {"untuned": untuned}
        facts: dict[str, Any] = {}
        timings: dict[tuple[int, ...], PlanTiming] = {}
        for method in self.settings["methods"]:
            begin = time.time()
            campaign = Campaign(
                problem, Shared(work.service, timings), budget=Budget(plans=self.settings["plans"]), mode="replayed",
                repeats=self.settings["repeats"], run=f"{self.rank.cluster.name}/{model}/{seed}/{method}",
            )  # fmt: skip
            tuned = tune(campaign, self._proposer(method, seed), first, calls=self.settings["calls"])
            self.store.add_problem(problem)
            for trial in campaign.trials:  # for `_best_of`
                self.store.add(msgspec.structs.replace(trial, site=self.site))
            answers[method] = np.array(tuned.best.device_of_group, dtype=np.int32)
            spent = campaign.spent
            facts[method] = {
                "plans": spent.plans, "steps": spent.steps, "measuring_s": 60 * spent.minutes, "seconds": time.time() - begin,
                "failed": sum(not trial.timed for trial in campaign.trials),
                "dropped": sum(trial.status == "dropped" for trial in campaign.trials),
                "own_step_s": tuned.seconds, "noise": campaign.noise,
                "error_before": tuned.belief.fit.error_before, "error_after": tuned.belief.fit.error_after,
                "curve": _curve(campaign),
            }  # fmt: skip
            took = facts[method]["seconds"]
            say(f"{self.rank.cluster.name} {model} {seed} {method}: {1e3 * tuned.seconds:.1f} ms, {took:.0f} s")
        if model in self.settings["best_of_models"]:
            answers["best_of"] = self._best_of(work, f"{self.rank.cluster.name}/{model}/{seed}/best_of", seed)
        judged = self._judge(work, answers, seed)
        work.service.release()
        row = {
            "cluster": self.rank.cluster.name, "model": model, "seed": seed, "judged_s": judged, "facts": facts,
            "plans": {name: plan.tolist() for name, plan in answers.items()},
        }  # fmt: skip
        with (self.out / "cells.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        ratios = {name: round(float(np.median(steps) / np.median(judged["untuned"])), 3) for name, steps in judged.items()}
        say(f"{self.rank.cluster.name} {model} {seed}: over un-tuned {ratios}")

    def _best_of(self, work: Workload, run: str, seed: int) -> Any:
        """The fastest of so many plans: all that the methods have measured, and more that they propose in turn."""
        campaign = Campaign(
            work.problem, work.service, store=self.store, site=self.site, mode="replayed", run=run,
            repeats=self.settings["repeats"], budget=Budget(plans=self.settings["best_of"]),
        )  # fmt: skip
        others = {trial.device_of_group for trial in campaign.trials if trial.run != run}
        campaign.budget = Budget(plans=max(1, self.settings["best_of"] - len(others)))
        methods = [self._proposer(name, seed + 100) for name in ("finetuned", "annealing", "bayes", "random")]
        tuned = tune(campaign, InTurn(methods), [], calls=self.settings["calls"])
        say(f"{run}: {1e3 * tuned.seconds:.1f} ms, {len(campaign.known_plans)} plans")
        return np.array(tuned.best.device_of_group, dtype=np.int32)

    def _proposer(self, method: str, seed: int) -> Any:
        checkpoint = self.agent.checkpoint
        return {
            "finetuned": lambda: AgentProposer(checkpoint, seed=seed),
            "calibrated": lambda: AgentProposer(checkpoint, learn=False, residual=False, seed=seed),
            "policy_only": lambda: AgentProposer(checkpoint, residual=False, seed=seed),
            "residual_only": lambda: AgentProposer(checkpoint, learn=False, seed=seed),
            "annealing": lambda: AnnealingProposer(seed),
            "random": lambda: RandomProposer(seed),
            "bayes": lambda: BayesProposer(seed),
        }[method]()

    def _judge(self, work: Workload, answers: dict[str, Any], seed: int) -> dict[str, list[float]]:
        """Times all answers in turn, in another order every round, so that none gains from when it is timed."""
        rng = np.random.default_rng(seed)
        plans = {name: make_plan(work.problem, plan, planner=name) for name, plan in answers.items()}
        steps: dict[str, list[float]] = {name: [] for name in answers}
        timed: dict[tuple[int, ...], list[str]] = {}
        for name, plan in answers.items():
            timed.setdefault(tuple(plan.tolist()), []).append(name)
        for _ in range(JUDGED):
            for number in rng.permutation(len(timed)):
                names = list(timed.values())[number]
                found = work.service(plans[names[0]], Race(repeats=JUDGED_STEPS)).step_s
                for name in names:
                    steps[name] += found
        return steps


def _curve(campaign: Campaign) -> list[float]:
    """Best step time so far after every plan, as measured at that time."""
    best, curve = float("inf"), []
    for trial in campaign.trials:
        if not trial.anchor:
            best = min(best, trial.median_s if trial.status == "done" else best)
            curve.append(best)
    return curve


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Finished cells; a last line that was cut off is left out."""
    path = out / "cells.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rank = Rank(CLUSTERS[settings["cluster"]])
    site = job_site(rank.device, name=settings["cluster"], label=settings["cluster"])
    if dist.get_rank() == 0:
        with TrialStore(Path(settings["out"]) / "trials.sqlite") as store:
            Cells(rank, settings, store.add_site(site), store).run()
        rank.end()
    else:
        rank.serve()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
