"""Which candidate runs next: rules over a `Belief`. Each gives a number, or None where nothing is worth a run.

All weigh a run that does not fit alike: before anything has run it counts as `LOST`, the log of how much longer a step takes
than the best (a person waits for a plan that works); afterwards it keeps what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from rlplace.measure.belief import Belief
from rlplace.strategy.costs import Floats

LOST = math.log(3.0)

LEAST_CHANCE = 0.05
"""Candidates that are less likely to fit are not run."""

Rule = Callable[[Belief], int | None]


def expected(belief: Belief) -> int | None:
    """Calibrate and plan again: the least expected log step time, what fails counted as in `LOST` over the least of all."""
    mean, fits = belief.mean, belief.fits
    if belief.best is None:
        loss = fits * mean + (1 - fits) * (mean[fits >= LEAST_CHANCE].min(initial=math.inf) + LOST)
        return least(belief, loss)
    best = math.log(float(belief.best.step_s or 0.0))
    return least(belief, fits * np.minimum(mean - best, 0.0) + 1e-6 * mean)


def improvement(belief: Belief) -> int | None:
    """The largest `gain_of`."""
    return expected(belief) if belief.best is None else least(belief, -gain_of(belief))


def gain_of(belief: Belief) -> Floats:
    """float64 [C], expected improvement (Jones et al. 1998) on the log of the quickest run, times the chance that it fits.

    Before anything has run it is over three times the least expected step time.
    """
    from scipy.special import ndtr

    mean, spread = belief.mean, belief.spread
    best = float(mean.min()) + LOST if belief.best is None else math.log(float(belief.best.step_s or 0.0))
    z = (best - mean) / spread
    gain: Floats = (best - mean) * ndtr(z) + spread * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return gain * belief.fits


def in_order(belief: Belief) -> int | None:
    """The order of the cost model, with the same margin of memory."""
    likely = np.where(belief.fits >= 0.8, 0.0, 10.0)
    return least(belief, np.log(belief.pool.by_model_s) + likely)


RULES: Mapping[str, Rule] = {"calibrate": expected, "improvement": improvement, "list": in_order}


def least(belief: Belief, loss: Floats) -> int | None:
    """The least of what has not run and may fit; where nothing is likely to, the likeliest."""
    open_ = belief.left & (belief.fits >= LEAST_CHANCE)
    if not open_.any():
        return int(np.argmax(np.where(belief.left, belief.fits, -1.0))) if belief.left.any() else None
    return int(np.argmin(np.where(open_, loss, np.inf)))
