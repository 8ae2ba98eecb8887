"""Predictions of the steps that were measured: as shipped, and calibrated on the ops of the five models.

    python -m benchmarks.gpu.predict DIR

Reads what `python -m benchmarks.gpu --out DIR` wrote, on any machine. Steps under autocast are not priced. The three peaks are
what was allocated, what the allocator held, and what the footprint of the plan says of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rlplace
from benchmarks.gpu.models import FIT
from benchmarks.harness import arguments, markdown, read_rows, write_rows
from rlplace.cluster.parse import parse
from rlplace.cluster.presets import DeviceKind
from rlplace.cost.footprint import footprint
from rlplace.cost.table import CostTable
from rlplace.cost.timings import Measurement
from rlplace.measure.calibrate import calibrate
from rlplace.model.zoo import load_model

DTYPES = {"fp32": ("fp32", ""), "bf16": ("bf16", ""), "bf16 checkpointing": ("bf16", ",gradient_checkpointing=true")}
HEADER = ["model", "variant", "measured ms", "shipped %", "calibrated %", "allocated MB", "%", "reserved MB", "%"]


def cluster_of(measurement: Measurement) -> rlplace.Cluster:
    """Returns the device that was measured: the processor at hand, or a preset."""
    where = measurement.environment
    return rlplace.Cluster.detect() if where.device_type == "cpu" else parse(f"{where.device_kind}:1")


def calibrated(measurements: list[Measurement], kind: DeviceKind) -> CostTable:
    """Returns curves of every op target that the five models hold."""
    return calibrate(measurements, kind, holdout=0.0, by_model=False).table


def predictions(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each measured step: seconds and bytes, measured and predicted."""
    measurements = [Measurement.load(folder / row["file"]) for row in read_rows(folder / "ops.jsonl") if "failed" not in row]
    cluster = cluster_of(measurements[0])
    tables = {"shipped": None, "calibrated": calibrated(measurements, cluster.kinds[0])}
    for row in read_rows(folder / "steps.jsonl"):
        name, _, variant = row["key"].partition(" ")
        if variant not in DTYPES or "failed" in row:
            continue
        dtype, option = DTYPES[variant]
        model = load_model(row["model"] + option, batch=row["batch"], seq=row["seq"], dtype=dtype)
        graph = rlplace.capture(model.module, model.example_inputs, loss=model.loss, name=model.name)
        own: dict[str, Any] = {"model": name, "variant": variant, "fitted": name in FIT, "measured_s": row["seconds"]}
        for label, table in tables.items():
            problem = rlplace.price(graph, cluster, level="op", costs=table)
            placed = [0] * problem.num_groups
            own[f"{label}_s"] = rlplace.simulate(problem, placed).step_time_s
        if "allocated_bytes" in row:
            memory = footprint(problem, placed, graph=graph)[0]
            own |= {"allocated_bytes": row["allocated_bytes"], "reserved_bytes": row["reserved_bytes"]}
            own |= {"predicted_allocated_bytes": memory.allocated_peak_bytes}
            own |= {"predicted_reserved_bytes": memory.reserved_peak_bytes}
        yield own


def _cells(row: dict[str, Any]) -> list[str]:
    def off(predicted: str, measured: str) -> str:
        return f"{100 * (row[predicted] / row[measured] - 1):+.1f}" if predicted in row else "-"

    def megabytes(key: str) -> str:
        return f"{row[key] / 1e6:.0f}" if key in row else "-"

    name = row["model"] + (" (its ops were timed)" if row["fitted"] else "")
    return [
        name, row["variant"], f"{1e3 * row['measured_s']:.2f}",
        off("shipped_s", "measured_s"), off("calibrated_s", "measured_s"),
        megabytes("allocated_bytes"), off("predicted_allocated_bytes", "allocated_bytes"),
        megabytes("reserved_bytes"), off("predicted_reserved_bytes", "reserved_bytes"),
    ]  # fmt: skip


if __name__ == "__main__":
    folder = Path(*arguments(__doc__, "folder").folder)
    rows = list(predictions(folder))
    write_rows(folder / "predictions.jsonl", rows)
    print(markdown(HEADER, map(_cells, rows)))
