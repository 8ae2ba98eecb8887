"""`Belief`: the posterior of every candidate's step time and memory given all runs, and acquisition functions over it.

Prior: log step times of the candidates are jointly Gaussian. Their covariance is that of the cost model's own predictions in
worlds along the axes (`rlplace.measure.world`), linear around the world that is believed in (an iterated Kalman filter, Bell
and Cathey 1993, with the unscented transform), plus a residual that no axis explains: a kernel over features of the
strategies, a habit of each kind, and an independent part of each candidate. So a run informs about every strategy that shares
a device, a link or a habit with it.

Likelihood: a run observes its log step time; how long devices of one kind take for the same product separates hosts; how busy
its stages were separates their devices. Runs elsewhere observe the candidates most like theirs, on axes like these.

Posterior: Gaussian process regression in closed form (Rasmussen and Williams 2006, section 2.2), which also gives the axes, so
that a search can ask the corrected model for better strategies. Memory is one unknown, the log of how much more a step takes
than predicted, on a grid, since a run that did not fit only says "more than that".

Acquisition: a rule chooses the candidate to run next, or None where none is worth a run. All weigh a run that does not fit
alike: before anything has run it counts as `LOST`, the log of how much longer a step takes than the best (a person waits for a
plan that works); afterwards it keeps the best so far.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.log import Run
from rlplace.measure.pool import Pool
from rlplace.measure.world import SLACK, SPREAD, World, axes, linear, world_of
from rlplace.strategy.costs import Floats
from rlplace.strategy.drafts import kind_of

KIND, ALIKE, OWN, WIDTH = 0.06, 0.05, 0.02, 0.7
"""Standard deviations of the residual: shared by strategies of a kind and schedule, by those with like features, and of each
candidate; root mean square distance of features, in standard deviations of each, over which likeness falls."""

NOISE = 0.01
"""Relative standard deviation of a measured step time."""

PACE_NOISE = 0.03
"""Relative standard deviation of the time of the same product on several hosts."""

BUSY_NOISE = 0.05
"""Relative standard deviation of the seconds of a stage's passes: blocks are mispriced, too."""

ELSEWHERE = 1.0
"""Standard deviation of the difference on every axis from another cluster with devices of the same kinds."""

PEAK_NOISE = 0.03
"""Standard deviation of the log of a candidate's own memory over that by the shared factor."""

LOST = math.log(3.0)

LEAST_CHANCE = 0.05
"""Candidates that are less likely to fit are not run."""

_GRID = np.linspace(-4.0, 6.0, 201)


