"""Collective curves of known fabrics, by the name that a `DeviceKind` gives in `fabric`.

Only coefficients stand here; `benchmarks/links.py` makes them from the published tables and scores them on the sizes that
were not used. MB below is 2^20 bytes.
"""

from __future__ import annotations

from rlplace.cluster.fabric import Curve, Piece, joined_curve

MB = 1 << 20
FIT_BREAKS_MB = (0, 4, 32)
"""Where small, medium and large messages begin."""

# NVLink4 with NVSwitch (H100, H200). Bus bandwidth of 8 GiB messages on H200, "Machine Learning Engineering" (S. Bekman):
# 363 GB/s at 4 devices and 365 flat without in-switch reduction; 414 at 5 and 473 at 8 with it. One ring rate and one
# in-switch rate of the algorithm (bus bandwidth over bus factor) reproduce the four within 2.3 %.
NVLINK4_RING_BYTES_PER_S = 364e9
NVLINK4_SWITCH_BYTES_PER_S = 264.5e9
# Latencies of NCCL 2.27's tuning logs, as autoparallel (BSD-3-Clause) tabulates them.
_NVLINK4_REDUCE_S = {2: 10e-6, 4: 15e-6, 5: 19e-6, 8: 31e-6}
_NVLINK4_GATHER_S = {2: 8e-6, 4: 17e-6, 8: 30e-6}

# xGMI of MI300X: bus bandwidth 47.7 GB/s at 2 and 312.9 at 8 devices, "Machine Learning Engineering"; in between a line, for
# every further device brings one more link. Latency: a 10 us launch and NCCL's 3.4 us (Simple protocol) a hop, 2(n-1) hops.
_XGMI = {n: (10e-6 + 3.4e-6 * 2 * (n - 1), 47.7e9 + (312.9e9 - 47.7e9) * (n - 2) / 6) for n in range(2, 9)}


def _fitted(group_size: int, latency_us: float, small: float, medium: float, large: float) -> Curve:
    """Returns a fitted all-reduce: time of an empty message, bus bandwidth in GB/s from each of `FIT_BREAKS_MB` up."""
    rates = (small * 1e9, medium * 1e9, large * 1e9)
    stretches = [(start * MB, rate) for start, rate in zip(FIT_BREAKS_MB, rates, strict=True)]
    return joined_curve(group_size, latency_us * 1e-6, stretches, algorithm="ring")


# `python benchmarks/links.py --coefficients`; the V100 pair is joined by one link.
_NVLINK2 = (
    _fitted(2, 24.09, 22.77, 22.62, 22.56),
    _fitted(4, 45.76, 73.15, 96.92, 85.22),
    _fitted(8, 52.92, 67.93, 153.7, 135.7),
)
_NVLINK3 = (
    _fitted(2, 38.42, 181.1, 172.0, 195.1),
    _fitted(4, 41.92, 165.9, 208.1, 220.3),
    _fitted(8, 91.72, 1722.0, 193.8, 228.9),
)


def _nvlink4() -> tuple[Curve, ...]:
    curves = []
    for size, latency in _NVLINK4_REDUCE_S.items():
        in_switch = size >= 5
        rate = NVLINK4_SWITCH_BYTES_PER_S * 2 * (size - 1) / size if in_switch else NVLINK4_RING_BYTES_PER_S
        curves.append(Curve(size, (Piece(0.0, latency, rate),), algorithm="nvls" if in_switch else "ring"))
    for size, latency in _NVLINK4_GATHER_S.items():
        curves.append(Curve(size, (Piece(0.0, latency, NVLINK4_RING_BYTES_PER_S),), "all_gather", "ring"))
    return tuple(curves)


_VTRAIN = (
    "all-reduce tables of vTrain (MICRO 2024, github.com/VIA-Research/vTrain, MIT), fitted on 1, 4, 8, 32, 128, 512, 1024 MB"
)
FAMILIES: dict[str, tuple[tuple[Curve, ...], str]] = {
    "nvlink2": (_NVLINK2, f"V100 {_VTRAIN}"),
    "nvlink3": (_NVLINK3, f"A100 {_VTRAIN}"),
    "nvlink4": (_nvlink4(), "H200 bus bandwidths of ml-engineering (S. Bekman), latencies of NCCL 2.27 tuning logs"),
    "xgmi": (
        tuple(Curve(size, (Piece(0.0, *pair),), algorithm="ring") for size, pair in _XGMI.items()),
        "MI300X bus bandwidths of ml-engineering (S. Bekman), latency from NCCL constants",
    ),
}
"""Interconnect generations by name: fitted curves, and their source; both as in `Fabric`."""
