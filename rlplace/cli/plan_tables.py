"""Plans as text: strategies with their rivals, placements, and the memory of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.cli.models import basis_words
from rlplace.cli.options import print_table
from rlplace.cluster import Cluster
from rlplace.cluster.links import FULL, Device, fullest_share, fullness
from rlplace.cluster.tiers import Tier
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import BatchTried, Prediction, Rival, batches_of, memory_of, quickest_of, rivals_of
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.problem import Problem
from rlplace.text import by_run, bytes_text, gb, ms, names_in_a_row, percent, seconds_text

if TYPE_CHECKING:
    from rlplace.cost.footprint import Footprint


def show_strategy(plan: PlacementPlan, machine: Cluster) -> None:
    """Prints the strategy in one line, its rivals, memory by device, and the basis of the figures."""
    assert plan.strategy is not None
    predicted = plan.predicted
    rivals, batches = rivals_of(predicted), batches_of(predicted)
    fits = bool(rivals) and rivals[0].step_time_s is not None and predicted.step_time_s
    if not fits or len(predicted.peak_memory_bytes) != machine.num_devices:
        raise InputError(
            "plan: it does not say what its step and its rivals take on this cluster; plan again with 'rlplace place'"
        )
    show_step(plan.strategy, predicted)
    quickest = quickest_of(rivals)
    takes_s = quickest.step_time_s or 0.0
    if quickest.words != rivals[0].words and 1.01 * takes_s >= predicted.step_s:  # else its time is an estimate
        takes = f"{ms(takes_s)} ms ({percent(1.0 - takes_s / predicted.step_s)} less)"
        print(f"the simplest within 1 % of the quickest, which takes {takes}: {quickest.words}")
    print()
    print_table(["kind", "step ms", "samples/s", "times", "<its best"], list(_rivals(rivals)))
    if batches:
        print()
        _show_batches(batches)
    print()
    show_devices(predicted, machine)
    if predicted.memory:
        print()
        show_parts(predicted)
    cut = "" if predicted.extra.get("complete", True) else "; cut by its budget: --time-limit or --calls give it more"
    checked = "" if predicted.executor == "blocks" else ", the first ones again op by op"
    print(f"planner {plan.planner}: {predicted.search_calls} strategies simulated block by block{checked}{cut}")
    if basis := basis_words((plan.source or {}).get("op_times") or {}):
        print(f"op times: {basis}")
    for note in (full_note(predicted.peak_memory_bytes, machine.devices), *predicted.extra.get("notes", ())):
        if note:
            print(f"note: {note}")


def show_step(strategy: Strategy, predicted: Prediction) -> None:
    """Prints the strategy in one line, and its step time."""
    print(uniform_words(strategy))
    if not predicted.step_time_s:
        print("infeasible: it does not fit the devices' memory")
        return
    rate = strategy.batch / predicted.step_time_s
    print(f"step time {ms(predicted.step_time_s)} ms, {rate:.2f} samples/s for {strategy.batch} samples a step")


def tier_line(tier: Tier) -> str:
    """Returns a tier of a cluster in words."""
    latency = f", {seconds_text(tier.latency_s)} between two" if tier.latency_s else ""
    groups = f"tier {tier.name}: {tier.count} x {tier.hosts} hosts from host {tier.host} on"
    return f"{groups}, {bytes_text(tier.bytes_per_s)}/s out of each and into it{latency}"


def show_devices(predicted: Prediction, machine: Cluster) -> None:
    """Prints memory by device, and the parts of the step of the busiest device mesh."""
    _print_peaks(machine.devices, predicted.peak_memory_bytes)
    for tier in machine.tiers:
        print(tier_line(tier))
    if predicted.parts:
        parts = sorted(predicted.parts.items(), key=lambda item: -item[1])
        print("\nthe busiest place: " + ", ".join(f"{name.replace('_', ' ')} {ms(s)} ms" for name, s in parts if s > 0))


def _print_peaks(
    devices: Sequence[Device], peaks: Sequence[int], more: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> None:
    """Prints memory by device, of many devices neighbours that are alike in one row; `more` has columns behind the kind."""
    rows = []
    for index, device in enumerate(devices):
        peak, limit, further = peaks[index], device.memory_bytes, (cells[index] for cells in more.values())
        used = f"{100 * peak / limit:.1f} %" if limit else "-"
        rows.append([device.name, device.kind or "-", *further, gb(peak), gb(limit), used])
    print_table(["device", "kind", *more, "peak GB", "memory GB", "used"], by_run(rows))


def _rivals(entries: Sequence[Rival]) -> Iterator[list[str]]:
    """Yields a row for the best of every kind of strategy and the best uniform one: what was chosen first, then by step
    time.
    """
    from rlplace.strategy.drafts import KINDS

    shown: dict[str, Rival] = {}
    for entry in entries:
        if entry.step_time_s is not None or entry.kind in KINDS:
            shown.setdefault(entry.kind, entry)
        if entry.uniform:
            shown.setdefault("best uniform", entry)
    chosen_s = entries[0].step_time_s or 1.0
    ordered = sorted(shown.items(), key=lambda item: (item[1] is not entries[0], item[1].step_time_s or math.inf))
    for kind, entry in ordered:
        figures = ["-", "-", "-"]
        if entry.step_time_s is not None:
            rate, times = entry.samples_per_s or 0.0, entry.step_time_s / chosen_s
            figures = [ms(entry.step_time_s), f"{rate:.2f}", f"{times:.2f}"]
        yield [kind, *figures, entry.remark]


def _show_batches(entries: Sequence[BatchTried]) -> None:
    """Prints step time and time to target of every batch of a batch curve."""
    best_s = min((entry.target_s for entry in entries if entry.target_s is not None), default=1.0)
    rows = []
    for entry in entries:
        figures = ["-", "-", entry.reason or ""]
        if entry.target_s is not None:
            figures = [ms(entry.step_time_s), f"{entry.target_s / best_s:.2f}", entry.words]
        rows.append([str(entry.batch), f"{entry.epochs:.3g}", *figures])
    print_table(["batch", "epochs", "step ms", "time to target", "<its best"], rows)


def show_placement(plan: PlacementPlan, problem: Problem) -> None:
    """Prints memory by device, step time and what is known beside it."""
    predicted = plan.predicted
    peaks = predicted.peak_memory_bytes
    counts = np.bincount(plan.device_of_group, minlength=problem.num_devices)
    _print_peaks(problem.devices, peaks, {"groups": list(map(str, counts))})
    print()
    print(f"planner {plan.planner}, problem {problem.name}, executor {predicted.executor}, simulated")
    print(f"{problem.samples_per_microbatch} samples a step, in one pass")
    print(f"step time {ms(predicted.step_time_s)} ms, {predicted.samples_per_s:.2f} samples/s")
    if predicted.floor_step_time_s:
        print(f"best classical planner {ms(predicted.floor_step_time_s)} ms")
    _show_speedup(plan, problem)
    if predicted.proof:
        print(proof_line(predicted.proof))
    if predicted.held_back_bytes:
        kept = [f"{gb(n)} GB of {d.name}" for n, d in zip(predicted.held_back_bytes, problem.devices, strict=True) if n]
        print(f"held back so that the plan fits op by op, too: {', '.join(kept)}")
    if predicted.op_level is not None:
        print(op_level_line(predicted.op_level, problem))
    if note := full_note(peaks, problem.devices):
        print(f"note: {note}")


def op_level_line(op_level: Prediction, problem: Problem) -> str:
    """Returns the result of the finer simulation, with the devices that it finds too small."""
    line = f"simulated op by op {ms(op_level.step_time_s)} ms, feasible {op_level.feasible}"
    over = [
        f"{device.name} needs {gb(peak)} GB of {gb(device.memory_bytes)}"
        for device, peak in zip(problem.devices, op_level.peak_memory_bytes, strict=True)
        if device.memory_bytes is not None and peak > device.memory_bytes
    ]
    if not over:
        return line
    return f"{line}: {', '.join(over)}; the plan may run out of memory: leave room with a smaller batch or larger devices"


def proof_line(proof: Mapping[str, Any]) -> str:
    """Returns the proof of an exact planner, of its plan or of the coarse program that it solved."""
    bound, gap = proof.get("lower_bound_s"), proof.get("gap")
    of = f" (coarse program of {proof['nodes']} nodes)" if proof.get("program") == "coarse" else ""
    known = "" if bound is None or gap is None else f", lower bound {ms(bound)} ms, gap {100 * gap:.2f} %"
    return f"proof: {proof['status']}{of}{known}"


def _show_speedup(plan: PlacementPlan, problem: Problem) -> None:
    """Prints the speedup over one device, if one has room: several devices often bring no more than memory."""
    from rlplace.placement.common.floor import device_classes
    from rlplace.simulator import simulate

    used = len(np.unique(plan.device_of_group))
    if used == 1 or (problem.group_device >= 0).any():
        return
    alone = [simulate(problem, np.full(problem.num_groups, like[0])).step_time_s for like in device_classes(problem)]
    quickest = min((step for step in alone if step is not None), default=None)
    if quickest is None:
        return
    ratio = quickest / plan.predicted.step_s
    line = f"one device with room for all would take {ms(quickest)} ms: {used} devices are {ratio:.2f} times as fast"
    print(line)


def show_memory(footprints: list[Footprint]) -> None:
    """Prints one row per device; parts that are zero everywhere are left out. The parts add up to the total."""
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
    """Prints what fills the devices under a strategy: a row for those that hold the same, without parts that are zero."""
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
    """Returns a note on a plan that fills devices to the brim; None for one that leaves room."""
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
