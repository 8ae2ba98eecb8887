"""Fits op-time curves on the kernels that `python -m benchmarks.gpu` timed, and reports their error on kernels left out.

    python -m benchmarks.gpu.fit DIR --kind h200            error of the shipped curves, and of a fit on four fifths of the rest
    python -m benchmarks.gpu.fit DIR --kind h200 --write all    fits on all and writes them into rlplace/cost/shipped.cost.json;
                                                            `--write attention/half` writes these curves alone

Work is counted as the cost model counts it in a graph. Half precisions share a fit, and so do the directions of a product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import arguments, markdown, read_rows
from rlplace.cluster.presets import KINDS, DeviceKind
from rlplace.cost.calls import causal_share
from rlplace.cost.curve import DIMS, Curve, kernel_seconds
from rlplace.cost.foreign import SHIPPED, shipped_costs
from rlplace.cost.scaled import CLASSES, datasheet_curve, find_curve, peak_of
from rlplace.cost.table import CostTable, Key, KindCosts
from rlplace.cost.timings import Measurement
from rlplace.measure.fit import OpTiming, fit_op_curve

FOLDS, FEWEST, LEAST_UPDATE, LEAST_S, BYTES = 5, 5, 1e7, 1.4e-6, {"bfloat16": 2, "float16": 2}
SOURCE = "python -m benchmarks.gpu on {device}, torch 2.11, CUDA 13.0; {count} kernels"
CLASS_OF = {
    "layer_norm": "norm", "rms_norm": "norm", "log_softmax": "softmax", "sum": "reduction", "cast": "copy",
    "add": "elementwise", "mul": "elementwise", "gelu": "elementwise", "silu": "elementwise", "relu": "elementwise",
    "dropout": "elementwise", "adamw_foreach": "optimizer", "adamw_fused": "optimizer", "sgd_foreach": "optimizer",
}  # fmt: skip
TENSORS = {"add": (3, 0), "mul": (3, 0), "gelu": (2, 3), "silu": (2, 3), "relu": (2, 0), "copy": (2, 0), "sum": (1, 0),
           "layer_norm": (2, 5), "rms_norm": (2, 5), "embedding": (2, 2), "softmax": (2, 4.5),
           "adamw_foreach": (20, 0), "adamw_fused": (7, 0), "sgd_foreach": (3, 0)}  # fmt: skip
"""Tensors of the largest size that a forward and a backward move; with those that pricing adds for norms and softmax."""

PUBLISHED_TOKENS, PUBLISHED_HIDDEN = 16384, 2048
PUBLISHED_ATTENTION = {
    ("forward", 128, True): (315, 410, 484, 518, 529, 539),
    ("forward", 128, False): (497, 574, 617, 609, 600, 595),
    ("forward", 64, False): (335, 373, 395, 408, 412, 413),
    ("backward", 128, False): (305, 408, 465, 499, 518, 516),
    ("backward", 64, False): (266, 348, 395),
}
"""TFLOP/s of cuDNN on an H100 SXM by direction, width of a head and causality, from 512 positions on, each twice the last;
figures 5 and 6 of FlashAttention-3 (arXiv 2407.08608). torch runs cuDNN on Hopper since 2.10; the kernels timed on the H200 are
too small to show what long sequences reach."""


@dataclass(frozen=True)
class Timed:
    """A kernel, its curve's key, what it is called, and how its rows lie (see `rlplace.cost.calls.Calls.sizes`)."""

    key: Key
    timing: OpTiming
    name: str
    align: int = 8

    @property
    def precision(self) -> str:
        """Whose peak counts: half precisions have the same."""
        return _stated(self.key[1])


def _stated(precision: str) -> str:
    return "bfloat16" if precision == "half" else precision


def read(path: Path) -> list[Timed]:
    """Returns the kernels of a file, but for attention under a mask and updates that the host could not issue in time."""
    rows = [row for row in read_rows(path) if "failed" not in row and row["dims"].get("causal") != 2]
    rows = [row for row in rows if row["direction"] != "update" or row["dims"]["count"] > LEAST_UPDATE]
    return [timed_of(row) for row in rows if row["seconds"] > 1e-6]


