"""``rlplace measure``: times the ops and steps of a model, plans, or the links between devices, on real hardware."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rlplace.cli.models import microbatch, recipe_of
from rlplace.cli.options import (
    MODEL,
    PRICES,
    ModelOptions,
    argument,
    flag,
    option,
    positive,
    print_json,
    print_records,
    print_table,
    say,
    seconds,
)
from rlplace.errors import InputError, RlplaceError
from rlplace.text import gb, ms, percent

if TYPE_CHECKING:
    import torch

    from rlplace.cluster.machines import LinkTimes
    from rlplace.cost.timings import Measurement, PlanTiming, PlanTimings
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ModelOptions):
    """Options of the verb."""

    HELP = "time ops, steps or links on real devices; count the tokens of experts"
    EXAMPLE = "example: rlplace measure hf:gpt2 --ops --step --batch 4 --seq 128 --out gpt2.measure.json"

    model: str | None = argument("MODEL", MODEL, "?")
    ops: bool = flag("time every distinct op of the model inside real training steps")
    step: bool = flag("time whole training steps of the model")
    experts: bool = flag("count the tokens that a mixture's routers send to each expert on the model's inputs")
    links: bool = flag("under torchrun: latency and bandwidth of every pair of devices")
    plans: list[str] | None = option("under torchrun: time the steps of these plans", None, "P.plan.json", nargs="+")
    out: str = option(
        "M.measure.json; for --experts X.cost.json, for --links C.toml, for --plans T.timings.json", None, "FILE", required=True
    )
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
            if self.ops or self.step or self.experts or self.links or self.model:
                raise InputError("measure: --plans takes no model and times nothing else; measure ops and links in other runs")
        elif self.links:
            if self.ops or self.step or self.experts or self.model:
                raise InputError("measure: --links takes no model; measure ops and links in two runs")
        else:
            check_output(self.out)
            if self.experts and (self.ops or self.step):
                raise InputError("measure: --experts counts tokens and times nothing; measure ops and steps in another run")
            if not self.ops and not self.step and not self.experts:
                raise InputError("measure: say what to measure: --ops, --step, --experts or --links")
            if self.model is None:
                raise InputError("measure: --ops, --step and --experts need a MODEL, for example hf:gpt2")
            if flags := self.given(PRICES):
                if flags[0] == "--host-mode":
                    raise InputError("measure: steps are timed in eager mode; leave --host-mode out")
                raise InputError(f"measure: {flags[0]} changes nothing that is timed; leave it out")

    def run(self) -> int:
        """Runs the verb."""
        if self.plans:
            return _measure_plans(self)
        if self.links:
            return _measure_links(self)
        assert self.model is not None
        return _count_tokens(self.model, self) if self.experts else _measure_model(self.model, self)


def _count_tokens(model: str, options: MeasureOptions) -> int:
    from rlplace.cost.table import CostTable
    from rlplace.measure.experts import count_tokens, imbalance
    from rlplace.runtime.base.environment import own_device

    samples, device = microbatch(model, options), own_device(options.device, "measure")
    counts = count_tokens(recipe_of(model, options, samples).load("cpu"), device)
    found = imbalance(counts.values())
    source = f"tokens of {samples} samples of {model} by {len(counts)} mixtures"
    CostTable({}, name="imbalance", source=source, imbalance=found).save(options.out)
    say(f"wrote {options.out}")
    if options.json:
        print_json({"imbalance": found, "tokens": {path: count.tolist() for path, count in counts.items()}})
        return 0
    print_table(["expert degree", "busiest / mean"], [[str(degree), f"{factor:.3f}"] for degree, factor in found])
    print(f"{source}; plan with --costs {options.out}")
    return 0


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


def _measure_links(options: MeasureOptions) -> int:
    """Runs the verb on this rank."""
    from rlplace.files import check_output
    from rlplace.measure.links import measure_links

    if os.environ.get("RANK", "0") == "0":  # other hosts may not have the folder
        check_output(options.out)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # closing sockets is no news
    times = measure_links(repeats=options.repeats, time_limit_s=options.time_limit, progress=say)
    if times is None:
        return 0
    from rlplace.cluster.machines import cluster_from

    cluster = cluster_from(times)
    cluster.save(options.out)
    say(f"wrote {options.out}; use it with: rlplace place MODEL --cluster {options.out}")
    facts = _link_facts(times, [device.name for device in cluster.devices])
    if options.json:
        print_json(facts)
    else:
        _show_links(facts)
    return 0


def _link_facts(times: LinkTimes, names: list[str]) -> dict[str, Any]:
    """Returns the measurements, and the fits, as plain data."""
    from rlplace.cluster.machines import TIMED_COLLECTIVES, fit_pairs

    latency, bandwidth, error = fit_pairs(times)
    fits = {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth, "fit_error": error, "seconds": times.pair_s}
    pairs = [
        {"from": here, "to": there, **{name: fit[i, j].tolist() for name, fit in fits.items()}}
        for (i, here), (j, there) in itertools.permutations(enumerate(names), 2)
    ]
    members = [[names[rank] for rank in ranks] for ranks in times.groups]
    groups: dict[str, Any] = {
        kind: [{"devices": among, "seconds": took} for among, took in zip(members, by_group.tolist(), strict=True)]
        for kind, by_group in zip(TIMED_COLLECTIVES, times.group_s, strict=True)
    }
    devices = zip(names, times.hosts, times.drivers, strict=True)
    return {
        "backend": times.backend,
        "devices": [dict(zip(("name", "host", "driver"), facts, strict=True)) for facts in devices],
        "pair_bytes": list(times.pair_bytes),
        "pairs": pairs,
        "collective_bytes": list(times.group_bytes),
        **groups,
    }


def _show_links(facts: dict[str, Any]) -> None:
    from rlplace.cluster.machines import TIMED_COLLECTIVES

    cells: dict[str, Callable[[Any], str]] = {
        "pair": lambda pair: f"{pair['from']} -> {pair['to']}",
        "latency us": lambda pair: f"{pair['latency_s'] * 1e6:.1f}",
        "GB/s": lambda pair: f"{pair['bandwidth_bytes_per_s'] / 1e9:.2f}",
        "fit error %": lambda pair: f"{pair['fit_error'] * 100:.0f}",
    }
    print_records(facts["pairs"], cells)
    print()
    rows = []
    for name, group in ((kind, group) for kind in TIMED_COLLECTIVES for group in facts[kind]):
        first, more = ", ".join(group["devices"][:4]), ", ..." if len(group["devices"]) > 4 else ""
        rows.append([name.replace("_", "-"), f"{len(group['devices'])}: {first}{more}", *map(ms, group["seconds"])])
    sizes = [f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" for size in facts["collective_bytes"]]
    print_table(["collective, ms", "devices", *sizes], rows)


def _measure_plans(options: MeasureOptions) -> int:
    """Times every plan on this rank's process; the processes stay from plan to plan."""
    import torch.distributed as dist

    from rlplace.files import check_output
    from rlplace.runtime.base.ranks import end_group
    from rlplace.runtime.job import job

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    check_output(options.out)
    if options.trace:
        check_output(options.trace)
    device = job.start_job(job.JobOptions(device=options.device and options.device.partition(":")[0]))
    try:
        timings = _timings(options, device)
        if dist.get_rank() == 0:
            if options.json:
                print_json(timings.to_dict())
            else:
                _show_timings(timings)
        return 0
    finally:
        with contextlib.suppress(RuntimeError):
            end_group()


