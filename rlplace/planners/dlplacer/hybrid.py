"""The algebra of hybrid data and model parallelism: what N replicas of M devices each are worth.

Time to quality is time per step times steps per epoch times epochs. With N data-parallel workers of M devices each, a step
takes T_M / SE_N, an epoch has 1 / N of the steps, and the epochs E_N grow with the global batch, N times the batch of a
worker. So the speed-up over one device is

    SU(N x M) = SU^M * SE_N * N * E_1 / E_N,        SU^M = T_1 / T_M,    SE_N = T_1 / T_N,

and hybrid parallelism beats pure data parallelism on the same N M devices exactly when

    SU^M > M * (SE_NM / SE_N) * (E_N / E_NM).

Paper: Pal, Ebrahimi, Zulfiqar, Fu, Zhang, Migacz, Nellans, Gupta, "Optimizing multi-GPU parallelization strategies for deep
learning training", IEEE Micro 39(5), 2019 (arXiv 1907.13257). The idea and the two efficiencies are the paper's; the formulas
follow from them. The paper sets SE_N to 1 in its projections; here it is an argument, 1 by default. What is ours: the laws that
epochs follow (`rlplace.planners.strategy.efficiency`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlplace.errors import InputError
from rlplace.files import finite_number
from rlplace.planners.strategy.efficiency import BatchCurve

Scaling = Callable[[int], float]
"""SE_N, the scaling efficiency of N data-parallel workers, as a function of N."""


def perfect_scaling(replicas: int) -> float:
    """SE_N = 1: gradients are exchanged for nothing, as in the paper's projections."""
    del replicas
    return 1.0


@dataclass(frozen=True)
class Workload:
    """A training run whose devices are to be split between replicas and the width of a replica.

    Attributes:
        batch: Samples per step and replica.
        curve: Epochs as a function of the global batch.
        scaling: SE_N; see `scaling_efficiency`.
    """

    batch: int
    curve: BatchCurve
    scaling: Scaling = perfect_scaling


@dataclass(frozen=True)
class Split:
    """N replicas of M devices each.

    Attributes:
        replicas: N.
        width: M.
        speedup: SU(N x M), over one device.
    """

    replicas: int
    width: int
    speedup: float

    @property
    def devices(self) -> int:
        """Devices that it uses."""
        return self.replicas * self.width


def scaling_efficiency(single_step_s: float, replicated_step_s: float) -> float:
    """SE_N = T_1 / T_N: step time of one worker over that of N workers with the same batch each."""
    return _positive(single_step_s, "single_step_s") / _positive(replicated_step_s, "replicated_step_s")


def model_speedup(single_step_s: float, split_step_s: float) -> float:
    """SU^M = T(1 device) / T(M devices) at the same batch; steps and epochs do not change."""
    return _positive(single_step_s, "single_step_s") / _positive(split_step_s, "split_step_s")


def data_parallel_speedup(load: Workload, replicas: int) -> float:
    """SU_N = SE_N * N * E_1 / E_N."""
    return hybrid_speedup(load, replicas, 1.0)


def hybrid_speedup(load: Workload, replicas: int, split_speedup: float) -> float:
    """SU(N x M) = SU^M * SE_N * N * E_1 / E_N, over one device.

    Args:
        load: The training run.
        replicas: N.
        split_speedup: SU^M of one replica, 1 when it is a single device.
    """
    if replicas < 1:
        raise InputError(f"hybrid: replicas must be at least 1, found {replicas}")
    statistical = load.curve.efficiency(replicas * load.batch, load.batch)
    return _positive(split_speedup, "split_speedup") * load.scaling(replicas) * replicas * statistical


def required_speedup(load: Workload, replicas: int, width: int) -> float:
    """M * (SE_NM / SE_N) * (E_N / E_NM): what SU^M must exceed for hybrid to beat pure data parallelism on N M devices."""
    if replicas < 1 or width < 1:
        raise InputError(f"hybrid: replicas and width must be at least 1, found {replicas} and {width}")
    pure = replicas * width
    statistical = load.curve.efficiency(pure * load.batch, replicas * load.batch)
    return width * load.scaling(pure) / load.scaling(replicas) * statistical


def hybrid_wins(load: Workload, replicas: int, width: int, split_speedup: float) -> bool:
    """Whether N replicas of M devices beat N M data-parallel devices."""
    return split_speedup > required_speedup(load, replicas, width)


def best_split(
    load: Workload, devices: int, split_speedups: Mapping[int, float] | None = None, *, use_all: bool = False
) -> Split:
    """The outer loop: the best N and M for a number of devices.

    Args:
        load: The training run.
        devices: G, devices at hand.
        split_speedups: SU^M by M; width 1 is always a choice and has speed-up 1. None: pure data parallelism.
        use_all: Only splits with N M = G; otherwise devices may stay unused, as when a larger batch costs more than it brings.

    Returns:
        The split of largest speed-up; of equal ones that with the fewest devices, then the narrowest.
    """
    if devices < 1:
        raise InputError(f"hybrid: devices must be at least 1, found {devices}")
    choices = {1: 1.0, **(split_speedups or {})}
    found: list[Split] = []
    for width, speedup in sorted(choices.items()):
        if width < 1:
            raise InputError(f"hybrid: a width must be at least 1, found {width}")
        most = devices // width
        counts = range(1, most + 1)
        if use_all:
            counts = range(most, most + 1) if most * width == devices else range(0)
        found += [Split(n, width, hybrid_speedup(load, n, speedup)) for n in counts]
    return max(found, key=lambda s: (s.speedup, -s.devices, -s.width))


def hybrid_gain(load: Workload, devices: int, split_speedups: Mapping[int, float]) -> float:
    """Best split over best pure data parallelism on at most `devices` devices, minus 1; never negative."""
    return best_split(load, devices, split_speedups).speedup / best_split(load, devices).speedup - 1.0


def _positive(value: float, what: str) -> float:
    number = finite_number(value, f"hybrid: {what}")
    if number <= 0:
        raise InputError(f"hybrid: {what} must be positive, found {number}")
    return number
