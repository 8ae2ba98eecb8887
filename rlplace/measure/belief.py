"""`Belief`: what every candidate will take, and whether it fits, by all that has run.

Log step times of the candidates are jointly Gaussian. Their covariance is that of the cost model's own predictions in worlds
along the axes (`rlplace.measure.world`), linear around the world that is believed in (an iterated Kalman filter, Bell and
Cathey 1993, with the unscented transform), plus what no axis explains: a kernel over features of the
strategies, a habit of each kind, and a part of each candidate's own. So a run tells of every strategy that shares a device,
a link or a habit with it; how long devices of one kind take for the same product tells hosts apart, and how busy its stages
were tells their devices apart. Runs elsewhere tell of the candidates that are most like theirs, on axes like these.
Conditioning is Gaussian process regression in closed form (Rasmussen and Williams 2006, section 2.2), which also gives the
axes, so that a search can ask the corrected model for better strategies. Memory is one unknown, the log of how much more a
step takes than predicted, on a grid, since a run that did not fit only says "more than that".
"""

from __future__ import annotations

import dataclasses
import math
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
"""Standard deviations of what no axis explains: shared by strategies of a kind and schedule, by those with like features, and
of each one's own; root mean square distance of features, in standard deviations of each, over which likeness falls."""

NOISE = 0.01
"""Relative standard deviation of a measured step time."""

PACE_NOISE = 0.03
"""Likewise, of the time of the same product on several hosts."""

BUSY_NOISE = 0.05
"""Likewise, of the seconds of a stage's passes: blocks are mispriced, too."""

ELSEWHERE = 1.0
"""Standard deviation of what another cluster with devices of the same kinds differs by on every axis."""

PEAK_NOISE = 0.03
"""Standard deviation of the log of a candidate's own memory over what the shared factor says."""

_GRID = np.linspace(-4.0, 6.0, 201)


