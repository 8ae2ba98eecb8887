"""``rlplace place --space``: the whole strategy of a step, and what its rivals would take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.cli.common import capture_model, check_costs, print_table, say
from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.text import gb, ms

PER_DEVICE = 8
"""Samples a step for each device where --global-batch does not say."""

PLACEMENT = "placement"
"""The space that is the other question: groups of one micro-batch on devices."""


def place_strategy(options: argparse.Namespace) -> PlacementPlan:
    """Plans the whole strategy that the options ask for.

    Raises:
        InputError: They contradict each other.
    """
    from rlplace.cluster.parse import parse
    from rlplace.placing import strategy_of

    if options.model.endswith(".problem.json"):
        raise InputError(f"{options.model} is placed group by group; leave --space out, or name the model instead")
    if options.planner not in ("agent", "strategy"):
        raise InputError(f"--planner {options.planner} places groups; leave it out, or leave --space out")
    flags = ("microbatches", "schedule", "batch_curve", "memory", "weight_gradients")
    given = [flag for flag in flags if getattr(options, flag) not in (None, False, 1)]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} belongs to --space placement; restrict the space instead, or leave it out"
        )
    machine = parse(options.cluster or "host")
    if options.costs:
        check_costs(options.costs, [kind.name for kind in machine.kinds])
    batch = options.global_batch
    if batch is None:
        batch = PER_DEVICE * machine.num_devices
        say(f"--global-batch: {batch} samples a step, {PER_DEVICE} a device")
    captured = capture_model(options.model, options)
    say(f"captured {captured.graph.num_ops} ops by {captured.graph.capture['method']}; choosing the strategy")
    limits = {
        "calls": options.calls,
        "time_limit_s": options.time_limit,
        "seed": options.seed,
        "costs": options.costs,
        "host": options.host_mode,
    }
    space = None if options.space == "auto" else options.space
    model = captured.load()
    return strategy_of(captured.graph, captured.capture_at, machine, batch, space, limits, model.module, model.example_inputs)


def show_step(strategy: Strategy, predicted: Prediction) -> None:
    """The strategy in one line, and what its step takes."""
    print(uniform_words(strategy))
    if predicted.step_time_s is None:
        print("infeasible: it does not fit the devices' memory")
        return
    print(
        f"step time {ms(predicted.step_time_s)} ms, {predicted.samples_per_s:.2f} samples/s for {strategy.batch} samples "
        "a step, simulated block by block"
    )


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
    if predicted.step_time_s is None or len(predicted.peak_memory_bytes) != machine.num_devices or not predicted.strategies:
        raise InputError(
            "plan: it does not say what its step and its rivals take on this cluster; plan again with 'rlplace place'"
        )
    show_step(plan.strategy, predicted)
    print()
    _show_rivals(predicted.strategies)
    print()
    show_devices(predicted, machine)
    cut = (
        ""
        if predicted.extra.get("complete", True)
        else "; the search was cut by its budget: --time-limit or --calls give it more"
    )
    print(f"{predicted.search_calls} strategies evaluated{cut}")


def _show_rivals(entries: Sequence[Mapping[str, Any]]) -> None:
    """The best of every kind of strategy, the quickest first."""
    chosen = entries[0]
    rows, seen = [], set()
    for entry in entries:
        if entry["kind"] in seen:
            continue
        seen.add(entry["kind"])
        step_s, missing = entry["step_time_s"], f"{gb(entry['over_bytes'])} GB too large"
        figures = ["-", "-", missing]
        if step_s is not None:
            figures = [ms(step_s), f"{entry['samples_per_s']:.2f}", f"{step_s / chosen['step_time_s']:.2f}"]
        rows.append([entry["kind"], *figures, entry["words"]])
    print_table(["kind", "step ms", "samples/s", "times", "its best"], rows)
