"""``rlplace measure``: times the ops and steps of a model, or the links between devices, on real hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.models import microbatch, recipe_of
from rlplace.cli.options import MODEL, PRICES, ModelOptions, argument, flag, option, positive, seconds
from rlplace.cli.output import print_json, print_table, say
from rlplace.errors import InputError
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cost.timings import Measurement

HELP = "time ops, steps or links on real devices"
EXAMPLE = "example: rlplace measure hf:gpt2 --ops --step --batch 4 --seq 128 --out gpt2.measure.json"


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ModelOptions):
    """Options of the verb."""

    model: str | None = argument("MODEL", MODEL, "?")
    ops: bool = flag("time every distinct op of the model inside real training steps")
    step: bool = flag("time whole training steps of the model")
    links: bool = flag("under torchrun: latency and bandwidth of every pair of devices")
    plans: list[str] | None = option("under torchrun: time the steps of these plans", None, "P.plan.json", nargs="+")
    out: str = option("M.measure.json; for --links C.toml, for --plans T.timings.json", None, "FILE", required=True)
    device: str | None = option("cpu or cuda:N (the GPU of the local rank where there is one)", None, "D")
    threads: int | None = option("torch threads on a processor (torch's default)", positive, "N")
    repeats: int = option("timed steps of each kind or plan (25)", positive, "N", default=25)
    time_limit: float = option("seconds of timing, of each plan (120)", seconds, "S", default=120.0)
    problem: list[str] | None = option(
        "problems of the plans (built again from them)", None, "X.problem.json", nargs="+", group="with --plans"
    )
    cluster: str | None = option("the cluster of the plans, where its file has moved", None, "C", group="with --plans")
    warmup: int = option("steps before timing (2)", positive, "N", default=2, group="with --plans")
    trace: str | None = option(
        "a step of the first plan by torch's profiler, for Perfetto", None, "T.json", group="with --plans"
    )

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.files import check_output

        if self.plans:
            if self.ops or self.step or self.links or self.model:
                raise InputError("measure: --plans takes no model and times nothing else; measure ops and links in other runs")
        elif self.links:
            if self.ops or self.step or self.model:
                raise InputError("measure: --links takes no model; measure ops and links in two runs")
        else:
            check_output(self.out)
            if not self.ops and not self.step:
                raise InputError("measure: say what to time: --ops, --step or --links")
            if self.model is None:
                raise InputError("measure: --ops and --step need a MODEL, for example hf:gpt2")
            if flags := self.given(PRICES):
                if flags[0] == "--host-mode":
                    raise InputError("measure: steps are timed in eager mode; leave --host-mode out")
                raise InputError(f"measure: {flags[0]} changes nothing that is timed; leave it out")


def run(options: MeasureOptions) -> int:
    """Runs the verb."""
    if options.plans:
        from rlplace.cli import measure_plans

        return measure_plans.run(options)
    if options.links:
        from rlplace.cli import measure_links

        return measure_links.run(options)
    assert options.model is not None
    return _measure_model(options.model, options)


def _measure_model(model: str, options: MeasureOptions) -> int:
    import torch

    from rlplace.measure.ops import load_and_measure
    from rlplace.runtime.base.environment import own_device

    device = own_device(options.device, "measure")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    say(f"timing {model} on {device}")
    measurement = load_and_measure(
        recipe_of(model, options, microbatch(model, options)),
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
