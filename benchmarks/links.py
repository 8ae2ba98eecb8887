"""Scores the collective curves on measured all-reduce times that were not fitted, and on published bus bandwidths.

    python -m benchmarks.links                  errors of the shipped curves, anchors, cost of a call
    python -m benchmarks.links --coefficients   fits again and prints what rlplace/cluster/presets.py holds

The times (NCCL all-reduce on 2, 4 and 8 devices of an A100 and of a V100 host; vTrain, MICRO 2024, MIT licence) are read from
--data, by default a folder shared/data beside the repository; without them only the anchors are checked. Split: the fit sees
the seven sizes of `FIT_SIZES_MB`, every other size is held out. MB is 2^20 bytes.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import timeit
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import SHARED, arguments
from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.fabric import CollectiveCurve, bus_factor
from rlplace.cluster.machines import fit_collective_curve
from rlplace.cluster.presets import FIT_BREAKS_MB, MB

GIB = 1 << 30
CLUSTERS = {"a100": "a100-80g:8", "v100": "v100:8"}
FIT_SIZES_MB = (1, 4, 8, 32, 128, 512, 1024)  # of the published tables, that the fit sees; all others test it
OTHER_SPLITS_MB = ((1, 8, 32, 128, 1024), (1, 4, 16, 64, 256, 1024), (1, 2, 4, 8, 16, 32, 128, 512, 1024))
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


def fit(tables: Tables, key: tuple[str, int], sizes_mb: tuple[int, ...], breaks_mb: tuple[int, ...]) -> CollectiveCurve:
    size, seconds = tables[key]
    seen = np.isin(size / MB, sizes_mb)
    breaks = [b * MB for b in breaks_mb]
    curve = fit_collective_curve(size[seen], seconds[seen], kind="all_reduce", group_size=key[1], breaks=breaks)
    return msgspec.structs.replace(curve, algorithm="ring")


def errors(predicted: NDArray[np.float64], size: NDArray[np.float64], seconds: NDArray[np.float64], seen_mb: tuple[int, ...]):
    """Returns mean and worst error in percent of held-out sizes from 8 MB up, then below."""
    error = 100 * np.abs(predicted / seconds - 1)
    held_out = ~np.isin(size / MB, seen_mb)
    large, small = error[held_out & (size >= 8 * MB)], error[held_out & (size < 8 * MB)]
    return large.mean(), large.max(), small.mean(), small.max()


def report(tables: Tables) -> bool:
    print("all-reduce, error in % on sizes that were not fitted (mean / worst)")
    titles = ("from 8 MB", "required", "below 8 MB", "one line, from 8 MB", "one line, below")
    print(f"{'group':10s} " + " ".join(f"{title:>20s}" for title in titles))
    good = True
    for (device, count), (size, seconds) in tables.items():
        links = Cluster.preset(CLUSTERS[device]).links
        mean, worst, small, smallest = errors(
            collective_s(links, "all_reduce", range(count), size), size, seconds, FIT_SIZES_MB
        )
        line = fit(tables, (device, count), (8, 32, 128, 512, 1024), (0,)).seconds(size)
        plain = errors(line, size, seconds, (8, 32, 128, 512, 1024))
        limit = REQUIRED.get((device, count), (5.0, 17.0))
        good &= bool(mean <= limit[0] and worst <= limit[1])
        cells = (f"{mean:.1f} / {worst:.1f}", f"{limit[0]:.0f} / {limit[1]:.0f}", f"{small:.1f} / {smallest:.1f}")
        cells += (f"{plain[0]:.1f} / {plain[1]:.1f}", f"{plain[2]:.1f} / {plain[3]:.1f}")
        print(f"{device + ' x' + str(count):10s} " + " ".join(f"{cell:>20s}" for cell in cells))
    print("\nthe same pieces fitted on other sizes, from 8 MB (mean / worst)")
    print(f"{'group':10s} " + " ".join(f"{','.join(map(str, split)):>30s}" for split in OTHER_SPLITS_MB))
    for key, (size, seconds) in tables.items():
        cells = []
        for split in OTHER_SPLITS_MB:
            mean, worst, _, _ = errors(fit(tables, key, split, FIT_BREAKS_MB).seconds(size), size, seconds, split)
            cells.append(f"{f'{mean:.1f} / {worst:.1f}':>30s}")
        print(f"{key[0] + ' x' + str(key[1]):10s} " + " ".join(cells))
    print("\ngroup of four from those of two and eight alone, from 8 MB (mean / worst)")
    for device, text in CLUSTERS.items():
        size, seconds = tables[device, 4]
        links = Cluster.preset(text).links
        (fabric,) = links.fabrics
        others = msgspec.structs.replace(fabric, curves=tuple(curve for curve in fabric.curves if curve.group_size != 4))
        predicted = collective_s(dataclasses.replace(links, fabrics=(others,)), "all_reduce", range(4), size)
        mean, worst, _, _ = errors(predicted, size, seconds, ())
        print(f"{device:10s} {mean:7.1f} / {worst:5.1f}")
    return good


def anchors() -> None:
    print("\nbus bandwidth of 8 GiB messages, GB/s")
    print(f"{'cluster':12s} {'collective':11s} {'n':>2s} {'model':>7s} {'published':>10s} {'error %':>8s}")
    for text, kind, count, published, source in ANCHORS:
        seconds = collective_s(Cluster.preset(text).links, kind, range(count), 8.0 * GIB)
        bus = bus_factor(kind, count) * 8 * GIB / seconds / 1e9
        print(f"{text:12s} {kind:11s} {count:2d} {bus:7.1f} {published:10.1f} {100 * (bus / published - 1):8.1f}  {source}")


def cost() -> None:
    links = Cluster.preset("h100:2x8").links
    sizes = np.geomspace(1e3, 1e9, 300)
    print("\ncost of a call, 16 devices of two hosts, after the first")
    for name, size in (("one size", 25e6), ("300 sizes", sizes)):
        calls = 500
        spent = timeit.timeit(lambda size=size: collective_s(links, "all_reduce", range(16), size), number=calls) / calls
        print(f"{name:10s} {1e6 * spent:8.1f} us")


def coefficients(tables: Tables) -> None:
    """Fits again and prints what the fabrics hold."""
    for key in tables:
        curve = fit(tables, key, FIT_SIZES_MB, FIT_BREAKS_MB)
        rates = ", ".join(f"{piece.bus_bytes_per_s / 1e9:.4g}" for piece in curve.pieces)
        print(f"{key[0]}: _fitted({key[1]}, {curve.pieces[0].latency_s * 1e6:.2f}, {rates})")


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
    cost()
    return not good


if __name__ == "__main__":
    sys.exit(main())
