"""The algebra of hybrid data and model parallelism: what N replicas of M devices each are worth.

Time to quality is time per step times steps per epoch times epochs. With N data-parallel workers of M devices each, a step
takes T_M / SE_N, an epoch has 1 / N of the steps, and the epochs E_N grow with the global batch, N times the batch of a
worker. So the speed-up over one device is

    SU(N x M) = SU^M * SE_N * N * E_1 / E_N,        SU^M = T_1 / T_M,    SE_N = T_1 / T_N,

and hybrid parallelism beats pure data parallelism on the same N M devices exactly when

    SU^M > M * (SE_NM / SE_N) * (E_N / E_NM).

Paper: Pal, Ebrahimi, Zulfiqar, Fu, Zhang, Migacz, Nellans, Gupta, "Optimizing multi-GPU parallelization strategies for deep
learning training", IEEE Micro 39(5), 2019 (arXiv 1907.13257), which sets SE_N to 1 in its projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlplace.strategy.efficiency import BatchCurve


@dataclass(frozen=True)
class Workload:
    """A training run whose devices are to be split between replicas and the width of a replica.

    Attributes:
        batch: Samples per step and replica.
        curve: Epochs as a function of the global batch.
        scaling: SE_N, the scaling efficiency of N data-parallel workers, as a function of N.
    """

    batch: int
    curve: BatchCurve
    scaling: Callable[[int], float] = lambda replicas: 1.0


def hybrid_speedup(load: Workload, replicas: int, split_speedup: float = 1.0) -> float:
    """SU(N x M) over one device, for N replicas that are `split_speedup` (SU^M) times as fast as one device each."""
    statistical = load.curve.efficiency(replicas * load.batch, load.batch)
    return split_speedup * load.scaling(replicas) * replicas * statistical


def required_speedup(load: Workload, replicas: int, width: int) -> float:
    """M * (SE_NM / SE_N) * (E_N / E_NM): what SU^M must exceed for hybrid to beat pure data parallelism on N M devices."""
    pure = replicas * width
    statistical = load.curve.efficiency(pure * load.batch, replicas * load.batch)
    return width * load.scaling(pure) / load.scaling(replicas) * statistical


def best_split(load: Workload, devices: int, split_speedups: Mapping[int, float]) -> tuple[int, int, float]:
    """(N, M, speed-up) of the best split of at most so many devices, given SU^M by M; width 1 is always a choice.

    Of equal splits the one with the fewest devices, then the narrowest: devices stay unused where a larger batch costs more
    than it brings.
    """
    splits = [
        (replicas, width, hybrid_speedup(load, replicas, speedup))
        for width, speedup in {1: 1.0, **split_speedups}.items()
        for replicas in range(1, devices // width + 1)
    ]
    return max(splits, key=lambda split: (split[2], -split[0] * split[1], -split[1]))