def in_steps(folder: Path) -> list[Timed]:
    """Convolutions as they ran inside the steps of five models.

    Attention was timed under the mask that an exported graph reads, where a step without padding has none.
    """
    found = []
    for path in sorted(folder.glob("*.measure.json")):
        for op in Measurement.load(path).ops:
            if op.kind != "conv":
                continue
            precision = "half" if op.dtype in BYTES else "tf32"
            way = "forward" if op.direction == "forward" else "backward"
            item = CLASSES[op.kind]
            calls = item.backward_kernels if way == "backward" else item.kernels
            dims = dict(op.dims)
            align = math.gcd(8, dims["n"], dims["k"]) if {"n", "k"} <= dims.keys() else 8
            name = f"{path.name.partition('.')[0]} {op.target} {way}"
            timing = OpTiming(op.flops, op.size_bytes, op.seconds, calls, dims)
            found.append(Timed((op.kind, precision, way), timing, name, align))
    return found


def published_attention() -> list[Timed]:
    """Attention in half precision as others timed it; a causal rate counts half of the scores."""
    rows = []
    for (way, width, causal), rates in PUBLISHED_ATTENTION.items():
        for power, rate in enumerate(rates):
            positions = 512 << power
            flops = (10.0 if way == "backward" else 4.0) * PUBLISHED_TOKENS * positions * PUBLISHED_HIDDEN
            seconds = (0.5 if causal else 1.0) * flops / (1e12 * rate)
            flops *= float(causal_share(positions)) if causal else 1.0
            timing = OpTiming(flops, 0.0, seconds, 3.0 if way == "backward" else 1.0)
            rows.append(Timed(("attention", "half", way), timing, f"published {way}, width {width}, {positions} positions"))
    return rows


def sustained(folder: Path) -> list[Timed]:
    """Returns kernels that ran for seconds without a pause, at the card's power limit: the median window."""
    rows = []
    for row in read_rows(folder / "sustained.jsonl"):
        op, dtype, direction, sizes = row["key"].split("/")
        dims = {name: int(size) for name, size in (pair.split("=") for pair in sizes.split(","))}
        seconds = float(np.median([window["seconds"] for window in row["windows"]]))
        rows.append(timed_of({"op": op, "dtype": dtype, "direction": direction, "dims": dims, "seconds": seconds, **row}))
    return rows


def at_power_limit(curves: dict[Key, Curve], rows: list[Timed], kind: DeviceKind) -> dict[Key, Curve]:
    """Products of half precision as training runs them, for hours: single kernels and short steps end before clocks fall."""
    own = [row for row in rows if row.key == ("gemm", "half", "forward")]
    if not own:
        return curves
    share = min(1.0, float(np.median([predict(curves[row.key], row, kind) / row.timing.seconds for row in own])))
    print(f"products of half precision at the power limit: {share:.3f} of the rate of single kernels")
    return {
        key: msgspec.structs.replace(curve, compute_efficiency=share * curve.compute_efficiency)
        if key[0] in ("gemm", "bmm") and key[1] == "half"
        else curve
        for key, curve in curves.items()
    }


def timed_of(row: Mapping[str, Any]) -> Timed:
    """Says what a kernel of a file does, as the cost model counts it."""
    op, dtype, direction, dims = row["op"], row["dtype"], row["direction"], row["dims"]
    size = BYTES.get(dtype, 4)
    precision = "half" if dtype in BYTES else dtype
    back = direction != "forward"
    calls = 1.0
    if op in ("gemm", "bmm"):
        batch, m, n, k = dims.get("batch", 1), dims["m"], dims["n"], dims["k"]
        flops, moved = 2.0 * batch * m * n * k, batch * (m * n + n * k + m * k)
        key, known = (op, precision, "forward"), {"batch": batch, "m": m, "n": n, "k": k}
    elif op == "conv":
        image, stride, kernel = dims["image"], dims["stride"], dims["kernel"]
        pixels = dims["batch"] * math.ceil(image / stride) ** 2
        k = dims["channels"] * kernel * kernel
        calls = 2.0 if back else 1.0
        flops = calls * 2.0 * pixels * k * dims["filters"]
        moved = calls * (dims["batch"] * image**2 * dims["channels"] + pixels * dims["filters"] + k * dims["filters"])
        key, known = (op, precision, "backward" if back else "forward"), {"m": pixels, "n": dims["filters"], "k": k}
    elif op == "attention":
        one = dims["batch"] * dims["heads"] * dims["seq"] * dims["head_dim"]
        flops = (10.0 if back else 4.0) * one * dims["seq"] * (float(causal_share(dims["seq"])) if dims["causal"] else 1.0)
        calls, moved = (3.0 if back else 1.0), 0  # FLOPs decide; what a mask moves is for the prior
        key, known = (op, precision, "backward" if back else "forward"), {}
    else:
        return _memory_bound(row, size)
    rows = {"m", "n"} if direction == "backward_weight" else {"n", "k"}  # sizes of a kernel that lie side by side
    align = math.gcd(8, *(known[name] for name in rows & known.keys()))
    return Timed(key, OpTiming(flops, float(size * moved), row["seconds"], calls, known), row["key"], align)


