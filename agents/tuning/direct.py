"""Labels straight from a log of timings, without believing the simulator's times.

The log of a plan's measured step time is modelled as a sum over groups of what each costs on its device: Bayesian linear
regression on one-hot plans, so what no plan has tried has coefficient zero. A move's label is the sum of the differences of its
groups. That is crude (a step is a maximum of paths, not a sum), but it needs nothing but the log, so it also learns what the
cost model has no word for. Labels reach only as far as the log: moves to where no measured plan has a group get none.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.agents.labels import Rows, labelled
from rlplace.agents.tuning.learn import MOVES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance
from rlplace.errors import InputError

_SPREAD = 0.3
"""Prior standard deviation of what a group costs on a device, relative to an even share of all groups."""

_NOISE = 0.03
_LEAST = 8


class LogModel:
    """What each group costs on each device, in log step time.

    Attributes:
        cost: float64 [G, D].
        seen: bool [G, D], whether a measured plan has the group there.
    """

    def __init__(self, plans: NDArray[np.int32], seconds: NDArray[np.float64], devices: int) -> None:
        """Fits.

        Args:
            plans: int32 [P, G].
            seconds: float64 [P], measured.
            devices: D.

        Raises:
            InputError: Too few plans to learn anything.
        """
        if len(plans) < _LEAST:
            raise InputError(
                f"finetune: {len(plans)} plans with times are too few to learn from directly; measure at least {_LEAST}"
            )
        count, groups = plans.shape
        one_hot = np.zeros((count, groups * devices))
        one_hot[np.arange(count)[:, None], np.arange(groups)[None] * devices + plans] = 1.0
        centre = one_hot.mean(axis=0)
        table, target = one_hot - centre, np.log(seconds) - np.log(seconds).mean()
        cover = _SPREAD**2 / np.sqrt(groups) * table @ table.T + _NOISE**2 * np.eye(count)
        self.cost = (_SPREAD**2 / np.sqrt(groups) * table.T @ np.linalg.solve(cover, target)).reshape(groups, devices)
        self.seen = one_hot.any(axis=0).reshape(groups, devices)

    def change(self, plan: NDArray[np.int32], groups: NDArray[np.int32], targets: NDArray[np.int32]) -> float:
        """Change of the log step time by a move; NaN where it leaves what was measured."""
        if not self.seen[groups, targets].all():
            return float("nan")
        return float((self.cost[groups, targets] - self.cost[groups, plan[groups]]).sum())


def log_rows(
    instance: Instance, plans: NDArray[np.int32], seconds: NDArray[np.float64], *, states: int, rng: Generator
) -> Rows:
    """Labelled moves at measured plans, in the form of `rlplace.agents.labels.walk`.

    Args:
        instance: Gives the features; its timeline is simulated.
        plans: int32 [P, G].
        seconds: float64 [P].
        states: Plans that moves are drawn from, each several times if there are fewer.
        rng: Draws the order of the plans.
    """
    model = LogModel(plans, seconds, instance.problem.num_devices)
    guide = Guide(instance, MOVES, int(rng.integers(1 << 30)))
    rows: Rows = []
    order = np.concatenate([rng.permutation(len(plans)) for _ in range(-(-states // len(plans)))])[:states]
    for number in order:
        plan = plans[number]
        if guide.look(plan)[0] == np.inf:  # it cannot complete in the simulator
            continue
        count = guide.draw(plan)
        change = np.array([model.change(plan, *guide.move(k)) for k in range(count)])
        known = np.flatnonzero(np.isfinite(change))
        if len(known) >= 2:
            rows.append(labelled(guide, known, known, change[known]))
    return rows
