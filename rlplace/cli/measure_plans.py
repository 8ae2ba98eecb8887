"""``rlplace measure --plans``: under torchrun, times plans on the processes of the job."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rlplace.cli.output import print_json, print_table, say
from rlplace.errors import InputError, RlplaceError
from rlplace.text import gb, ms

if TYPE_CHECKING:
    import torch

    from rlplace.cli.measure import MeasureOptions
    from rlplace.cost.timings import PlanTiming, PlanTimings
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem


def run(options: MeasureOptions) -> int:
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
        timings = _measure(options, device)
        if dist.get_rank() == 0:
            if options.json:
                print_json(timings.to_dict())
            else:
                _show(timings)
        return 0
    finally:
        with contextlib.suppress(RuntimeError):
            end_group()


def _measure(options: MeasureOptions, device: torch.device) -> PlanTimings:
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


def _show(timings: PlanTimings) -> None:
    rows = []
    for plan in timings.plans:
        busy = "/".join(f"{100 * place.busy_s / plan.median_s:.0f}" for place in plan.places)
        peak = max((peak or 0 for peak in plan.peak_memory_bytes), default=0)
        error = "-" if plan.error is None else f"{100 * plan.error:+.1f} %"
        rows.append(
            [
                plan.name,
                plan.engine,
                ms(plan.median_s),
                f"{100 * plan.spread:.1f} %",
                ms(plan.predicted_s),
                error,
                busy,
                gb(peak or None),
            ]
        )
    print_table(["plan", "engine", "ms", "spread", "predicted ms", "error", "busy %", "peak GB"], rows)
    compared = [(plan.predicted_s, plan.median_s) for plan in timings.plans if plan.predicted_s is not None]
    if len(compared) > 2:
        from rlplace.cost.timings import rank_correlation

        with contextlib.suppress(RlplaceError):
            value = rank_correlation([p for p, _ in compared], [m for _, m in compared])
            errors = [abs(plan.error) for plan in timings.plans if plan.error is not None]
            print(f"rank correlation {value:.3f}, mean error {100 * sum(errors) / len(errors):.1f} %")
