"""Step times of plans on the processes of a job, which stay from plan to plan."""

from __future__ import annotations

import copy
import gc
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlaceTiming, PlanTiming
from rlplace.errors import InputError
from rlplace.model.capture.fake import computed_values
from rlplace.model.zoo import LoadedModel
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.base import activity
from rlplace.runtime.base.environment import PeakMemory, held_tensors, read_clock, time_run
from rlplace.runtime.base.optimizers import make_optimizer
from rlplace.runtime.base.ranks import devices_of, gather_objects, wait_for_all
from rlplace.runtime.base.steps import synthetic_batch, train_step
from rlplace.runtime.job.distribute import check_strategy, distribute, microbatch_of, samples_of_step
from rlplace.runtime.placement.forward_graph import Graphs
from rlplace.simulator import Timeline, simulate

PACES = 9
"""Products whose median is a device's pace."""


@dataclass(eq=False)
class PlanTimer:
    """A timer of plans of one model; every process of the job makes one and calls it with the same plans.

    Attributes:
        loaded: The model with inputs of one micro-batch, the same on every process; its values stay as they are. Batches are
            made up of its inputs.
        device: Where this process computes.
        optimizer: Name.
        warmup: Steps before timing.
        repeats: Timed steps at most.
        limit_s: No more of them than fit into this, but one; a first step that takes as long is the only one before them.
    """

    loaded: LoadedModel
    device: torch.device
    optimizer: str = "adam"
    warmup: int = 2
    repeats: int = 5
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.repeats < 1:
            raise InputError("measure: it needs at least one warm-up step and one repeat")
        self._graphs = Graphs()

    def __call__(
        self, plan: PlacementPlan, problem: Problem | None = None, name: str = "", *, trace: str | Path | None = None
    ) -> PlanTiming:
        """Runs a plan's steps and times them.

        Args:
            plan: A plan for the model.
            problem: Of the placement; needed for predictions.
            name: Of the plan, in the result.
            trace: File of this process for a trace of one more step by torch's profiler; None writes nothing.

        Returns:
            The same on every process.

        Raises:
            InputError: The plan cannot run here.
        """
        check_strategy(plan, "measure")
        begin_s = read_clock(self.device)
        model = copy.deepcopy(self.loaded.module, computed_values(self.loaded.module))
        batch_of = partial(synthetic_batch, self.loaded.example_inputs, seed=0, step=0)
        inputs = batch_of(microbatch_of(plan, 1 if problem is None else problem.samples_per_microbatch))
        placed = distribute(model, plan, inputs, loss=self.loaded.loss, device=self.device, graphs=self._graphs)
        optimizer = make_optimizer(self.optimizer, placed, 1e-3)
        batch = batch_of(samples_of_step(plan, inputs))
        step = partial(train_step, placed, optimizer, batch)
        first_s = _timed(step, self.device)[0]
        setup_s = read_clock(self.device) - begin_s
        for _ in range(self.warmup - 1 if first_s < self.limit_s else 0):
            _timed(step, self.device)
        memory = PeakMemory(self.device, held_tensors(placed, optimizer))
        steps = [_timed(step, self.device)]
        while len(steps) < self.repeats and sum(seconds for seconds, _ in steps) + steps[-1][0] <= self.limit_s:
            steps.append(_timed(step, self.device))  # as many on every process, since all know the slowest one's time
        busy_s = _stage_busy_s(plan, step, self.device)
        timeline = None if problem is None else simulate(problem, plan)
        _, spent_s = sorted(steps, key=lambda timed: timed[0])[(len(steps) - 1) // 2]
        paces = tuple(gather_objects(_pace_s(self.device))[: len(devices_of(plan))])
        peaks = tuple(gather_objects(memory.read_bytes())[: len(devices_of(plan))])
        places = _places(plan, timeline, spent_s, peaks)
        if trace is not None:
            with torch.profiler.profile() as profile:
                _timed(step, self.device)
            profile.export_chrome_trace(str(trace))
        engine = placed.report
        del model, placed, optimizer, step
        gc.collect()  # a plan leaves cycles
        if not gc.get_freeze_count():
            gc.freeze()  # else every collection visits what stays, which took longer than a plan
        return PlanTiming(
            name=name,
            plan=plan.fingerprint,
            problem=plan.problem,
            planner=plan.planner,
            engine=engine,
            step_s=tuple(seconds for seconds, _ in steps),
            predicted_s=plan.predicted.step_time_s if timeline is None else timeline.step_time_s,
            places=places,
            peak_memory_bytes=peaks,
            pace_s=paces,
            stage_busy_s=busy_s,
            setup_s=setup_s,
        )


def _timed(step: Callable[[], Any], device: torch.device) -> tuple[float, dict[str, float]]:
    """Returns the time of a step on the slowest process, and this one's seconds by kind of work."""
    wait_for_all()
    activity.record(device)
    took = torch.tensor(time_run(step, device), dtype=torch.float64, device=device)
    spent_s = activity.recorded()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took), spent_s


def _stage_busy_s(plan: PlacementPlan, step: Callable[[], Any], device: torch.device) -> tuple[float, ...]:
    """Returns seconds of the passes of every stage of a pipeline, on the slowest process of each.

    They are of a step of their own: where work is queued on a device, timing single passes takes time.
    """
    if plan.strategy is None or len(plan.strategy.stages) == 1:
        return ()
    spent_s = gather_objects(_timed(step, device)[1])
    stages = [f"stage {number}" for number in range(len(plan.strategy.stages))]
    return tuple(max(one[stage] for one in spent_s if stage in one) for stage in stages)


def _pace_s(device: torch.device) -> float:
    """Returns the seconds of a matrix product that all devices run at once, to compare their speeds."""
    factor = torch.ones(512, 512, device=device)
    return statistics.median(time_run(lambda: factor @ factor, device) for _ in range(PACES))


def _places(
    plan: PlacementPlan, timeline: Timeline | None, spent_s: Mapping[str, float], peak_bytes: Sequence[int | None]
) -> tuple[PlaceTiming, ...]:
    """Returns the work of every process of a placement in the median step; of a strategy that is not known."""
    if plan.strategy is not None:
        return ()
    rank = dist.get_rank()
    own = PlaceTiming(
        rank=rank,
        host=platform.node(),
        busy_s=spent_s.get("forward", 0.0) + spent_s.get("backward", 0.0),
        wait_s=spent_s.get("wait", 0.0),
        update_s=spent_s.get("update", 0.0),
        peak_memory_bytes=peak_bytes[rank] if rank < len(peak_bytes) else None,
        predicted_busy_s=None if timeline is None else float(timeline.busy_s[rank]),
        predicted_peak_bytes=None if timeline is None else int(timeline.peak_memory_bytes[rank]),
    )
    return tuple(gather_objects(own)[: len(devices_of(plan))])