def _memory_bound(row: Mapping[str, Any], size: int) -> Timed:
    """Returns of a class whose time is that of its bytes, at any dtype: its few FLOPs are left to the prior."""
    op, dims, back = row["op"], row["dims"], row["direction"] == "backward"
    count = dims["count"] if "count" in dims else dims["rows"] * dims["columns"]
    if op == "dropout":
        moved = count * (2 * size + 1)
    elif op == "cast":
        moved = count * 6
    elif op == "log_softmax":
        moved = count * size * ((4 if dims["columns"] > 1024 else 3) if back else 2)
    else:
        moved = count * size * TENSORS[op][back]
    name = CLASS_OF.get(op, op)
    known = {key: dims[key] for key in ("rows", "columns") if key in dims}
    # A backward of a norm is two kernels, the second of which reads what the first left in the cache.
    calls = CLASSES[name].backward_kernels if back else max(1.0, CLASSES[name].kernels)
    way = "update" if name == "optimizer" else "backward" if back and name in ("norm", "softmax", "embedding") else "forward"
    key = (name, "float32", way)
    return Timed(key, OpTiming(0.0, float(moved), row["seconds"], calls, known), row["key"])


def fit(rows: list[Timed], kind: DeviceKind, source: str) -> dict[Key, Curve]:
    """Returns a curve for every key of the rows."""
    found: dict[Key, Curve] = {}
    for key in sorted({row.key for row in rows}):
        whole = [row for row in rows if row.key == key]
        op, precision, direction = key
        own = [row.timing for row in whole if row.align >= (8 if precision == "half" else 4)]  # loads of 16 bytes
        apart = op in ("gemm", "bmm", "conv") and precision in ("half", "tf32") and len(own) >= FEWEST
        own = own if apart else [row.timing for row in whole]
        stated = _stated(precision)
        text = SOURCE.format(device=source, count=len(whole))
        if op == "optimizer":  # many parameters at once: a small one fills no device by itself, and need not
            rate = float(np.median([row.size_bytes / row.seconds for row in own])) / kind.memory_bandwidth_bytes_per_s
            found[key] = Curve(0.5, 1.0, rate, 1.0, floor_s=LEAST_S, basis="fitted", source=text)
            continue
        curve = fit_op_curve(
            own,
            peak_flops=peak_of(kind, stated),
            bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s,
            basis="fitted",
            source=text,
            prior=msgspec.structs.replace(datasheet_curve(kind, op, stated, direction), floor_s=2e-6),
        )
        curve = msgspec.structs.replace(curve, floor_s=max(curve.floor_s or 0.0, LEAST_S))
        if not CLASSES[op].matrix:  # no FLOPs were fitted
            curve = msgspec.structs.replace(curve, compute_half_flops=1.0)
        found[key] = msgspec.structs.replace(curve, unaligned=_unaligned(curve, whole, kind)) if apart else curve
    return found


def _unaligned(curve: Curve, rows: list[Timed], kind: DeviceKind) -> tuple[float, ...]:
    """Returns factors of rows whose sizes are multiples of 4, 2 and 1 only; a less aligned size is never the faster one."""
    factors: list[float] = []
    for align in (1, 2, 4):  # the odd ones are most
        own = [row for row in rows if row.align == align]
        tried = np.geomspace(1.0, factors[-1] if factors else 10.0, 60)
        errors = [
            sum(abs(math.log(predict(msgspec.structs.replace(curve, unaligned=(x, x, x)), row, kind) / row.timing.seconds))
                for row in own)
            for x in tried
        ]  # fmt: skip
        factors.append(float(f"{tried[int(np.argmin(errors))]:.3g}"))
    return tuple(reversed(factors))


