"""A campaign on the ranks of a job; rank 1 is killed when a certain plan runs. Arguments: store, how often it may be killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from plans import plan_of
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.measured.campaign import Campaign, PlanFailed
from rlplace.measured.race import Race
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Budget
from rlplace.plan.plan import make_plan
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.job import faults, job
from rlplace.runtime.distributed.job.live import job_site, open_service
from rlplace.runtime.distributed.job.measure import PlanTimer
from rlplace.zoo import LoadedModel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        return (self.layers(x) ** 2).mean()


def loss_of(output):
    return output


def loaded():
    torch.manual_seed(0)
    return LoadedModel(module=Net(), example_inputs={"x": torch.randn(4, 16)}, loss=loss_of, name="net")


def problem_of(model):
    graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss)
    return rlplace.price(graph, "cpu:2", groups=4)


DEADLY = 1


def deadly(plan):
    """The plan that puts everything on device 1."""
    return bool((np.asarray(plan.device_of_group) == DEADLY).all())


class Dangerous(PlanTimer):
    """Rank 1 dies of one plan."""

    def __call__(self, plan, *args, **options):
        if deadly(plan) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(plan, *args, **options)


def plans(groups):
    alternating = np.arange(groups, dtype=np.int32) % 2
    return [np.zeros(groups, dtype=np.int32), np.ones(groups, dtype=np.int32), alternating, 1 - alternating]


SLEPT_S = 0.4


class Paired(nn.Module):
    """Has an input of its own that is called as the target of a loss is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, target):
        return ((self.second(self.first(x).relu()) - target) ** 2).mean()


def own_target():
    """The loss of `Paired`, distributed and not; and what a loss with a target of its own says."""
    torch.manual_seed(1)
    model, inputs = Paired(), {"x": torch.randn(4, 4), "target": torch.randn(4, 4)}
    plan = plan_of(model, inputs, 2, loss=loss_of, deal="chain", groups=2)
    placed = distribute(model, plan, inputs, loss=loss_of)
    try:
        distribute(model, plan, inputs, loss=lambda output, wanted: output)
    except InputError as error:
        refused = str(error)
    return float(placed(**inputs).detach()), float(model(**inputs).detach()), refused


def serve_all(path):
    """What rank 0 saw of: computed and replayed plans, a race that is lost, a plan that no engine runs, two campaigns."""
    device = torch.device("cpu")
    model = loaded()
    problem = problem_of(model) if dist.get_rank() == 0 else None
    slow = None if problem is None else _slower(problem, SLEPT_S / problem.time_s[:, 0].sum())
    computed = open_service(model, problem, device)
    replayed = open_service(model, problem, device, replay=True, slept=slow)
    chained = open_service(model, problem, device)
    site = job_site(device, label="a test")
    own = own_target()
    if dist.get_rank() != 0:
        computed.serve()
        replayed.serve()
        chained.serve()
        computed.serve()  # a service that was released may be entered again
        return site.fingerprint
    found = {"site": site.fingerprint, "own target": own}
    chain = np.arange(problem.num_groups, dtype=np.int32) * 2 // problem.num_groups
    found["computed"] = computed(make_plan(problem, chain, planner="t"), Race(repeats=3))
    found["lost"] = computed(make_plan(problem, chain, planner="t"), Race(repeats=5, best_s=1e-9))
    computed.release()
    found["replayed"] = replayed(make_plan(problem, chain, planner="t"), Race(repeats=2))
    replayed.release()
    try:
        chained(dataclasses.replace(make_plan(problem, chain, planner="t"), device_of_group=chain + 1), Race(repeats=1))
    except PlanFailed as error:
        found["refused"] = (error.status, str(error))
    found["after"] = chained(make_plan(problem, chain, planner="t"), Race(repeats=1))
    chained.release()
    with TrialStore(path) as store:
        campaign = Campaign(problem, computed, store=store, site=store.add_site(site), budget=Budget(plans=3), repeats=2)
        found["trials"] = [campaign.measure(plan).status for plan in plans(problem.num_groups)[:3]]
    computed.release()
    return found


def _slower(problem, factor):
    return dataclasses.replace(problem, time_s=problem.time_s * factor)


def main(path):
    torch.set_num_threads(1)
    device = job.start_job(job.JobOptions(device="cpu"))
    model = loaded()
    with faults.guard():
        problem = problem_of(model) if dist.get_rank() == 0 else None
        service = open_service(model, problem, device)
        site = job_site(device, label="test")
        service.timer.__class__ = Dangerous
        if dist.get_rank() == 0:
            with TrialStore(path) as store:
                campaign = Campaign(
                    problem, service, store=store, site=store.add_site(site), budget=Budget(plans=10), repeats=2, run="it"
                )
                for plan in plans(problem.num_groups):
                    campaign.measure(plan)
            service.release()
        else:
            service.serve()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
