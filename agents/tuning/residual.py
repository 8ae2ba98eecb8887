"""What the corrected simulator still gets wrong, by plans that were measured: a Gaussian process over plans.

The target is log(measured / predicted), with mean zero: far from every measured plan the simulator is believed. Two plans are
the more alike the fewer groups sit on different devices: the kernel falls exponentially with that share (Hamming distance, as
in Oh et al. 2019 for categorical variables). Amplitude and length are those of the largest marginal likelihood on a small grid
(Rasmussen and Williams 2006, section 5.4.1).
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

_AMPLITUDES = (0.005, 0.01, 0.02, 0.04, 0.08)
_LENGTHS = (0.03, 0.1, 0.3, 1.0)


class Residual:
    """A fitted process.

    Attributes:
        amplitude: Standard deviation of the residual of a plan unlike all others.
        length: Share of differing groups over which residuals forget each other.
    """

    def __init__(self, plans: NDArray[np.int32], log_ratio: NDArray[np.float64], noise: NDArray[np.float64]) -> None:
        """Fits.

        Args:
            plans: int32 [P, G], measured.
            log_ratio: float64 [P], log of measured over predicted step time.
            noise: float64 [P], standard deviation of each.
        """
        self._plans = plans
        apart = _distance(plans, plans)
        best = None
        for amplitude, length in itertools.product(_AMPLITUDES, _LENGTHS):
            cover = amplitude**2 * np.exp(-apart / length) + np.diag(noise**2)
            factor = np.linalg.cholesky(cover)
            half = np.linalg.solve(factor, log_ratio)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0]:
                best = (likelihood, amplitude, length, factor, half)
        assert best is not None
        _, self.amplitude, self.length, self._factor, self._half = best

    def at(self, plans: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the log ratio of plans int32 [K, G], float64 [K] each."""
        like = self.amplitude**2 * np.exp(-_distance(self._plans, plans) / self.length)
        half = np.linalg.solve(self._factor, like)
        spread = np.sqrt(np.maximum(self.amplitude**2 - (half**2).sum(axis=0), 0.0))
        return half.T @ self._half, spread


def _distance(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [A, B], share of groups that sit on different devices."""
    return np.stack([(second != plan).mean(axis=1) for plan in first])
