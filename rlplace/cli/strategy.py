"""``rlplace place``: the whole strategy of a step, and what its rivals would take."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import (
    asked_batch,
    basis_words,
    capture_sizes,
    compile_first,
    costs_of,
    note_machine,
    print_table,
    say,
)
from rlplace.cli.memory import full_note, show_parts
from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import BatchTried, Prediction, Rival, batches_of, quickest_of, rivals_of
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.text import gb, ms, percent

if TYPE_CHECKING:
    from rlplace.api import Answer, Captured
    from rlplace.strategy.search.tries import SearchProblem


def machine_of(options: argparse.Namespace) -> Cluster:
    """Returns the cluster of the options; this machine where they name none."""
    from rlplace.cluster.parse import parse

    return parse(options.cluster or "host")


def place_strategy(options: argparse.Namespace) -> Answer:
    """Plans the whole strategy that the options ask for; the answer may be a quicker placement.

    Raises:
        InputError: They contradict each other.
    """
    from rlplace.api import FIXED, PER_DEVICE, allowed_space, answer, default_batch
    from rlplace.strategy.search.efficiency import BatchCurve

    fixed = {name: getattr(options, name) for name in FIXED}
    allowed_space(options.space, fixed, options.planner)  # contradictions are refused before the capture
    machine = machine_of(options)
    costs = costs_of(options, machine)
    note_machine(options.cluster, machine)
    curve = BatchCurve.load(options.batch_curve) if options.batch_curve else None
    batch, samples = asked_batch(options.model, options)
    if batch is None and curve is None:
        batch = default_batch(machine)
        say(f"no --batch: {batch} samples a step, {PER_DEVICE} a device")
    compile_first("strategy")
    captured = capture_sizes(options.model, options, samples)
    began_s = time.monotonic()
    say(f"captured {captured.graph.num_ops} ops by {captured.graph.capture['method']}; choosing the strategy")
    with _progress_line() as progress:
        return answer(
            captured, machine, space=options.space, fixed=fixed, planner=options.planner, batch=batch, curve=curve,
            calls=options.calls, began_s=began_s, groups=options.granularity, time_limit_s=options.time_limit,
            seed=options.seed, costs=costs, host=options.host_mode, progress=progress, couple=options.couple,
            buffers=options.buffers, memory=options.memory,
        )  # fmt: skip


def question_of(captured: Captured, machine: Cluster, batch: int, *, costs: Any, host: str, **asked: Any) -> SearchProblem:
    """What the planner is asked for a captured model; `asked` is as for `rlplace.api.what_may_be`."""
    from rlplace.api import what_may_be
    from rlplace.strategy.search.plan import ask

    return ask(cluster=machine, batch=batch, costs=costs, host=host, **what_may_be(captured, **asked))


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[int, float], None] | None]:
    """What writes over one line of a terminal how far a search is, and clears it in the end; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def write(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def tell(calls: int, best_s: float) -> None:
        write(f"{calls} strategies simulated" + (f", the best takes {ms(best_s)} ms" if math.isfinite(best_s) else ""))

    try:
        yield tell
    finally:
        write("")


def show_step(strategy: Strategy, predicted: Prediction) -> None:
    """The strategy in one line, and what its step takes."""
    print(uniform_words(strategy))
    if not predicted.step_time_s:
        print("infeasible: it does not fit the devices' memory")
        return
    rate = strategy.batch / predicted.step_time_s
    print(f"step time {ms(predicted.step_time_s)} ms, {rate:.2f} samples/s for {strategy.batch} samples a step")


def show_devices(predicted: Prediction, machine: Cluster) -> None:
    """Memory by device, and where the step of the busiest place goes."""
    rows = []
    for device, peak in zip(machine.devices, predicted.peak_memory_bytes, strict=True):
        limit = device.memory_bytes
        rows.append([device.name, device.kind or "-", gb(peak), gb(limit), f"{100 * peak / limit:.1f} %" if limit else "-"])
    print_table(["device", "kind", "peak GB", "memory GB", "used"], rows)
    if predicted.parts:
        parts = sorted(predicted.parts.items(), key=lambda item: -item[1])
        print("\nthe busiest place: " + ", ".join(f"{name.replace('_', ' ')} {ms(s)} ms" for name, s in parts if s > 0))


def show_strategy(plan: PlacementPlan, machine: Cluster) -> None:
    """The strategy in one line, what it beats and by how much, memory by device, and what the figures rest on."""
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
    if quickest is not rivals[0] and quickest.step_time_s is not None:
        takes = f"{ms(quickest.step_time_s)} ms ({percent(1.0 - quickest.step_time_s / predicted.step_s)} less)"
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
    """What every batch of a batch curve takes."""
    best_s = min((entry.target_s for entry in entries if entry.target_s is not None), default=1.0)
    rows = []
    for entry in entries:
        figures = ["-", "-", entry.reason or ""]
        if entry.target_s is not None:
            figures = [ms(entry.step_time_s), f"{entry.target_s / best_s:.2f}", entry.words]
        rows.append([str(entry.batch), f"{entry.epochs:.3g}", *figures])
    print_table(["batch", "epochs", "step ms", "time to target", "<its best"], rows)