@dataclass(frozen=True)
class Observation:
    """The outcome of a run.

    Attributes:
        candidate: Its number in the pool.
        step_s: Step time in seconds; None where it ended before a step did.
        share: Measured peak of the fullest device beyond its reserved bytes, over its room; None where it was not measured.
        out_of_memory: Whether it ended because it did not fit.
        pace_s: By device, seconds of a product that is the same on all; empty where it was not timed.
        stage_busy_s: By stage of a pipeline, seconds of its passes; empty where they were not timed.
    """

    candidate: int
    step_s: float | None
    share: float | None = None
    out_of_memory: bool = False
    pace_s: tuple[float, ...] = ()
    stage_busy_s: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Belief:
    """Candidates, and the posterior of their step times and memory.

    Attributes:
        pool: The candidates, C of them.
        observations: Runs, in their order.
        elsewhere: Runs on other clusters of the same kinds of devices, each with a step time.
    """

    pool: Pool
    observations: tuple[Observation, ...] = ()
    elsewhere: tuple[Run, ...] = ()

    def update(self, observation: Observation) -> Belief:
        """Conditions on another run."""
        after = dataclasses.replace(self, observations=(*self.observations, observation))
        if "_prior" in vars(self):
            vars(after)["_prior"] = self._prior
        return after

    @cached_property
    def _prior(self) -> tuple[Floats, Floats, Floats]:
        """Mean [C], loadings on axes [C, P], and covariance [C, C] of log step times."""
        pool = self.pool
        at_zero, slopes, bent = linear(pool.worlds.center, pool.log_s)
        kinds = [(kind_of(draft), draft.schedule) for draft in pool.drafts]
        same = np.array([[one == other for other in kinds] for one in kinds], dtype=np.float64)
        covariance = slopes @ slopes.T + KIND**2 * same + ALIKE**2 * _likeness(self._distance(pool.features))
        return at_zero, slopes, covariance + np.diag(OWN**2 + bent**2)

    def _distance(self, features: Floats) -> Floats:
        """Returns float64 [N, C], mean square distance of features [N, F] from the candidates', in variances of theirs."""
        of_pool = self.pool.features
        scale = np.maximum(of_pool.std(axis=0), 1e-3)
        distance: Floats = ((features[:, None] / scale - of_pool[None] / scale) ** 2).mean(axis=2)
        return distance

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, Floats]:
        """Mean [C] and covariance [C, C] of log step times, and means of the axes [P]."""
        mean, slopes, covariance = self._prior
        timed = [run for run in self.observations if run.step_s is not None]
        loadings, innovations, std = self._rates()
        if not timed and not self.elsewhere and not len(innovations):
            return mean, covariance, np.zeros(slopes.shape[1])
        near, log_s, elsewhere = self._transferred()
        at, here = [*(run.candidate for run in timed), *near], len(timed)
        observed = np.concatenate([np.log([float(run.step_s or 0.0) for run in timed]), log_s]) - mean[at]
        observed = np.concatenate([observed, innovations])
        by_axis = np.concatenate([slopes[at], loadings])
        with_all = np.concatenate([covariance[at], loadings @ slopes.T])
        noise = np.diag(np.concatenate([np.full(here, NOISE), np.zeros(len(near)), std]) ** 2)
        noise[here : len(at), here : len(at)] = elsewhere
        inner = by_axis @ by_axis.T + noise
        inner[: len(at), : len(at)] = covariance[np.ix_(at, at)] + noise[: len(at), : len(at)]
        gain, weights = np.linalg.solve(inner, with_all).T, np.linalg.solve(inner, observed)
        return mean + with_all.T @ weights, covariance - gain @ with_all, by_axis.T @ weights

    def _transferred(self) -> tuple[list[int], Floats, Floats]:
        """Returns N runs elsewhere as observations of the candidates most like theirs.

        Returns:
            The candidate of each; log of its step time if it is mispriced as that run was [N]; and the covariance of their
            other differences [N, N]: of the clusters, and of strategies that are unlike.
        """
        runs, pool = self.elsewhere, self.pool
        if not runs:
            return [], np.zeros(0), np.zeros((0, 0))
        distance = self._distance(np.array([run.features for run in runs]))
        near = distance.argmin(axis=1)
        wrong = np.log([float(run.median_s or 0.0) / run.predicted_s for run in runs])
        _, slopes, covariance = self._prior
        unlike = 2 * (1 - _likeness(distance.min(axis=1))) * covariance[near, near]
        noise = ELSEWHERE**2 * slopes[near] @ slopes[near].T + np.diag(OWN**2 + NOISE**2 + unlike)
        return near.tolist(), np.log(pool.by_model_s[near]) + wrong, noise

    def _rates(self) -> tuple[Floats, Floats, Floats]:
        """Returns observations beside step times: loadings on axes [N, P], innovations [N], their standard deviations [N]."""
        loadings, innovations = self._paces()
        stages = [self._stages(run) for run in self.observations if run.stage_busy_s]
        paces = (loadings, innovations, np.full(len(innovations), PACE_NOISE))
        columns = zip(paces, *stages, strict=True)
        by_axis, values, std = (np.concatenate(column) for column in columns)
        return by_axis, values, std

    def _stages(self, run: Observation) -> tuple[Floats, Floats, Floats]:
        """Returns the seconds of a run's stages relative to each other, as `_rates`."""
        worlds = self.pool.worlds
        log_s = np.log(worlds.stage_busy_s(self.pool.drafts[run.candidate]))
        at_zero, slopes, bent = linear(worlds.center, log_s - log_s.mean(axis=1, keepdims=True))
        took = np.log(run.stage_busy_s)
        return slopes, took - took.mean() - at_zero, np.hypot(BUSY_NOISE, bent)

    def _paces(self) -> tuple[Floats, Floats]:
        """Returns the slowness of hosts relative to others with devices of the same kind: loadings [N, P], innovations [N]."""
        cluster = self.pool.worlds.cluster
        names = [kind.name for kind in cluster.kinds]
        axis = {name: number for number, name in enumerate(axes(cluster))}
        rows, innovations = [], []
        for run in self.observations:
            for name in dict.fromkeys(names):
                own = [d for d in range(min(len(names), len(run.pace_s))) if names[d] == name]
                hosts = sorted({cluster.hosts[d] for d in own})
                by_host = [np.mean([math.log(run.pace_s[d]) for d in own if cluster.hosts[d] == host]) for host in hosts]
                for number, host in enumerate(hosts if len(hosts) > 1 else ()):
                    row = np.zeros(len(axis))
                    for other in hosts:
                        row[axis[f"host {other}"]] = SPREAD["host"] * (float(other == host) - 1.0 / len(hosts))
                    rows.append(row)
                    innovations.append(by_host[number] - np.mean(by_host))
        return np.array(rows).reshape(-1, len(axis)), np.array(innovations)

    @property
    def mean(self) -> Floats:
        """float64 [C], posterior mean of the log step time."""
        return self._posterior[0]

    @property
    def std(self) -> Floats:
        """float64 [C], posterior standard deviation of the log step time."""
        return np.sqrt(np.maximum(np.diag(self._posterior[1]), 1e-12))

    @property
    def covariance(self) -> Floats:
        """float64 [C, C], posterior covariance of log step times."""
        return self._posterior[1]

    @property
    def axes(self) -> Floats:
        """float64 [P], posterior mean of the cluster's axes (`rlplace.measure.world.axes`)."""
        return self._posterior[2]

    @cached_property
    def _slack(self) -> tuple[Floats, Floats]:
        """Log of the memory of steps over their prediction, on a grid, and the posterior probability of each."""
        grid = SLACK[0] + SLACK[1] * _GRID
        log = -0.5 * _GRID**2
        for run in self.observations:
            predicted = math.log(max(float(self.pool.share[run.candidate]), 1e-6))
            if run.share is not None:
                log = log - 0.5 * ((math.log(max(run.share, 1e-6)) - predicted - grid) / PEAK_NOISE) ** 2
            elif run.out_of_memory or run.step_s is not None:
                sign = 1.0 if run.out_of_memory else -1.0
                log = log + np.log(1e-4 + (1 - 2e-4) * _normal(sign * (grid + predicted) / PEAK_NOISE))
        weight = np.exp(log - log.max())
        return grid, weight / weight.sum()

    @cached_property
    def fits(self) -> Floats:
        """float64 [C], probability that a candidate fits; 0 for one that did not run."""
        grid, weight = self._slack
        log_share = np.log(np.maximum(self.pool.share, 1e-6))
        chance: Floats = _normal(-(log_share[:, None] + grid) / PEAK_NOISE) @ weight
        for run in self.observations:
            chance[run.candidate] = float(run.step_s is not None)
        return np.clip(chance, 0.0, 1.0)

    @cached_property
    def untried(self) -> NDArray[np.bool_]:
        """Bool [C], candidates that have not run."""
        untried = np.ones(len(self.pool.drafts), dtype=bool)
        untried[[run.candidate for run in self.observations]] = False
        return untried

    @property
    def best(self) -> Observation | None:
        """The quickest run; None where none has ended well."""
        timed = [run for run in self.observations if run.step_s is not None]
        return min(timed, key=lambda run: float(run.step_s or 0.0), default=None)

    def world(self) -> World:
        """Returns the cluster at the posterior mean of its axes and memory."""
        grid, weight = self._slack
        return world_of(self.pool.worlds.cluster, self.axes, math.exp(float(grid @ weight)))


