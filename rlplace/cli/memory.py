"""``rlplace place --memory``: does it fit, as a table per device."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import given, print_table, say
from rlplace.cluster.links import FULL, Device, fullest_share, fullness
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction, memory_of
from rlplace.text import gb, names_in_a_row, percent

if TYPE_CHECKING:
    from rlplace.cost.footprint import Footprint
    from rlplace.placement.ask import Placed

KERNELS = ("foreach", "fused", "single")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """``--memory`` and what it depends on."""
    parser.add_argument("--memory", action="store_true", help="show what fills the memory of the devices, kind by kind")
    parser.add_argument(
        "--alloc-conf",
        default="",
        metavar="TEXT",
        help="with --memory, for placements: PYTORCH_CUDA_ALLOC_CONF, as in expandable_segments:True",
    )
    parser.add_argument("--optimizer-kernel", choices=KERNELS, help="likewise: how the optimizer updates (foreach)")


def check_memory_options(options: argparse.Namespace, placements: bool) -> None:
    """Refuses what cannot be read, or has no effect, before the model is captured; `placements`: these are asked for."""
    from rlplace.cost.allocator import AllocatorOptions

    AllocatorOptions.parse(options.alloc_conf)
    for name in given(options, {"alloc_conf": "", "optimizer_kernel": None}):
        if not options.memory:
            raise InputError(f"{name} describes the memory table; add --memory, or leave it out")
        if not placements:
            raise InputError(f"{name} is about torch's allocator, which is replayed for placements; add --space placement")


def with_memory(placed: Placed, options: argparse.Namespace) -> tuple[PlacementPlan, list[Footprint]]:
    """Returns the plan with ``predicted.memory``, and what that entry holds.

    Op by op where the graph is known, else task by task.
    """
    from rlplace.cost.allocator import AllocatorOptions
    from rlplace.cost.footprint import MemoryOptions, footprint

    settings = MemoryOptions(
        allocator=AllocatorOptions.parse(options.alloc_conf), optimizer_kernel=options.optimizer_kernel or "foreach"
    )
    plan, problem = placed.plan, placed.problem
    whole = plan
    if placed.op_problem is not None:
        problem = placed.op_problem
        # Priority and order number tasks, not ops.
        whole = dataclasses.replace(plan, problem=problem.fingerprint, priority=None, order=None)
    footprints = footprint(problem, whole, graph=placed.graph, options=settings)
    entry: list[dict[str, Any]] = [item.to_dict() for item in footprints]
    return plan.with_predicted(plan.predicted.replace(memory=tuple(entry))), footprints


def show_memory(footprints: list[Footprint]) -> None:
    """One row per device; parts that are zero everywhere are left out. The parts add up to the total."""
    from rlplace.cost.footprint import PARTS

    if not footprints:
        return
    print()
    shown = [part for part in PARTS if any(item.parts[part] for item in footprints)]
    rows = []
    for item in footprints:
        cells = [gb(item.parts[part]) for part in shown]
        fits = ("yes" if not item.retries else "barely") if item.fits else "no"
        rows.append([item.device, *cells, gb(item.total_bytes), gb(item.capacity_bytes), fits])
    print_table(["GB", *shown, "total", "memory", "fits"], rows)
    print("at each device's worst moment in two replayed steps; slack is what the allocator holds beyond what was asked of it")
    if any(item.retries and item.fits for item in footprints):
        print("barely: only after giving back cached segments")
    print()


def show_parts(predicted: Prediction) -> None:
    """What fills the devices under a strategy: a row for those that hold the same, parts that are zero everywhere left out."""
    rows = memory_of(predicted)
    shown = [name for name in rows[0].parts if any(row.parts[name] for row in rows)]
    cells = [
        [names_in_a_row(row.devices), *(gb(row.parts[name]) for name in shown), gb(row.total_bytes), gb(row.capacity_bytes)]
        for row in rows
    ]
    print_table(["GB", *shown, "total", "memory"], cells)
    print("at each device's worst moment of the step" + ("" if all(row.op_by_op for row in rows) else _COARSE))
    hosts = [f"{gb(size)} GB on host {host}" for host, size in enumerate(predicted.host_bytes) if size]
    if hosts:
        print(f"in host memory: {', '.join(hosts)}")


def full_note(peak_bytes: Sequence[int], devices: Sequence[Device]) -> str | None:
    """What to know of a plan that fills devices to the brim; None for one that leaves room."""
    pairs = [(device, peak) for device, peak in zip(devices, peak_bytes, strict=True) if device.memory_bytes]
    full = [device.name for device, peak in pairs if device.memory_bytes and fullness(peak / device.memory_bytes) == "full"]
    if not full:
        return None
    share = percent(fullest_share(peak_bytes, devices))
    return (
        f"{names_in_a_row(full)}: up to {share} of the memory; from {100 * FULL:.0f} % on, what torch's allocator adds may not "
        "fit: a smaller --batch, more devices, or --space recompute=full leave room"
    )


_COARSE = "; too many ops to simulate each, so activations are all that passes hold"


def warn_of_update(placed: Placed, options: argparse.Namespace) -> None:
    """Says so when the plan fits but torch's default optimizer update on an accelerator would not."""
    from rlplace.cost.contract import foreach_update_bytes

    if placed.graph is None:
        return
    needed = foreach_update_bytes(
        placed.problem, placed.plan, str(placed.graph.capture["optimizer"]), master_weights=bool(options.master_weights)
    )
    for device, size in zip(placed.problem.devices, needed.tolist(), strict=True):
        if device.memory_bytes is not None and size > device.memory_bytes and device.kind != "cpu":
            say(
                f"note: on {device.name} the optimizer's foreach update needs {gb(size)} of "
                f"{gb(device.memory_bytes)} GB; make the optimizer with fused=True or foreach=False, or place with "
                "--memory to see it all"
            )