@dataclass(frozen=True)
class Ran:
    """What became of a run.

    Attributes:
        candidate: Its number in the pool.
        step_s: Step time in seconds; None where it ended before a step did.
        share: Measured peak of the fullest device beyond what is reserved, over its room; None where nobody says.
        out_of_memory: Whether it ended because it did not fit.
        pace_s: By device, seconds of a product that is the same on all; empty where nobody says.
        stage_busy_s: By stage of a pipeline, seconds of its passes; empty where nobody says.
    """

    candidate: int
    step_s: float | None
    share: float | None = None
    out_of_memory: bool = False
    pace_s: tuple[float, ...] = ()
    stage_busy_s: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Belief:
    """Candidates, and the runs so far.

    Attributes:
        pool: The candidates, C of them.
        ran: Runs, in their order.
        elsewhere: Runs on other clusters of the same kinds of devices, each with a step time.
    """

    pool: Pool
    ran: tuple[Ran, ...] = ()
    elsewhere: tuple[Run, ...] = ()

    def told(self, ran: Ran) -> Belief:
        """With another run."""
        told = dataclasses.replace(self, ran=(*self.ran, ran))
        if "_prior" in vars(self):
            vars(told)["_prior"] = self._prior
        return told

    @cached_property
    def _prior(self) -> tuple[Floats, Floats, Floats]:
        """Mean [C], slopes by axis [C, P], and covariance [C, C] of log step times."""
        pool = self.pool
        at_zero, slopes, bent = linear(pool.worlds.center, pool.log_s)
        kinds = [(kind_of(draft), draft.schedule) for draft in pool.drafts]
        same = np.array([[one == other for other in kinds] for one in kinds], dtype=np.float64)
        cover = slopes @ slopes.T + KIND**2 * same + ALIKE**2 * _alike(self._apart(pool.features))
        return at_zero, slopes, cover + np.diag(OWN**2 + bent**2)

    def _apart(self, features: Floats) -> Floats:
        """Returns float64 [N, C], mean square distance of features [N, F] from those of the candidates, in variances of
        these.
        """
        of_pool = self.pool.features
        scale = np.maximum(of_pool.std(axis=0), 1e-3)
        found: Floats = ((features[:, None] / scale - of_pool[None] / scale) ** 2).mean(axis=2)
        return found

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, Floats]:
        """Mean [C] and covariance [C, C] of log step times, and means of the axes [P]."""
        mean, slopes, cover = self._prior
        timed = [ran for ran in self.ran if ran.step_s is not None]
        shown, values, spread = self._shown()
        if not timed and not self.elsewhere and not len(values):
            return mean, cover, np.zeros(slopes.shape[1])
        near, log_s, apart = self._told_elsewhere()
        at, here = [*(ran.candidate for ran in timed), *near], len(timed)
        seen = np.concatenate([np.log([float(ran.step_s or 0.0) for ran in timed]), log_s]) - mean[at]
        seen = np.concatenate([seen, values])
        by_axis = np.concatenate([slopes[at], shown])  # what was seen, by axis
        beside = np.concatenate([cover[at], shown @ slopes.T])  # and its covariance with all candidates
        noise = np.diag(np.concatenate([np.full(here, NOISE), np.zeros(len(near)), spread]) ** 2)
        noise[here : len(at), here : len(at)] = apart
        inner = by_axis @ by_axis.T + noise
        inner[: len(at), : len(at)] = cover[np.ix_(at, at)] + noise[: len(at), : len(at)]
        gain, weights = np.linalg.solve(inner, beside).T, np.linalg.solve(inner, seen)
        return mean + beside.T @ weights, cover - gain @ beside, by_axis.T @ weights

    def _told_elsewhere(self) -> tuple[list[int], Floats, Floats]:
        """What N runs elsewhere tell of the candidates most like theirs.

        Returns:
            The candidate of each; log of its step time if it is mispriced as that run was [N]; and the covariance of what
            else there is to them [N, N]: their cluster is another one, and their strategy may be unlike.
        """
        runs, pool = self.elsewhere, self.pool
        if not runs:
            return [], np.zeros(0), np.zeros((0, 0))
        apart = self._apart(np.array([run.features for run in runs]))
        near = apart.argmin(axis=1)
        wrong = np.log([float(run.median_s or 0.0) / run.predicted_s for run in runs])
        _, slopes, cover = self._prior
        unlike = 2 * (1 - _alike(apart.min(axis=1))) * cover[near, near]
        there = ELSEWHERE**2 * slopes[near] @ slopes[near].T + np.diag(OWN**2 + NOISE**2 + unlike)
        return near.tolist(), np.log(pool.by_model_s[near]) + wrong, there

    def _shown(self) -> tuple[Floats, Floats, Floats]:
        """What runs show beside step times: slopes by axis [N, P], values over what was expected [N], and their spread [N]."""
        rows, seen = self._paces()
        stages = [self._stages(ran) for ran in self.ran if ran.stage_busy_s]
        spread = [np.full(len(seen), PACE_NOISE), *(one[2] for one in stages)]
        by_axis, values = [rows, *(one[0] for one in stages)], [seen, *(one[1] for one in stages)]
        return np.concatenate(by_axis), np.concatenate(values), np.concatenate(spread)

    def _stages(self, ran: Ran) -> tuple[Floats, Floats, Floats]:
        """Returns how much busier the stages of a run were than each other, likewise."""
        worlds = self.pool.worlds
        log_s = np.log(worlds.stage_busy_s(self.pool.drafts[ran.candidate]))
        at_zero, slopes, bent = linear(worlds.center, log_s - log_s.mean(axis=1, keepdims=True))
        took = np.log(ran.stage_busy_s)
        return slopes, took - took.mean() - at_zero, np.hypot(BUSY_NOISE, bent)

    def _paces(self) -> tuple[Floats, Floats]:
        """Returns how much slower hosts are than others with devices of the same kind: slopes by axis [N, P] and what was seen
        [N].
        """
        cluster = self.pool.worlds.cluster
        names = [kind.name for kind in cluster.kinds]
        axis = {name: number for number, name in enumerate(axes(cluster))}
        rows, seen = [], []
        for ran in self.ran:
            for name in dict.fromkeys(names):
                own = [d for d in range(min(len(names), len(ran.pace_s))) if names[d] == name]
                hosts = sorted({cluster.hosts[d] for d in own})
                by_host = [np.mean([math.log(ran.pace_s[d]) for d in own if cluster.hosts[d] == host]) for host in hosts]
                for number, host in enumerate(hosts if len(hosts) > 1 else ()):
                    row = np.zeros(len(axis))
                    for other in hosts:
                        row[axis[f"host {other}"]] = SPREAD["host"] * (float(other == host) - 1.0 / len(hosts))
                    rows.append(row)
                    seen.append(by_host[number] - np.mean(by_host))
        return np.array(rows).reshape(-1, len(axis)), np.array(seen)

    @property
    def mean(self) -> Floats:
        """float64 [C], expected log of the step time."""
        return self._posterior[0]

    @property
    def spread(self) -> Floats:
        """float64 [C], its standard deviation."""
        return np.sqrt(np.maximum(np.diag(self._posterior[1]), 1e-12))

    @property
    def cover(self) -> Floats:
        """float64 [C, C], its covariance."""
        return self._posterior[1]

    @property
    def axes(self) -> Floats:
        """float64 [P], where the cluster lies on its axes (`rlplace.measure.world.axes`)."""
        return self._posterior[2]

    @cached_property
    def _slack(self) -> tuple[Floats, Floats]:
        """Log of how much more memory steps take than is predicted, on a grid, and the probability of each."""
        grid = SLACK[0] + SLACK[1] * _GRID
        log = -0.5 * _GRID**2
        for ran in self.ran:
            predicted = math.log(max(float(self.pool.share[ran.candidate]), 1e-6))
            if ran.share is not None:
                log = log - 0.5 * ((math.log(max(ran.share, 1e-6)) - predicted - grid) / PEAK_NOISE) ** 2
            elif ran.out_of_memory:
                log = log + np.log(1e-4 + (1 - 2e-4) * _normal((grid + predicted) / PEAK_NOISE))
            elif ran.step_s is not None:
                log = log + np.log(1e-4 + (1 - 2e-4) * _normal(-(grid + predicted) / PEAK_NOISE))
        weight = np.exp(log - log.max())
        return grid, weight / weight.sum()

    @cached_property
    def fits(self) -> Floats:
        """float64 [C], probability that a candidate fits; 0 for one that did not run."""
        grid, weight = self._slack
        log_share = np.log(np.maximum(self.pool.share, 1e-6))
        chance: Floats = _normal(-(log_share[:, None] + grid) / PEAK_NOISE) @ weight
        for ran in self.ran:
            chance[ran.candidate] = float(ran.step_s is not None)
        return np.clip(chance, 0.0, 1.0)

    @cached_property
    def left(self) -> NDArray[np.bool_]:
        """Bool [C], what has not run yet."""
        left = np.ones(len(self.pool.drafts), dtype=bool)
        left[[ran.candidate for ran in self.ran]] = False
        return left

    @property
    def best(self) -> Ran | None:
        """The quickest run; None where none has ended well."""
        timed = [ran for ran in self.ran if ran.step_s is not None]
        return min(timed, key=lambda ran: float(ran.step_s or 0.0), default=None)

    def world(self) -> World:
        """Returns the cluster as it is believed to be."""
        grid, weight = self._slack
        return world_of(self.pool.worlds.cluster, self.axes, math.exp(float(grid @ weight)))


def _alike(apart: Floats) -> Floats:
    """Returns how like strategies are at a mean square distance of features: 1 for equal ones."""
    found: Floats = np.exp(-apart / (2 * WIDTH**2))
    return found


def _normal(values: NDArray[np.float64]) -> Floats:
    """Returns cumulative distribution of the standard normal."""
    from scipy.special import ndtr

    found: Floats = ndtr(values)
    return found
