"""Fits op-time curves on public kernel timings, and reports their error on shapes that were not fitted.

    python -m benchmarks.op_times              errors of the shipped coefficients on held-out shapes
    python -m benchmarks.op_times --left-out   errors on devices whose timings were not used
    python -m benchmarks.op_times --write      fits again and writes rlplace/cost/shipped.cost.json

The timings (NeuSight, ASPLOS 2025, MIT licence: fp32 kernels, TF32 off, PyTorch 2.1) are read from --data, by default
../shared/data beside the repository; without them there is nothing to do. Two sets are there: shapes on a grid, and shapes
drawn at random (convolutions of 3 x 3 among them). Shapes are split by a hash: a shape is either fitted on all devices or on
none; about every fifth of the grid and every second of the random ones are held out.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.fit_residual import fit_residual, sizes_of
from benchmarks.harness import SHARED, arguments, data, markdown
from rlplace.cluster import KINDS
from rlplace.cluster.presets import DeviceKind
from rlplace.cost.curve import Curve, kernel_seconds
from rlplace.cost.foreign import SHIPPED, shipped_costs
from rlplace.cost.scaled import CLASSES, datasheet_curve
from rlplace.cost.table import CostTable, KindCosts
from rlplace.measure.fit import SATURATIONS, OpTiming, fit_op_curve

SOURCE = "NeuSight (ASPLOS 2025) kernel timings, fp32 with TF32 off, PyTorch 2.1, CUDA 12.1, {device}"
HELD_OUT = {"kernel_timings": 0.2, "kernel_timings_random": 0.5}
LARGE_S = 100e-6  # times of the random set below that are mostly launch and synchronisation

# The cards that were timed: preset kind, and what of it differs from the preset (PCIe cards, boost clocks).
CARDS: dict[str, DeviceKind] = {
    "Tesla V100-PCIE-32GB": msgspec.structs.replace(KINDS["v100"], peak_flops={"float32": 14.0e12}),
    "NVIDIA A100-PCIE-40GB": KINDS["a100-40g"],
    "NVIDIA A100 80GB PCIe": msgspec.structs.replace(KINDS["a100-80g"], memory_bandwidth_bytes_per_s=1935e9),
    "NVIDIA H100 80GB HBM3": KINDS["h100"],
    "NVIDIA L4": KINDS["l4"],
    "Tesla T4": KINDS["t4"],
}
CLASS_OF_FILE = {"linear": "gemm", "bmm": "bmm", "conv": "conv", "elem": "elementwise", "ln": "norm", "softmax": "softmax"}
BINARY = ("add", "mul", "pow", "div")
LEAVE_ONE_OUT = {"v100": "a100-40g", "a100-40g": "a100-80g", "a100-80g": "a100-40g", "h100": "a100-80g", "l4": "t4", "t4": "l4"}
PER_ELEMENT = {"elem": 1.0, "ln": 6.0, "softmax": 5.0}


@dataclasses.dataclass(frozen=True)
class Timed(OpTiming):
    """A timed kernel; `folder` says which set it is from."""

    folder: str = ""


def read(folder: Path) -> dict[tuple[str, str], list[Timed]]:
    """Timings by (file, kind name)."""
    found: dict[tuple[str, str], list[Timed]] = {}
    for part, name in ((part, name) for part in HELD_OUT for name in CLASS_OF_FILE):
        path = folder / part / f"{name}.csv"
        if not path.exists():
            continue
        with open(path, newline="") as stream:
            for row in csv.DictReader(stream):
                card = CARDS.get(row["device"])
                if card is not None:
                    timed = _timed(name, row, part)
                    found.setdefault((name, card.name), []).append(timed)
    return found


def _timed(name: str, row: dict[str, str], folder: str) -> Timed:
    seconds = float(row["latency_ms"]) * 1e-3
    if name in ("linear", "bmm"):
        dims = {"batch": int(row["B"]), "m": int(row["M"]), "n": int(row["N"]), "k": int(row["K"])}
        b, m, n, k = dims.values()
        return Timed(2.0 * b * m * n * k, 4.0 * b * (m * n + n * k + m * k), seconds, dims=dims, folder=folder)
    if name == "conv":
        batch, image, inputs, outputs = (int(row[key]) for key in ("B", "input_size", "input_channel", "output_channel"))
        dims = {"m": batch * image**2, "n": outputs, "k": 9 * inputs, "image": image}
        size = 4.0 * (dims["m"] * (inputs + outputs) + dims["k"] * outputs)
        return Timed(2.0 * dims["m"] * outputs * dims["k"], size, seconds, dims=dims, folder=folder)
    dims = {"rows": int(row["B"]), "columns": int(row["H"])}
    count = float(dims["rows"] * dims["columns"])
    tensors = 3 if row["op"] in BINARY else 2
    return Timed(PER_ELEMENT[name] * count, 4.0 * count * tensors, seconds, dims=dims, folder=folder)


def held_out(timing: Timed) -> bool:
    """Returns the same answer for a shape on every device."""
    text = ",".join(f"{name}={size}" for name, size in sorted(timing.dims.items()))
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT[timing.folder]


def card_of(kind: str) -> DeviceKind:
    return next(card for card in CARDS.values() if card.name == kind)


def fit(timings: dict[tuple[str, str], list[Timed]]) -> CostTable:
    """Returns curves and residuals of every class and kind, on the shapes that are not held out."""
    curves: dict[str, dict[tuple[str, str, str], Curve]] = {}
    overhead_s = overhead(timings)
    for (name, kind), rows in timings.items():
        op, card = CLASS_OF_FILE[name], card_of(kind)
        device = next(text for text, known in CARDS.items() if known is card)
        fitted = [row for row in rows if not held_out(row)]
        if not CLASSES[op].matrix:  # memory decides, at any dtype: leave the few FLOPs an element to the prior
            fitted = [dataclasses.replace(row, flops=0.0) for row in fitted]
        numbers = {"peak_flops": card.peak_flops["float32"], "bandwidth_bytes_per_s": card.memory_bandwidth_bytes_per_s}
        # The random set holds calls of no size, which take more than element-wise ones do; of convolutions there are none.
        small = [row.seconds for row in fitted if row.folder == "kernel_timings_random" and op != "conv"]
        curve = fit_op_curve(
            fitted,
            **numbers,
            basis="fitted",
            source=SOURCE.format(device=device) + f"; {len(fitted)} shapes",
            prior=datasheet_curve(card, op, "float32", "forward"),
            floor_s=card.launch_s,
            overhead_s=max(float(np.quantile(small, 0.02)) - card.launch_s, 0.0) if small else overhead_s,
            # No small product was timed. With exponent 1 each would cost a fixed 55 us on an L4 and 83 us on a T4.
            saturations=SATURATIONS[1:] if CLASSES[op].matrix else SATURATIONS,
        )
        preset = KINDS[kind]
        presets = [{"peak_flops": preset.peak_flops["float32"], "bandwidth_bytes_per_s": preset.memory_bandwidth_bytes_per_s}]
        curve = fit_residual(curve, fitted, op=op, processors=card.processors, presets=presets, **numbers)
        # The timings hold the launch and synchronisation of a lone call; inside a step the kind's own floor counts.
        curves.setdefault(kind, {})[(op, "float32", "forward")] = msgspec.structs.replace(shorten(curve), floor_s=None)
    return CostTable(
        {kind: KindCosts(found) for kind, found in curves.items()}, name="shipped", source="benchmarks/op_times.py --write"
    )


def overhead(timings: dict[tuple[str, str], list[Timed]]) -> float:
    """Says what a lone call takes beyond the launch floor: the time of element-wise calls at no size, median of the cards.

    Their work is known best (a fixed time plus bytes over bandwidth explains them to 2 %). Other classes cannot tell the
    overhead from the time that it takes to fill the device.
    """
    overheads = []
    for (name, kind), rows in timings.items():
        if name != "elem":
            continue
        card = card_of(kind)
        numbers = {"peak_flops": card.peak_flops["float32"], "bandwidth_bytes_per_s": card.memory_bandwidth_bytes_per_s}
        fitted = [dataclasses.replace(row, flops=0.0) for row in rows if not held_out(row)]
        curve = fit_op_curve(fitted, **numbers, basis="fitted", source="", floor_s=card.launch_s, saturations=(1.0,))
        overheads.append(curve.overhead_s)
    return float(f"{np.median(overheads):.2g}")


def shorten(curve: Curve) -> Curve:
    """Returns five significant digits."""
    names = ("compute_efficiency", "compute_half_flops", "bandwidth_efficiency", "bandwidth_half_bytes", "overhead_s")
    return msgspec.structs.replace(curve, **{name: float(f"{getattr(curve, name):.5g}") for name in names})


def predict(curve: Curve, rows: list[Timed], card: DeviceKind) -> np.ndarray:
    """Returns seconds as that data set measures them: floor and measuring overhead included."""
    work = kernel_seconds(
        curve,
        [row.flops for row in rows],
        [row.size_bytes for row in rows],
        sizes_of(rows),
        peak_flops=card.peak_flops["float32"],
        bandwidth_bytes_per_s=card.memory_bandwidth_bytes_per_s,
        processors=card.processors,
    )
    return work + (card.launch_s if curve.floor_s is None else curve.floor_s) + curve.overhead_s


def errors(curve: Curve, rows: list[Timed], card: DeviceKind) -> np.ndarray:
    """Returns absolute percentage errors."""
    seconds = np.array([row.seconds for row in rows])
    return 100.0 * np.abs(predict(curve, rows, card) / seconds - 1.0)


def report_held_out(timings: dict[tuple[str, str], list[Timed]], table: CostTable) -> str:
    """Makes the table of errors on shapes not fitted, by the shipped coefficients; `curve` is without the residual."""
    rows = []
    for (name, kind), timed in sorted(timings.items()):
        curve, card = table.kinds[kind].curves[(CLASS_OF_FILE[name], "float32", "forward")], card_of(kind)
        for label, folder, least_s in (
            ("grid", "kernel_timings", 0.0), ("random", "kernel_timings_random", 0.0),
            ("over 100 us", "kernel_timings_random", LARGE_S),
        ):  # fmt: skip
            own = [row for row in timed if row.folder == folder and row.seconds >= least_s]
            if test := [row for row in own if held_out(row)]:
                signed = 100.0 * (predict(curve, test, card) / np.array([row.seconds for row in test]) - 1.0)
                plain, size = errors(msgspec.structs.replace(curve, residual=None), test, card).mean(), np.abs(signed)
                figures = plain, size.mean(), np.median(size), np.percentile(size, 90), signed.mean()
                rows.append([name, kind, label, len(own) - len(test), len(test), *(f"{figure:.1f}" for figure in figures)])
    return markdown(["class", "device", "shapes", "fitted", "held out", "curve", "mean %", "median", "p90", "signed"], rows)


def report_left_out(timings: dict[tuple[str, str], list[Timed]], table: CostTable) -> str:
    """Makes the table of absolute errors of every device as if it had never been timed.

    Peaks alone with default fractions; fractions of the nearest device without and with its residual; the better of both with
    one factor from 30 timings of the new device, in brackets its value; the preset's constants, which were read off public
    medians of that very device.
    """
    found = []
    for (name, kind), rows in sorted(timings.items()):
        card, other, op = card_of(kind), LEAVE_ONE_OUT[kind], CLASS_OF_FILE[name]
        lent = table.kinds.get(other)
        if lent is None or (op, "float32", "forward") not in lent.curves:
            continue
        with_residual = carried(lent.curves[(op, "float32", "forward")], card, card_of(other))
        curve = msgspec.structs.replace(with_residual, residual=None)
        unknown = DeviceKind("unknown", card.peak_flops, card.memory_bandwidth_bytes_per_s, card.memory_bytes)
        blank, sheet = (datasheet_curve(one, op, "float32", "forward") for one in (unknown, card))
        seen = np.random.default_rng(0).permutation(len(rows))[:30]
        rest = np.setdiff1d(np.arange(len(rows)), seen)
        seconds = np.array([row.seconds for row in rows])
        both = [predict(item, rows, card) for item in (curve, with_residual)]
        best = min(both, key=lambda predicted: np.std(np.log(predicted[seen] / seconds[seen])))
        factor = float(np.exp(np.median(np.log(seconds[seen] / best[seen]))))
        scaled = 100.0 * np.abs(factor * best[rest] / seconds[rest] - 1.0).mean()
        alone, without, carrying, preset = (errors(one, rows, card).mean() for one in (blank, curve, with_residual, sheet))
        figures = [f"{alone:.1f}", f"{without:.1f}", f"{carrying:.1f}", f"{scaled:.1f} ({factor:.2f})", f"{preset:.1f}"]
        found.append([name, kind, other, *figures])
    return markdown(["class", "device", "from", "peaks alone", "curve", "residual", "one factor", "preset"], found)


def carried(curve: Curve, card: DeviceKind, other: DeviceKind) -> Curve:
    """Returns equal fractions of peak and bandwidth, half points that take equally long."""
    faster = card.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    return msgspec.structs.replace(
        curve,
        compute_half_flops=curve.compute_half_flops * card.peak_flops["float32"] / other.peak_flops["float32"],
        bandwidth_half_bytes=curve.bandwidth_half_bytes * faster,
    )


def main() -> None:
    """Prints errors, or fits and writes the shipped coefficients."""
    options = arguments(
        __doc__,
        data=(SHARED, "folder of published timings"),
        write="fit and write the shipped coefficients",
        left_out="errors on devices that were not fitted",
    )
    timings = read(data(options.data, "kernel_timings").parent)
    if options.write:
        fitted = fit(timings)  # kinds that others timed (benchmarks.gpu.fit) stay
        dataclasses.replace(fitted, kinds={**shipped_costs().kinds, **fitted.kinds}).save(SHIPPED)
        print(f"wrote {SHIPPED}")
    elif options.left_out:
        print(report_left_out(timings, shipped_costs()))
    else:
        print(report_held_out(timings, shipped_costs()))


if __name__ == "__main__":
    main()