def _timings(options: MeasureOptions, device: torch.device) -> PlanTimings:
    import torch
    import torch.distributed as dist

    from rlplace.cost.timings import PlanTimings
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.runtime.base.ranks import devices_of
    from rlplace.runtime.job.measure import PlanTimer

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plans = [(path, PlacementPlan.load(path)) for path in options.plans or ()]
    recipe = Planned(plans[0][1]).recipe
    for path, plan in plans:
        if replace(Planned(plan).recipe, batch=recipe.batch) != recipe:
            raise InputError(f"measure: {path} is for another model than {plans[0][0]}; time them in two jobs")
        needed, processes = len(devices_of(plan)), dist.get_world_size()
        if plan.strategy is not None and needed != processes:
            raise InputError(f"measure: {path} needs {needed} processes, the job has {processes}")
    problems = _problems(options, [plan for _, plan in plans])
    limits: dict[str, Any] = {"warmup": options.warmup, "repeats": options.repeats, "limit_s": options.time_limit}
    timer = PlanTimer(recipe.build("cpu", 0), device, optimizer=recipe.optimizer, **limits)
    done: list[PlanTiming] = []
    environment = _environment(device)
    for path, plan in plans:
        name = Path(path).name.removesuffix(".plan.json")
        try:
            timing = timer(plan, problems.get(plan.problem), name, trace=_trace(options, dist.get_rank(), path))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        done.append(timing)
        if dist.get_rank() == 0:
            PlanTimings(recipe.model, environment, tuple(done)).save(options.out)  # kept if a later plan fails
            say(f"{name}: {ms(timing.median_s)} ms, predicted {ms(timing.predicted_s)} ms")
    return PlanTimings(recipe.model, environment, tuple(done))