def _likeness(distance: Floats) -> Floats:
    """Returns the kernel of strategies at a mean square distance of features: 1 for equal ones."""
    likeness: Floats = np.exp(-distance / (2 * WIDTH**2))
    return likeness


def _normal(values: NDArray[np.float64]) -> Floats:
    """Returns the cumulative distribution of the standard normal."""
    from scipy.special import ndtr

    chance: Floats = ndtr(values)
    return chance


Rule = Callable[[Belief], int | None]


def expected(belief: Belief) -> int | None:
    """Chooses the least expected log step time, failures counted as in `LOST` over the least of all."""
    mean, fits = belief.mean, belief.fits
    if belief.best is None:
        loss = fits * mean + (1 - fits) * (mean[fits >= LEAST_CHANCE].min(initial=math.inf) + LOST)
        return least(belief, loss)
    best = math.log(float(belief.best.step_s or 0.0))
    return least(belief, fits * np.minimum(mean - best, 0.0) + 1e-6 * mean)


def improvement(belief: Belief) -> int | None:
    """Chooses the largest `expected_improvement`; before any run as `expected`."""
    return expected(belief) if belief.best is None else least(belief, -expected_improvement(belief))


def expected_improvement(belief: Belief) -> Floats:
    """Returns float64 [C], expected improvement (Jones et al. 1998) on the log of the quickest run, times the chance to fit.

    Before anything has run it is over three times the least expected step time.
    """
    mean, std = belief.mean, belief.std
    best = float(mean.min()) + LOST if belief.best is None else math.log(float(belief.best.step_s or 0.0))
    z = (best - mean) / std
    gain: Floats = (best - mean) * _normal(z) + std * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return gain * belief.fits


def in_order(belief: Belief) -> int | None:
    """Chooses in the order of the cost model, with a margin of memory."""
    likely = np.where(belief.fits >= 0.8, 0.0, 10.0)
    return least(belief, np.log(belief.pool.by_model_s) + likely)


RULES: Mapping[str, Rule] = {"calibrate": expected, "improvement": improvement, "list": in_order}


def least(belief: Belief, loss: Floats) -> int | None:
    """Returns the least loss among untried candidates that may fit; where none is likely to, the likeliest."""
    possible = belief.untried & (belief.fits >= LEAST_CHANCE)
    if not possible.any():
        return int(np.argmax(np.where(belief.untried, belief.fits, -1.0))) if belief.untried.any() else None
    return int(np.argmin(np.where(possible, loss, np.inf)))