def predict(curve: Curve, row: Timed, kind: DeviceKind) -> float:
    """Returns seconds of a kernel."""
    timing = row.timing
    sizes = {name: np.array([float(size)]) for name, size in timing.dims.items()}
    known: dict[str, NDArray[np.float64]] = {name: sizes.get(name, np.ones(1)) for name in DIMS}
    known["align"] = np.array([float(row.align)])
    work = kernel_seconds(
        curve, [timing.flops / timing.calls], [timing.size_bytes / timing.calls], known,
        peak_flops=peak_of(kind, row.precision),
        bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s, processors=kind.processors,
    )  # fmt: skip
    return timing.calls * (float(work[0]) + (kind.launch_s if curve.floor_s is None else curve.floor_s))


def shipped(row: Timed, kind: DeviceKind) -> float:
    """Returns seconds by what would be used without these rows."""
    kinds = {name: costs for name, costs in shipped_costs().kinds.items() if name != kind.name}
    return predict(find_curve(kind, replace(shipped_costs(), kinds=kinds), row.key[0], row.precision, row.key[2]), row, kind)


def report(rows: list[Timed], kind: DeviceKind) -> None:
    """Prints errors by key, each row predicted by a fit on other folds."""
    fold = np.random.default_rng(0).permutation(len(rows)) % FOLDS
    left_out = np.zeros(len(rows))
    for number in range(FOLDS):
        curves = fit([row for row, own in zip(rows, fold, strict=True) if own != number], kind, "")
        for index in np.flatnonzero(fold == number):
            row = rows[index]
            left_out[index] = predict(curves[row.key], row, kind) if row.key in curves else np.nan
    seconds = np.array([row.timing.seconds for row in rows])
    before = np.array([shipped(row, kind) for row in rows])
    table = []
    for key in sorted({row.key for row in rows}):
        own = np.array([row.key == key for row in rows])
        cells = [*key, str(int(own.sum()))]
        for large in (False, True):
            mask = own & (seconds > 30e-6) if large else own
            for predicted in (before, left_out):
                error = 100 * (predicted[mask] / seconds[mask] - 1)
                cells += [f"{np.abs(error).mean():.1f}", f"{np.median(error):+.1f}"] if mask.any() else ["-", "-"]
        table.append(cells)
    print(markdown(
        ["class", "dtype", "direction", "kernels", "before %", "median", "left out %", "median", "over 30 us: before %",
         "median", "left out %", "median"],
        table,
    ))  # fmt: skip


def main() -> None:
    """Reports errors, or fits and writes the curves of a kind."""
    write = ("", "fit on all and write: all, or CLASS/PRECISION")
    options = arguments(__doc__, "folder", kind=("h200", "of device", sorted(KINDS)), write=write)
    folder = Path(*options.folder)
    kind, long = KINDS[options.kind], sustained(folder)
    rows = read(folder / "kernels.jsonl") + in_steps(folder)
    rows += published_attention() if options.kind == "h200" else []
    rows += [row for row in long if row.key[1] != "half"]
    if not options.write:
        report(rows, kind)
        return
    table = shipped_costs()
    found = at_power_limit(fit(rows, kind, f"one {kind.name.upper()}"), long, kind)
    curves = write_halves({key: curve for key, curve in found.items() if options.write in ("all", "/".join(key[:2]))})
    if options.write != "all":
        curves = {**table.kinds[kind.name].curves, **curves}
    own = {**table.kinds, kind.name: KindCosts(curves)}
    CostTable(own, name=table.name, source=table.source).save(SHIPPED)
    print(f"wrote {SHIPPED}")


def write_halves(curves: Mapping[Key, Curve]) -> dict[Key, Curve]:
    """Returns curves of half precision under the names of both dtypes, with five digits."""
    found: dict[Key, Curve] = {}
    names = ("compute_efficiency", "compute_half_flops", "bandwidth_efficiency", "bandwidth_half_bytes", "floor_s")
    for (op, precision, direction), curve in curves.items():
        short = msgspec.structs.replace(curve, **{name: float(f"{getattr(curve, name):.5g}") for name in names})
        for dtype in ("bfloat16", "float16") if precision == "half" else (precision,):
            found[(op, dtype, direction)] = short
    return found


if __name__ == "__main__":
    main()
