"""Scores the collective curves on measured all-reduce times that were not fitted, and on published bus bandwidths.

    python -m benchmarks.links                  errors of the shipped curves, anchors
    python -m benchmarks.links --coefficients   fits again and prints what rlplace/cluster/presets.py holds

The times (NCCL all-reduce on 2, 4 and 8 devices of an A100 and of a V100 host; vTrain, MICRO 2024, MIT licence) are read from
--data, by default a folder shared/data beside the repository; without them only the anchors are checked. Split: the fit sees
the seven sizes of `FIT_SIZES_MB`, every other size is held out. MB is 2^20 bytes.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import SHARED, arguments, markdown
from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.fabric import bus_factor
from rlplace.cluster.machines import fit_collective_curve
from rlplace.cluster.presets import FIT_BREAKS_MB, MB

GIB = 1 << 30
CLUSTERS = {"a100": "a100-80g:8", "v100": "v100:8"}
FIT_SIZES_MB = (1, 4, 8, 32, 128, 512, 1024)  # of the published tables, that the fit sees; all others test it
REQUIRED = {("v100", 8): (6.0, 17.0)}
# (cluster, collective, devices, published bus bandwidth in GB/s, source); 8 GiB messages
ANCHORS = (
    ("h200:8", "all_reduce", 4, 363.0, "ml-engineering"),
    ("h200:8", "all_reduce", 5, 414.0, "ml-engineering, in-switch"),
    ("h200:8", "all_reduce", 8, 473.0, "ml-engineering, in-switch"),
    ("h200:8", "all_gather", 8, 365.0, "ml-engineering, flat without in-switch"),
    ("a100-80g:8", "all_reduce", 8, 235.0, "ml-engineering (not fitted)"),
    ("mi300x:8", "all_reduce", 2, 47.7, "ml-engineering"),
    ("mi300x:8", "all_reduce", 8, 312.9, "ml-engineering"),
)

Tables = dict[tuple[str, int], tuple[NDArray[np.float64], NDArray[np.float64]]]


def read(path: Path) -> Tables:
    """Returns sizes in bytes and seconds by (device, group size)."""
    rows: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream):
            rows.setdefault((row["device"], int(row["gpus"])), []).append((float(row["bytes"]), int(row["time_ns"]) * 1e-9))
    return {key: (np.array([r[0] for r in found]), np.array([r[1] for r in found])) for key, found in rows.items()}


def report(tables: Tables) -> bool:
    """Prints errors of the shipped curves on sizes that were not fitted; says whether they are as small as required."""
    rows, good = [], True
    for (device, count), (size, seconds) in tables.items():
        links = Cluster.preset(CLUSTERS[device]).links
        error = 100 * np.abs(collective_s(links, "all_reduce", range(count), size) / seconds - 1)
        held_out, large = ~np.isin(size / MB, FIT_SIZES_MB), size >= 8 * MB
        limit = REQUIRED.get((device, count), (5.0, 17.0))
        parts = [error[held_out & large], error[held_out & ~large]]
        good &= bool(parts[0].mean() <= limit[0] and parts[0].max() <= limit[1])
        shown = [f"{part.mean():.1f} / {part.max():.1f}" for part in parts]
        rows.append([f"{device} x{count}", shown[0], f"{limit[0]:.0f} / {limit[1]:.0f}", shown[1]])
    print(markdown(["all-reduce, error in % (mean / worst)", "from 8 MB", "required", "below 8 MB"], rows))
    return good


def anchors() -> None:
    """Prints published bus bandwidths of messages of 8 GiB beside ours."""
    rows = []
    for text, kind, count, published, source in ANCHORS:
        seconds = collective_s(Cluster.preset(text).links, kind, range(count), 8.0 * GIB)
        bus = bus_factor(kind, count) * 8 * GIB / seconds / 1e9
        rows.append([text, kind, count, f"{bus:.1f}", published, f"{100 * (bus / published - 1):.1f}", source])
    print("\n" + markdown(["cluster", "collective", "devices", "GB/s", "published", "error %", "source"], rows))


def coefficients(tables: Tables) -> None:
    """Fits again and prints what the fabrics hold."""
    for (device, count), (size, seconds) in tables.items():
        seen, breaks = np.isin(size / MB, FIT_SIZES_MB), [b * MB for b in FIT_BREAKS_MB]
        curve = fit_collective_curve(size[seen], seconds[seen], kind="all_reduce", group_size=count, breaks=breaks)
        rates = ", ".join(f"{piece.bus_bytes_per_s / 1e9:.4g}" for piece in curve.pieces)
        print(f"{device}: _fitted({count}, {curve.pieces[0].latency_s * 1e6:.2f}, {rates})")


def main() -> int:
    """Prints errors, or coefficients; the exit code."""
    options = arguments(
        __doc__, data=(SHARED, "folder of published timings"), coefficients="fit again and print the coefficients"
    )
    path, good = options.data / "allreduce" / "allreduce.csv", True
    if not path.is_file():
        print(f"no measured all-reduce times at {path}; checking the anchors alone", file=sys.stderr)
    elif options.coefficients:
        coefficients(read(path))
        return 0
    else:
        good = report(read(path))
    anchors()
    return not good


if __name__ == "__main__":
    sys.exit(main())
