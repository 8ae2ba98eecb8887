"""``rlplace measure``: times the ops and steps of a model, or the links between devices, on real hardware."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlplace.cli.common import add_model_options, microbatch, positive, pricing_flags, print_json, print_table, say, seconds
from rlplace.errors import InputError
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cost.measurement import Measurement

HELP = "time ops, steps or links on real devices"
EXAMPLE = "example: rlplace measure hf:gpt2 --ops --step --batch 4 --seq 128 --out gpt2.measure.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="hf:TYPE, zoo:NAME, package.module:function or file.py:function (runs that code)",
    )
    parser.add_argument("--ops", action="store_true", help="time every distinct op of the model inside real training steps")
    parser.add_argument("--step", action="store_true", help="time whole training steps of the model")
    parser.add_argument("--links", action="store_true", help="under torchrun: latency and bandwidth of every pair of devices")
    parser.add_argument("--plans", metavar="P.plan.json", nargs="+", help="under torchrun: time the steps of these plans")
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="M.measure.json; for --links C.toml, for --plans T.timings.json"
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda:N (the GPU of the local rank where there is one)")
    parser.add_argument("--threads", type=positive, metavar="N", help="torch threads on a processor (torch's default)")
    parser.add_argument("--repeats", type=positive, default=25, metavar="N", help="timed steps of each kind or plan (25)")
    parser.add_argument("--time-limit", type=seconds, default=120.0, metavar="S", help="seconds of timing, of each plan (120)")
    plans = parser.add_argument_group("with --plans")
    plans.add_argument("--problem", metavar="X.problem.json", nargs="+", help="problems of the plans (built again from them)")
    plans.add_argument("--cluster", metavar="C", help="the cluster of the plans, where its file has moved")
    plans.add_argument("--warmup", type=positive, default=2, metavar="N", help="steps before timing (2)")
    plans.add_argument("--trace", metavar="T.json", help="a step of the first plan by torch's profiler, for Perfetto")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output

    if options.plans:
        if options.ops or options.step or options.links or options.model:
            raise InputError("measure: --plans takes no model and times nothing else; measure ops and links in other runs")
        from rlplace.cli import measure_plans

        return measure_plans.run(options)
    if options.links:
        if options.ops or options.step or options.model:
            raise InputError("measure: --links takes no model; measure ops and links in two runs")
        from rlplace.cli import measure_links

        return measure_links.run(options)
    check_output(options.out)
    if not options.ops and not options.step:
        raise InputError("measure: say what to time: --ops, --step or --links")
    if options.model is None:
        raise InputError("measure: --ops and --step need a MODEL, for example hf:gpt2")
    if flags := pricing_flags(options):
        if flags[0] == "--host-mode":
            raise InputError("measure: steps are timed in eager mode; leave --host-mode out")
        raise InputError(f"measure: {flags[0]} changes nothing that is timed; leave it out")
    return _measure_model(options)


def _measure_model(options: argparse.Namespace) -> int:
    import torch

    from rlplace.measure.ops import load_and_measure
    from rlplace.runtime.base.environment import own_device

    device = own_device(options.device, "measure")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    say(f"timing {options.model} on {device}")
    measurement = load_and_measure(
        options.model,
        batch=microbatch(options.model, options),
        seq=options.seq,
        dtype=options.dtype,
        optimizer=options.optimizer,
        device=device,
        ops=options.ops,
        step=options.step,
        repeats=options.repeats,
        time_limit_s=options.time_limit,
    )
    measurement.save(options.out)
    interrupted = "interrupted" in measurement.environment.details
    say(f"interrupted; wrote what was timed so far to {options.out}" if interrupted else f"wrote {options.out}")
    if options.json:
        print_json(measurement.to_dict())
    else:
        _show(measurement)
    return 130 if interrupted else 0


def _show(measurement: Measurement) -> None:
    rows = []
    for op in sorted(measurement.ops, key=lambda op: -op.seconds * op.count)[:15]:
        spread = f"{ms(op.p10_s)}..{ms(op.p90_s)}"
        rows.append([op.target, op.direction, str(op.count), ms(op.seconds), spread, ms(op.seconds * op.count)])
    if rows:
        print_table(["op", "direction", "count", "ms", "p10..p90", "ms a step"], rows)
        print(
            f"{len(measurement.ops)} distinct ops, {ms(measurement.ops_s)} ms a step, {ms(measurement.host_s)} ms beside them"
        )
    if measurement.step is not None:
        step = measurement.step
        spread = f"{ms(step.p10_s)}..{ms(step.p90_s)}"
        print(f"step time {ms(step.seconds)} ms ({spread}), {step.undisturbed} of {step.repeats} steps undisturbed")
        if step.busy_s is not None:
            print(f"processor time of a step {ms(step.busy_s)} ms")
        if step.peak_memory_bytes is not None:
            print(f"peak memory {step.peak_memory_bytes / 1e9:.3f} GB")
    control = measurement.control
    print(f"control {control.shape}: {ms(control.first_s)} ms, at the end x {control.drift:.3f}")
