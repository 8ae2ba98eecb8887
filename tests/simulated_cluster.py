"""A simulated cluster: it times plans by a problem of its own, with noise, failures and drift, on a clock of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlplace.cost.timings import PlaceTiming, PlanTiming
from rlplace.measured.campaign import PlanFailed
from rlplace.measured.trial import Trial
from rlplace.simulator import simulate


class Clock:
    """Stands in for the module `time` of a campaign."""

    def __init__(self, now_s=1_000_000.0):
        self.now_s = now_s

    def time(self):
        return self.now_s


class SimulatedCluster:
    """A timer of campaigns.

    `noise` is the standard deviation of single steps; `fails` gives a status for a plan that does not run; `slowdown` the
    factor of all times at a moment. `runs` counts how often each plan was run.
    """

    def __init__(
        self, truth, *, seed=0, noise=0.02, fails=lambda plan: None, slowdown=lambda now_s: 1.0, clock=None,
        setup_s=0.5,
    ):  # fmt: skip
        self.truth, self.noise = truth, noise
        self.fails, self.slowdown, self.clock, self.setup_s = fails, slowdown, clock or Clock(), setup_s
        self.rng = np.random.default_rng(seed)
        self.runs = Counter()
        self.order = []

    def true_s(self, plan):
        """What a step takes without noise and drift."""
        return simulate(self.truth, np.array(plan, dtype=np.int32)).step_time_s

    def __call__(self, plan, race):
        key = tuple(plan.device_of_group.tolist())
        self.runs[key] += 1
        self.order.append(key)
        self.clock.now_s += self.setup_s
        status = self.fails(key)
        if status is not None:
            raise PlanFailed(status, f"this plan is made to be {status}")
        line = simulate(self.truth, plan.device_of_group)
        steps = []
        while not (steps and race.over(steps)):
            slow = self.slowdown(self.clock.now_s)
            steps.append(float(slow * line.step_time_s * np.exp(self.noise * self.rng.normal())))
            self.clock.now_s += steps[-1]
        return PlanTiming(
            name="", plan=plan.fingerprint, problem=plan.problem, planner=plan.planner, engine="simulated", mode="computed",
            step_s=tuple(steps), predicted_s=None, places=self.places(line), setup_s=self.setup_s,
        )  # fmt: skip

    def places(self, line):
        """Busy seconds of the devices that a plan uses, with an error of one per cent."""
        return tuple(
            PlaceTiming(device, "host", float(busy_s * np.exp(0.01 * self.rng.normal())), 0.0, 0.0, 0.0)
            for device, busy_s in enumerate(line.busy_s)
            if busy_s > 0
        )

    def trial(self, problem, plan, *, steps=3, site="", busy=True):
        """A trial of a plan, without a campaign."""
        line = simulate(self.truth, plan)
        step_s = line.step_time_s * np.exp(self.noise * self.rng.normal(size=steps))
        return Trial(
            problem=problem.fingerprint, site=site, device_of_group=tuple(int(device) for device in plan),
            status="done",
            step_s=tuple(step_s.tolist()), places=self.places(line) if busy else (),
        )  # fmt: skip


def random_plans(problem, count, *, seed=0, around=None):
    """Distinct plans: random ones, or random changes of one plan."""
    rng = np.random.default_rng(seed)
    found = {}
    while len(found) < count:
        plan = rng.integers(0, problem.num_devices, problem.num_groups)
        if around is not None:
            kept = rng.random(problem.num_groups) > rng.choice([0.05, 0.2, 0.5, 1.0])
            plan = np.where(kept, around, plan)
        found[tuple(plan.tolist())] = plan.astype(np.int32)
    return list(found.values())
