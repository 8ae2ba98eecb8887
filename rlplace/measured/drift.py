"""`DriftDetector`: tells from one step time after another whether, since when and how much a training run has changed its pace.

A two-sided CUSUM test on the logarithms of step times. What makes it fit for training runs:

* Scores are clipped, so one step adds little, however slow it was: checkpoints, evaluations and hiccups do not add up.
* Level and noise are those of the run itself: median and median absolute deviation of the first healthy steps, the noise
  widened where the scores are heavier tailed than a normal distribution or follow one another.
* Changes of less than `least` / 2 are not looked for, however little noise there is.
* What a window of finite length leaves unknown about the level is added to the allowance of the test.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

from rlplace.errors import InputError, show

CLIP = 2.0
"""Largest score of one step, in units of the noise."""

WARMUP = 10
"""Steps at the start that do not count, by default."""

MIN_STEPS = 10
"""A change shorter than half of that is a hiccup."""

_KEPT = 512
_SPLIT = 128  # steps among which the beginning of a change is looked for
_RECALIBRATE = (40, 70, 100)
_OVERSHOOT = 1.166  # of a normal random walk over a boundary (Siegmund 1985, section 2.3)


@dataclass(frozen=True)
class Drift:
    """One change of pace.

    Attributes:
        step: Number of the step at which it was noticed, counted from 0.
        began: Number of the step with which it began, as estimated.
        before_s: Median step time before.
        after_s: Median step time since.
        reference_s: What the run is compared with: predicted seconds, or the median of its first healthy steps.
    """

    step: int
    began: int
    before_s: float
    after_s: float
    reference_s: float

    @property
    def direction(self) -> str:
        """``"slower"`` or ``"faster"`` than before."""
        return "slower" if self.after_s > self.before_s else "faster"

    @property
    def ratio(self) -> float:
        """Step time since then over that before."""
        return self.after_s / self.before_s

    @property
    def of_reference(self) -> float:
        """Step time since then over the reference."""
        return self.after_s / self.reference_s

    def text(self) -> str:
        """One line for people."""
        return (
            f"steps are {self.direction} since about step {self.began}: {self.after_s * 1e3:.4g} ms instead of "
            f"{self.before_s * 1e3:.4g} ms ({100 * (self.ratio - 1):+.0f} %), {self.of_reference:.3g} times the reference of "
            f"{self.reference_s * 1e3:.4g} ms; noticed at step {self.step}"
        )


class DriftDetector:
    """Fed one step time after another, answers with a `Drift` when the pace has changed, and then watches the new level.

    Attributes:
        count: Steps fed so far.
        ignored: Those of them that were no positive finite number.
        reference_s: See `Drift`; None until the first healthy window is complete.
        level_s: Present level; None until then.
    """

    def __init__(
        self,
        reference_s: float | None = None,
        *,
        warmup: int = WARMUP,
        window: int = 20,
        least: float = 0.05,
        false_alarm_steps: float = 100_000.0,
    ) -> None:
        """Prepares.

        Args:
            reference_s: Seconds that steps are expected to take; None takes the median of the first healthy window, for a
                prediction that is off by a constant.
            warmup: Steps at the start that do not count.
            window: Steps that a level and its noise are first estimated from; later from up to 100.
            least: Smallest relative change of interest.
            false_alarm_steps: Mean number of steps between two false alarms when noise is independent from step to step.
        """
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (warmup, window))
        if not whole or warmup < 0 or not 8 <= window <= _KEPT:
            raise InputError(f"drift: warmup must be from 0 up and window in 8..{_KEPT}, found {show((warmup, window))}")
        if not 0 < least < 10 or not 100 <= false_alarm_steps <= 1e12:
            raise InputError("drift: least must be in 0..10, false_alarm_steps in 100..1e12")
        if reference_s is not None and not 0 < reference_s < math.inf:
            raise InputError(f"drift: the reference must be a positive number of seconds, found {show(reference_s)}")
        self.count = self.ignored = 0
        self.reference_s: float | None = reference_s
        self.level_s: float | None = None
        self._held = reference_s is not None  # the present level is the reference, whatever the steps say
        self._warmup, self._window, self._false_alarm_steps = warmup, window, float(false_alarm_steps)
        self._least = math.log1p(least)
        self._level: list[float] = []  # log seconds since the present level began, until it is known well
        self._settling = 0
        self._armed = False
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._sum = [0.0, 0.0]
        self._onset = [0, 0]
        self._middle = self._scale = self._bias = self._unit = self._allowance = self._limit = 0.0

    def update(self, seconds: float) -> Drift | None:
        """Takes the time of the next step.

        Args:
            seconds: Of the step; what is no positive finite number is counted in `ignored`.

        Returns:
            The change, at the step where it is certain enough, else None.
        """
        number = self.count
        self.count += 1
        if not 0.0 < seconds < math.inf:
            self.ignored += 1
            return None
        if number < self._warmup:
            return None
        value = math.log(seconds)
        if self._armed:
            return self._test(number, value)
        self._level.append(value)
        if len(self._level) >= self._window and self._settled():
            return self._arm(number)
        return None

    def _settled(self) -> bool:
        """Whether the window is healthy: if its halves differ, the run is still warming up, and the first half goes."""
        if self._settling >= 5:
            return True
        half = len(self._level) // 2
        middles = _median(self._level[:half]), _median(self._level[half:])
        # Differences of neighbours do not see a single jump.
        noise = 1.4826 * float(np.median(np.abs(np.diff(self._level)))) / math.sqrt(2)
        if abs(middles[1] - middles[0]) <= max(self._least, 3 * 1.2533 * noise * math.sqrt(2 / half)):
            return True
        self._settling += 1
        del self._level[:half]
        return False

    def _arm(self, number: int) -> Drift | None:
        self._calibrate()
        self._armed = True
        self._sum, self._onset = [0.0, 0.0], [number + 1, number + 1]
        self._recent.clear()
        if not self._held:
            return None
        begin = number + 1 - len(self._level)
        self._onset = [begin, begin]
        found = None
        for index, value in enumerate(list(self._level)):  # the reference is given, so the window itself can be tested
            found = found or self._test(begin + index, value, grow=False)
        return found

    def _calibrate(self) -> None:
        """Level, noise, allowance and limit from the steps of this level."""
        values = np.array(self._level)
        own = float(np.median(values))
        noise = 1.4826 * float(np.median(np.abs(values - own)))
        self._scale = max(noise, self._least / 2)
        scores = np.clip((values - own) / self._scale, -CLIP, CLIP)
        self._bias = float(scores.mean())
        spread, centred = float(scores.std()), scores - self._bias
        power = float((centred**2).sum())
        follow = min(max(float((centred[1:] * centred[:-1]).sum()) / power, 0.0), 0.8) if power > 0 else 0.0
        long_run = spread * math.sqrt((1 + follow) / (1 - follow))
        self._unit = max(1.0, long_run)
        base = max(0.5, self._least / 2 / self._scale / self._unit)
        self._limit = _limit(base, 2 * self._false_alarm_steps)
        self._allowance = base + 2 * long_run / math.sqrt(len(values)) / self._unit
        if self.reference_s is None:
            self.reference_s = math.exp(own)
        self._middle = math.log(self.reference_s) if self._held else own
        self.level_s = math.exp(self._middle)

    def _test(self, number: int, value: float, grow: bool = True) -> Drift | None:
        self._recent.append(value)
        score = (value - self._middle) / self._scale
        score = (min(max(score, -CLIP), CLIP) - self._bias) / self._unit
        for side, signed in ((0, score), (1, -score)):
            total = self._sum[side] + signed - self._allowance
            if total <= 0.0:
                self._sum[side], self._onset[side] = 0.0, number + 1
                continue
            self._sum[side] = min(total, self._limit + 2 * CLIP)
            if total > self._limit:
                found = self._confirm(side, number)
                if found is not None:
                    return found
        if grow and self._level:
            self._grow(value)
        return None

    def _confirm(self, side: int, number: int) -> Drift | None:
        steps = number + 1 - self._onset[side]
        if steps < MIN_STEPS or (steps - MIN_STEPS) % 4:  # not at every step: it takes about a millisecond
            return None
        since = self._since(steps)
        began = number + 1 - len(since)
        if len(since) < MIN_STEPS // 2:
            return None
        middle = _median(since)
        sign = 1.0 if side == 0 else -1.0
        # A burst of slow steps moves neither the median of all steps nor that of the latest ones.
        change = min(sign * (part - self._middle) for part in (middle, _median(since[len(since) // 2 :])))
        if change < max(self._least, self._scale) / 2:
            return None
        assert self.reference_s is not None
        drift = Drift(number, began, math.exp(self._middle), math.exp(middle), self.reference_s)
        self._armed = self._held = False
        self._level, self._settling = since[-_RECALIBRATE[-1] :], 0
        self.level_s = drift.after_s
        return drift

    def _since(self, steps: int) -> list[float]:
        """The steps since the change: the split that leaves the least absolute deviation from the medians of both sides.

        The sums of the test begin to grow before, if some slow steps happen to come just before it.
        """
        recent = list(self._recent)[-min(steps + MIN_STEPS, _SPLIT) :]
        before = np.concatenate([[0.0], np.cumsum(np.abs(np.array(recent) - self._middle))])
        costs = []
        for split in range(len(recent) - 2):
            tail = np.array(recent[split:])
            costs.append(before[split] + float(np.abs(tail - np.median(tail)).sum()))
        return recent[int(np.argmin(costs)) :]

    def _grow(self, value: float) -> None:
        """More steps make the level better known, as long as nothing seems to happen."""
        self._level.append(value)
        if len(self._level) in _RECALIBRATE and len(self._level) > self._window:
            if max(self._sum) > self._limit / 2:
                del self._level[-5:]  # asked again five steps later
                return
            self._calibrate()
            if len(self._level) >= _RECALIBRATE[-1]:
                self._level = []


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _limit(allowance: float, run_length: float) -> float:
    """Limit of a one-sided CUSUM of standard normal scores for a mean run length without change (Siegmund's approximation)."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        power = min(2 * allowance * (middle + _OVERSHOOT), 700.0)
        length = (math.exp(power) - power - 1) / (2 * allowance**2)
        low, high = (middle, high) if length < run_length else (low, middle)
    return high
