"""From trials to a `Correction`: where the cost model is wrong on this cluster, by all that was measured.

Two steps, both maximum a posteriori estimates with independent normal priors around "the cost model is right":

* Ops, from how long each device was busy: a device's seconds are the sum of its groups' predicted seconds times
  (device factor + group's own deviation + deviation of this group on this device). That is linear, so it is solved in closed
  form (Gaussian process regression with a linear kernel; Rasmussen and Williams 2006, section 2.1).
* Links, latency and what is left over, from whole steps: the simulator runs every plan with the corrected op times, and the
  factors of channels and pairs are those that bring its step times nearest to the measured ones (least squares on logs with a
  soft loss, by finite differences).

What no plan has used stays as it was. The spreads of the priors are stated below; they were chosen on clusters and models that
are not in the published comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.measured.correction import Correction, corrected, no_correction
from rlplace.measured.trial import Trial
from rlplace.problem import Problem
from rlplace.simulator import Simulator

_DEVICE_SPREAD, _GROUP_SPREAD, _LOCAL_SPREAD = 0.5, 0.1, 0.1
"""Prior standard deviations: of a device's factor, of a group's on all devices, of a group's on one device."""

_BUSY_NOISE, _STEP_NOISE = 0.03, 0.03
"""Relative errors that are expected of a device's busy seconds and of a step time."""

_SPREAD = {"channel": 0.15, "pair": 0.1, "delay": 0.3, "latency": 1.0, "links": 0.3, "step": 0.02}
"""Prior standard deviations: of the logs of slowdowns of a channel, of a pair and of all links, and of the step factor; of what
latencies of a channel and of all links are made of."""

_LATENCY_S = 5e-4
_SLOPE_STEP = 0.05
_ROUNDS = 15
_SCANS = 4
_CHANGES = (-0.4, 0.4, 1.0)
_MOST = 5.0  # log of the largest slowdown that is believed


@dataclass(frozen=True, eq=False)
class Fit:
    """A correction and how well it explains the trials.

    Attributes:
        correction: For the problem.
        predicted_s: float64 [P], corrected step times of the trials that have times, in their order.
        measured_s: float64 [P].
        priced_s: float64 [P], step times of the problem as it was priced.
        links: What was fitted of the links, by name, for a later fit to begin at.
    """

    correction: Correction
    predicted_s: NDArray[np.float64]
    measured_s: NDArray[np.float64]
    priced_s: NDArray[np.float64]
    links: Mapping[tuple[str, int], float]

    @property
    def error_before(self) -> float:
        """Mean of |priced / measured - 1|."""
        return float(np.abs(self.priced_s / self.measured_s - 1.0).mean())

    @property
    def error_after(self) -> float:
        """Mean of |corrected / measured - 1|."""
        return float(np.abs(self.predicted_s / self.measured_s - 1.0).mean())


def fit_correction(
    problem: Problem,
    trials: Sequence[Trial],
    *,
    seconds: Sequence[float] | None = None,
    start: Fit | None = None,
) -> Fit:
    """Fits a correction.

    Args:
        problem: As it was priced.
        trials: Trials of this problem on one cluster; those without times are left out.
        seconds: Step time of every trial, where it is known better than by the trial's own median.
        start: An earlier fit on the same cluster to begin the search at, which is quicker; None looks for the place to begin.

    Raises:
        InputError: No trial has times, or one is of another problem.
    """
    step_s = [t.median_s for t in trials] if seconds is None else list(seconds)
    used = [(trial, value) for trial, value in zip(trials, step_s, strict=True) if trial.timed]
    if not used:
        raise InputError("calibrate: no trial has step times; measure plans first")
    for trial, _ in used:
        if trial.problem != problem.fingerprint:
            raise InputError("calibrate: a trial is of another problem")
    plans = np.array([trial.device_of_group for trial, _ in used], dtype=np.int32)
    measured = np.array([value for _, value in used])
    weight = np.sqrt(np.array([min(len(trial.step_s), 5) / 5.0 for trial, _ in used]))
    base = _fit_ops(problem, [trial for trial, _ in used], plans)
    correction, links = _fit_links(problem, base, plans, measured, weight, {} if start is None else start.links)
    return Fit(
        links=links,
        correction=correction,
        predicted_s=predict(problem, correction, plans),
        measured_s=measured,
        priced_s=predict(problem, no_correction(problem), plans),
    )