def _trace(options: MeasureOptions, rank: int, path: str) -> str | None:
    """Returns the path of this process's trace of a plan: of the first plan only, one file a process."""
    if not options.trace or not options.plans or path != options.plans[0]:
        return None
    return str(options.trace) if rank == 0 else str(Path(options.trace).with_suffix(f".rank{rank}.json"))


def _problems(options: MeasureOptions, plans: list[PlacementPlan]) -> dict[str, Problem]:
    """Returns the problem of every placement, by fingerprint; rank 0 reads or builds them, and checks what strategies
    are for.
    """
    import torch.distributed as dist

    from rlplace.planned import Planned
    from rlplace.problem import Problem
    from rlplace.runtime.base.ranks import broadcast_object

    by_fingerprint: dict[str, Problem] = {}
    if dist.get_rank() == 0:
        loaded = [Problem.load(path) for path in options.problem or ()]
        by_fingerprint = {problem.fingerprint: problem for problem in loaded}
        for plan in plans:
            if plan.strategy is not None:
                Planned(plan, options.cluster).check()
            elif plan.problem not in by_fingerprint:
                by_fingerprint[plan.problem] = Planned(plan, options.cluster).problem
    heard: dict[str, Problem] = broadcast_object(by_fingerprint)
    return heard


def _environment(device: torch.device) -> dict[str, str | float | int]:
    import torch
    import torch.distributed as dist

    return {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "processor",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size(),
        "backend": str(dist.get_backend()),
    }


def _show_timings(timings: PlanTimings) -> None:
    cells: dict[str, Callable[[PlanTiming], str]] = {
        "plan": lambda plan: plan.name,
        "engine": lambda plan: plan.engine,
        "ms": lambda plan: ms(plan.median_s),
        "spread": lambda plan: percent(plan.spread),
        "predicted ms": lambda plan: ms(plan.predicted_s),
        "error": lambda plan: percent(plan.error, sign=True),
        "busy %": lambda plan: "/".join(f"{100 * place.busy_s / plan.median_s:.0f}" for place in plan.places),
        "peak GB": lambda plan: gb(max((peak or 0 for peak in plan.peak_memory_bytes), default=0) or None),
    }
    print_records(timings.plans, cells)
    compared = [(plan.predicted_s, plan.median_s) for plan in timings.plans if plan.predicted_s is not None]
    if len(compared) > 2:
        from rlplace.cost.timings import rank_correlation

        with contextlib.suppress(RlplaceError):
            value = rank_correlation([p for p, _ in compared], [m for _, m in compared])
            errors = [abs(plan.error) for plan in timings.plans if plan.error is not None]
            print(f"rank correlation {value:.3f}, mean error {100 * sum(errors) / len(errors):.1f} %")
