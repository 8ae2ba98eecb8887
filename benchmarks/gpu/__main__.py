"""Everything that one CUDA device can tell, in slices that can be resumed.

    python -m benchmarks.gpu --out DIR                       all slices, until --minutes are over; run it again to go on
    python -m benchmarks.gpu --out DIR --slices ops steps    some of them

Slices: `sustained` (clock and power under load), `kernels` (random sizes in every precision and direction), `ops` (five models,
every op inside real steps), `steps` (thirteen models, whole steps and the allocator's memory), `strategies` (one process).
What is there already in DIR/SLICE.jsonl is not measured again; `python -m benchmarks.gpu.predict DIR` says what the cost model
makes of it. Without a CUDA device the same code runs small models on the processor, and says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case, cases
from benchmarks.gpu.kernels import SUSTAINED, clear, sustained, time_case
from benchmarks.gpu.models import FIT, PREDICT, VARIANTS
from benchmarks.gpu.steps import STRATEGIES, measure_step, one_process, run_strategy
from benchmarks.harness import add_row, arguments, read_rows

SLICES = ("sustained", "kernels", "ops", "steps", "strategies")
Job = tuple[str, Callable[[], dict[str, Any]]]


def readings(device: torch.device) -> dict[str, float]:
    """Returns clock and power now; nothing where no driver tells."""
    if device.type != "cuda":
        return {}
    try:
        return {"clock_mhz": torch.cuda.clock_rate(device), "power_w": torch.cuda.power_draw(device) / 1e3}
    except Exception as error:
        return {"unknown": repr(error)[:100]}  # type: ignore[dict-item]


def sustained_jobs(device: torch.device) -> Iterator[Job]:
    for case in SUSTAINED:
        small = case if device.type == "cuda" else Case(case.op, "float32", "forward", {name: 64 for name in case.dims})

        def run(case: Case = small) -> dict[str, Any]:
            seconds = 2.5 if device.type == "cuda" else 0.05
            return {"windows": list(sustained(case, device, seconds, lambda: readings(device)))}

        yield case.key, run


def kernel_jobs(device: torch.device, rounds: int) -> Iterator[Job]:
    cuda = device.type == "cuda"
    for case in cases(rounds if cuda else 3, 1.0 if cuda else 1e-4):
        if not cuda and (case.dtype != "float32" or "fused" in case.op):
            continue

        def run(case: Case = case) -> dict[str, Any]:
            clear(device)
            fields = {"op": case.op, "dtype": case.dtype, "direction": case.direction, "dims": case.dims}
            return fields | time_case(case, device)

        yield case.key, run


def op_jobs(device: torch.device, folder: Path) -> Iterator[Job]:
    from rlplace.captured import Recipe
    from rlplace.measure.ops import load_and_measure

    for dtype in ("bf16", "fp32") if device.type == "cuda" else ("fp32",):
        for name, model in FIT.items():

            def run(name: str = name, model: Any = model, dtype: str = dtype) -> dict[str, Any]:
                spec, batch, seq = (model.spec, model.batch, model.seq) if device.type == "cuda" else (model.small, 2, 32)
                path = folder / f"{name}-{dtype}.measure.json"
                recipe = Recipe(spec, batch, seq, dtype, "adam")
                measured = load_and_measure(recipe, device=device, repeats=10, time_limit_s=10.0)
                measured.save(path)
                step = measured.step
                return {"step_s": step and step.seconds, "ops_s": measured.ops_s, "host_s": measured.host_s, "file": path.name}

            yield f"{name} {dtype}", run


def step_jobs(device: torch.device) -> Iterator[Job]:
    for name, model in {**FIT, **PREDICT}.items():
        for variant in VARIANTS:
            if (name == "lstm" and "auto" in variant) or ("checkp" in variant and not model.spec.startswith("hf:")):
                continue
            if device.type != "cuda" and variant != "fp32":  # half precision is many times slower there
                continue
            yield f"{name} {variant}", lambda model=model, variant=variant: measure_step(model, variant, device)


def strategy_jobs(device: torch.device) -> Iterator[Job]:
    for name in STRATEGIES:

        def run(name: str = name) -> dict[str, Any]:
            with one_process(device):
                return run_strategy(name, device)

        yield name, run


def main() -> int:
    """Runs the slices that are asked for; the exit code is 3 where time was up."""
    options = arguments(
        __doc__,
        out=(Path("gpu"), "folder of the rows (gpu)"),
        minutes=(8.0, "after which it stops"),
        rounds=(250, "of kernels, each of twelve"),
        device=("cuda" if torch.cuda.is_available() else "cpu", "to measure"),
        slices=(SLICES, "which", SLICES),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.init()  # what reads or clears counters of the allocator needs one
    else:
        torch.set_num_threads(1)
        print("no CUDA device: the same code with small models on the processor; its figures are not a GPU's", file=sys.stderr)
    jobs = {
        "sustained": lambda: sustained_jobs(device), "kernels": lambda: kernel_jobs(device, options.rounds),
        "ops": lambda: op_jobs(device, options.out), "steps": lambda: step_jobs(device),
        "strategies": lambda: strategy_jobs(device),
    }  # fmt: skip
    for name in options.slices:
        if not run_slice(options.out / f"{name}.jsonl", jobs[name](), end):
            print(f"time is up in {name}; run it again to go on", file=sys.stderr)
            return 3
    return 0


def run_slice(path: Path, jobs: Iterator[Job], end: float) -> bool:
    """Runs what a file does not hold yet; False where time was up before the end."""
    done = {row["key"] for row in read_rows(path)}
    for key, run in ((key, run) for key, run in jobs if key not in done):
        if time.monotonic() > end:
            return False
        try:
            found = run()
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            if "CUDA error" in found["failed"]:
                raise
        add_row(path, {"key": key, **found})
    return True


if __name__ == "__main__":
    sys.exit(main())
