"""``rlplace finetune MODEL``: under torchrun, measures plans on the processes of the job and learns from them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from rlplace.cli.common import costs_of, load, microbatch, print_json, say
from rlplace.errors import InputError, RlplaceError
from rlplace.plan.prediction import Prediction
from rlplace.text import ms

if TYPE_CHECKING:
    import torch

    from rlplace.agents.checkpoint import Checkpoint
    from rlplace.agents.tuning.tune import Tuned
    from rlplace.graph.opgraph import OpGraph
    from rlplace.measured.campaign import Campaign
    from rlplace.measured.site import Site
    from rlplace.measured.store import TrialStore
    from rlplace.measured.trial import Trial
    from rlplace.problem import Problem
    from rlplace.runtime.distributed.job.live import PlanService

_FIRST_SHARE, _FIRST_MOST = 5, 10  # one plan in this many is measured before anything is learned


def run(options: argparse.Namespace, path: str) -> int:
    """Runs on this rank; rank 0 leads, the others time plans.

    Args:
        options: Options of the command line.
        path: File that measurements go to.
    """
    import torch
    import torch.distributed as dist

    from rlplace.files import check_output
    from rlplace.runtime.distributed.job import faults, job

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.cluster is None:
        raise InputError("finetune: --cluster C describes the devices of the job")
    if not options.out:
        raise InputError("finetune: --out DIR names the folder of the new agent")
    for output in (path, options.best_plan, options.report):
        if output:
            check_output(output)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = job.start_job(job.JobOptions(device=options.device.partition(":")[0]), options.timeout)
    with faults.guard(debug=options.debug):
        problem, service = _open(options, device)
        site = _site(options, device)
        if dist.get_rank() == 0:
            assert problem is not None
            try:
                _lead(options, path, problem, service, site)
            except (KeyboardInterrupt, RlplaceError):  # between two plans: the others wait to be asked
                service.release()
                raise
            service.release()
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the job, after the plan that runs
            service.serve()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0


def _open(options: argparse.Namespace, device: torch.device) -> tuple[Problem | None, PlanService]:
    """The priced problem on rank 0, and the service on every rank."""
    import torch
    import torch.distributed as dist

    from rlplace.runtime.distributed.job.live import open_service
    from rlplace.zoo import load_model

    problem = slept = None
    if dist.get_rank() == 0:
        priced = load(options.model, options.cluster, options)
        problem = priced.first
        if options.replay:
            slept = _priced_alike(priced.graph, options)
    where = "cpu" if options.replay is None else "meta"  # what only sleeps needs no values
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        loaded = load_model(options.model, batch=microbatch(options), seq=options.seq, dtype=options.dtype, device=where)
    live = {"optimizer": options.optimizer, "replay": options.replay is not None}
    return problem, open_service(loaded, problem, device, slept=slept, **live)


def _priced_alike(graph: OpGraph | None, options: argparse.Namespace) -> Problem:
    """The same groups, priced for the cluster that is replayed."""
    from rlplace.cluster.parse import parse
    from rlplace.cost.price import device_times, price
    from rlplace.graph.coarsen import coarsen

    if graph is None:
        raise InputError("finetune: a problem file has no model to run; name the model instead")
    machine, replay = parse(options.cluster), parse(options.replay)
    pricing = {"costs": costs_of(options, machine, replay), "host": options.host_mode}
    seconds = device_times(graph, machine, **pricing)
    grouping = coarsen(graph, options.granularity, cost=seconds.mean(axis=1))
    return price(graph, replay, groups=grouping, **pricing)


def _site(options: argparse.Namespace, device: torch.device) -> Site:
    from rlplace.runtime.distributed.job.live import job_site

    label = options.label
    if options.replay is not None:  # what is slept is part of what the cluster is
        label = f"{label} replay of {options.replay or options.cluster}".strip()
    return job_site(device, name=options.cluster, label=label)


def _lead(options: argparse.Namespace, path: str, problem: Problem, service: PlanService, site: Site) -> None:
    import torch

    from rlplace.agents.checkpoint import load_checkpoint
    from rlplace.agents.planner import Agent
    from rlplace.agents.tuning.proposer import AgentProposer
    from rlplace.agents.tuning.tune import first_plans, tune
    from rlplace.cli.finetune import check_new
    from rlplace.measured.campaign import Campaign
    from rlplace.measured.store import TrialStore
    from rlplace.measured.trial import Budget

    checkpoint = load_checkpoint(options.agent)
    check_new(options.out, options.agent)
    threads = torch.get_num_threads()
    with TrialStore(path) as store:
        watcher = _Progress(options.plans)
        campaign = Campaign(
            problem,
            service,
            store=store,
            site=store.add_site(site),
            budget=Budget(options.plans, options.max_steps, options.minutes),
            repeats=options.repeats,
            mode="computed" if options.replay is None else "replayed",
            run=options.run_name or f"{options.model} on {options.cluster}",
            on_trial=watcher.trial,
        )
        watcher.begin(campaign)
        untuned = Agent(checkpoint).place(problem, time_limit_s=5.0, seed=options.seed)
        count = min(_FIRST_MOST, max(2, options.plans // _FIRST_SHARE))
        first = first_plans(problem, count, first=untuned.device_of_group, seed=options.seed)
        try:
            tuned = tune(campaign, AgentProposer(checkpoint, seed=options.seed), first, calls=options.calls)
        except KeyboardInterrupt:
            say(f"interrupted; {path} holds every plan that was measured, the same command goes on from there")
            raise
        torch.set_num_threads(threads)
        _finish(options, checkpoint, campaign, tuned, campaign.known(untuned.device_of_group), store, site)


def _finish(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    campaign: Campaign,
    tuned: Tuned,
    untuned: Trial | None,
    store: TrialStore,
    site: Site,
) -> None:
    from rlplace.agents.tuning.offline import measurements_of
    from rlplace.agents.tuning.tune import report_of, report_text
    from rlplace.cli.finetune import teach
    from rlplace.files import write_text

    sets = [
        measurements
        for measurements in measurements_of(store, site=site.fingerprint)
        if measurements.problem.fingerprint == campaign.problem.fingerprint
    ]
    facts = teach(options, checkpoint, sets)
    report = report_of(campaign, tuned, untuned, facts)
    if options.best_plan:
        campaign.plan(tuned.best).with_predicted(Prediction(tuned.seconds, feasible=True, executor=campaign.mode)).save(
            options.best_plan
        )
        say(f"wrote {options.best_plan}")
    text = report_text(report)
    if options.report:
        write_text(options.report, text)
        say(f"wrote {options.report}")
    if options.json:
        print_json(report)
    else:
        print(text)


class _Progress:
    """Lines about what is measured, with the time that is left."""

    def __init__(self, plans: int) -> None:
        self._plans = plans
        self._campaign: Campaign | None = None
        self._begin_s, self._known = time.monotonic(), 0

    def begin(self, campaign: Campaign) -> None:
        """Says how many plans are measured already."""
        self._campaign, self._known = campaign, campaign.spent.plans
        others = len([trial for trial in campaign.trials if trial.run != campaign.run])
        if campaign.trials:
            say(f"going on: {self._known} plans of this run are measured, {others} of others on the same cluster")

    def trial(self, trial: Trial) -> None:
        """One line a trial."""
        assert self._campaign is not None
        spent, best = self._campaign.spent, self._campaign.best()
        new = max(1, spent.plans - self._known)
        left_s = (time.monotonic() - self._begin_s) / new * max(0, self._plans - spent.plans)
        what = f"{ms(trial.median_s)} ms" if math.isfinite(trial.median_s) else f"{trial.status}: {trial.reason[:80]}"
        dropped = {"done": "", "dropped": ", given up"}.get(trial.status, "")
        again = ", again" if trial.anchor else ""
        at_best = "-" if best is None else f"{ms(self._campaign.seconds(best))} ms"
        say(f"{spent.plans}/{self._plans} plans: {what}{dropped}{again}; best {at_best}; about {left_s:.0f} s left")