def predict(problem: Problem, correction: Correction, plans: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [P], corrected step times of plans int32 [P, G]; inf where a step cannot complete."""
    step, _ = Simulator(corrected(problem, correction)).evaluate_many(np.ascontiguousarray(plans))
    return np.asarray(step, dtype=np.float64) * correction.step_factor


def group_seconds(problem: Problem) -> NDArray[np.float64]:
    """float64 [G, D], busy seconds of a whole step that each group asks of each device."""
    total = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(total, problem.op_group, np.nan_to_num(problem.time_s))
    return total


def _fit_ops(problem: Problem, trials: Sequence[Trial], plans: NDArray[np.int32]) -> Correction:
    """Device and group factors by busy seconds; device factors of 1 where no trial tells them."""
    groups, devices = problem.num_groups, problem.num_devices
    expected = group_seconds(problem)
    # A row holds what each group contributes, relative to the measured seconds, so that all rows weigh the same.
    rows = []
    for trial, plan in zip(trials, plans, strict=True):
        for place in trial.places:
            on, seconds = plan == place.rank, place.busy_s + place.update_s
            share = np.zeros((groups, devices))
            share[on, place.rank] = expected[on, place.rank]
            if share.any() and seconds > 0:
                rows.append(share / seconds)
    nothing = no_correction(problem)
    if not rows:
        return nothing
    local = np.stack(rows)
    scale = float(np.median(1.0 / local.sum(axis=(1, 2))))  # a cost model that is wrong by a constant is no surprise
    local *= scale
    device = local.sum(axis=1)
    parts = (device, local.sum(axis=2), local.reshape(len(rows), -1))
    weights = (_DEVICE_SPREAD**2, _GROUP_SPREAD**2, _LOCAL_SPREAD**2)
    cover = sum(w * a @ a.T for w, a in zip(weights, parts, strict=True)) + _BUSY_NOISE**2 * np.eye(len(rows))
    rest = np.linalg.solve(cover, 1.0 - device.sum(axis=1))
    of_device, of_group, of_local = (w * a.T @ rest for w, a in zip(weights, parts, strict=True))
    factor = scale * np.maximum(1.0 + of_device, 0.05)
    total = scale * (1.0 + of_device[None] + of_group[:, None] + of_local.reshape(groups, devices))
    return dataclasses.replace(nothing, device_factor=factor, group_factor=np.clip(total / factor[None], 0.2, 5.0))


def _fit_links(
    problem: Problem,
    base: Correction,
    plans: NDArray[np.int32],
    measured: NDArray[np.float64],
    weight: NDArray[np.float64],
    start: Mapping[tuple[str, int], float],
) -> tuple[Correction, dict[tuple[str, int], float]]:
    """Slowdowns of channels and pairs, latencies and step factor by whole steps; and what was fitted, by name."""
    from scipy.optimize import least_squares

    shape = _Shape(problem, plans)
    first = np.array([start.get(name, 0.0) for name in shape.names])
    spread = shape.spread

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        step = predict(problem, shape.unpack(values, base), plans)
        wrong = np.log(np.maximum(step, 1e-9) / measured) * weight / _STEP_NOISE
        known = np.where(np.isfinite(step), wrong, 0.0)
        return np.concatenate([_soft(known, 3.0), _soft(values / spread, 1.0)])

    def slopes(values: NDArray[np.float64]) -> NDArray[np.float64]:
        # Step times are piecewise linear in transfer times: a step over several kinks tells more than the exact slope.
        here = residuals(values)
        columns = []
        for number in range(len(values)):
            moved = values.copy()
            moved[number] += _SLOPE_STEP
            columns.append((residuals(moved) - here) / _SLOPE_STEP)
        return np.stack(columns, axis=1)

    begins = [first] if start else [first, _scan(residuals, first)]
    fits = [least_squares(residuals, begin, slopes, x_scale=spread, max_nfev=_ROUNDS, ftol=1e-4) for begin in begins]
    values = min(fits, key=lambda result: result.cost).x
    return shape.unpack(values, base), dict(zip(shape.names, values.tolist(), strict=True))


def _scan(residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A start for the fit: the few single slowdowns that explain most, one after the other.

    The slower of two channels decides, so the slope of the faster one is zero and a descent alone would not find it.
    """
    best = float((residuals(values) ** 2).sum())
    for _ in range(_SCANS):
        tried = []
        for number in range(len(values) - 1):
            for change in _CHANGES:
                moved = values.copy()
                moved[number] += change
                tried.append((float((residuals(moved) ** 2).sum()), moved))
        cost, moved = min(tried, key=lambda pair: pair[0])
        if cost >= best:
            break
        best, values = cost, moved
    return values


def _soft(values: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Residuals whose squares are the pseudo-Huber loss: quadratic within the width, linear beyond.

    Of measured steps, so that disturbed ones count for little; of slowdowns, so that one large one is likelier than many small.
    """
    return np.sign(values) * width * np.sqrt(2.0 * (np.sqrt(1.0 + (values / width) ** 2) - 1.0))


class _Shape:
    """What is fitted, as a vector: slowdowns and latencies of channels and slowdowns of pairs that some plan sends over, a
    latency and a slowdown of all transfers, and the step factor.

    A queue in front of a busy link delays every message, however small, so a channel has a latency of its own. Latencies are
    `_LATENCY_S` times exp(value) - 1, which spans microseconds to tens of milliseconds; below zero there is none.
    """

    def __init__(self, problem: Problem, plans: NDArray[np.int32]) -> None:
        devices = problem.num_devices
        source, reader = problem.edge_source_group, problem.op_group[problem.consumers]
        used = np.zeros((devices, devices), dtype=bool)
        for plan in plans:
            used[plan[source], plan[reader]] = True
        np.fill_diagonal(used, False)
        channels = problem.links.effective_channels
        pairs_of: dict[int, list[int]] = {}
        for i, j in np.argwhere(used).tolist():
            for channel in channels[i][j]:
                pairs_of.setdefault(channel, []).append(i * devices + j)
        self._pairs_of = {channel: pairs for channel, pairs in sorted(pairs_of.items()) if len(pairs) > 1}
        shared = {pair for pairs in self._pairs_of.values() for pair in pairs}
        ways = [[(kind, channel) for channel in self._pairs_of] for kind in ("channel", "delay")]
        own = [("pair", pair) for pair in np.flatnonzero(used).tolist()]
        self.names = [*ways[0], *own, *ways[1], ("latency", 0), ("links", 0), ("step", 0)]
        # A channel that serves a single pair is that pair.
        kinds = ["channel" if kind == "pair" and number not in shared else kind for kind, number in self.names]
        self.spread = np.array([_SPREAD[kind] for kind in kinds])

    def unpack(self, values: NDArray[np.float64], base: Correction) -> Correction:
        """The correction that a vector stands for; op factors are those of `base`."""
        values = np.clip(values, -_MOST, _MOST)
        slowdown = np.exp(values)
        delay_s = _LATENCY_S * np.expm1(np.maximum(values, 0.0))
        channels, pairs = np.ones_like(base.channel_slowdown), np.full_like(base.pair_slowdown, slowdown[-2])
        latency = np.full_like(base.latency_s, delay_s[-3])
        for (kind, number), factor, seconds in zip(self.names, slowdown, delay_s, strict=True):
            if kind == "channel":
                channels[number] = factor
            elif kind == "pair":
                pairs.flat[number] *= factor
            elif kind == "delay":
                latency.flat[self._pairs_of[number]] += seconds
        np.fill_diagonal(latency, 0.0)
        step_factor = float(slowdown[-1])
        return dataclasses.replace(
            base, channel_slowdown=channels, pair_slowdown=pairs, latency_s=latency, step_factor=step_factor
        )
