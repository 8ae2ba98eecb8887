"""Times plans on the processes of a job; the processes stay from plan to plan."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.cost.timings import PlaceTiming, PlanTiming
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.as_strategy import asks_for_strategy
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution.recorder import Event, Recorder
from rlplace.runtime.distributed.graph.forward_graph import Graphs, Loss
from rlplace.runtime.distributed.job.recipe import synthetic_batch
from rlplace.runtime.distributed.joint.replay import ReplayEngine, sleep_until
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.ranks import gather_objects
from rlplace.runtime.measure import OPTIMIZERS, loss_of
from rlplace.zoo import LoadedModel


@dataclass(frozen=True)
class Timed:
    """A timed plan with what every process did in its median step.

    Attributes:
        timing: The times.
        events: By rank, seconds from the start of that step.
    """

    timing: PlanTiming
    events: tuple[tuple[Event, ...], ...]


@dataclass(eq=False)
class PlanTimer:
    """Times plans of one model; every process of the job makes one and calls it with the same plans.

    Attributes:
        model: The whole model, the same on every process; its values stay as they are.
        inputs: Makes the inputs of so many samples, keyword arguments or a tuple.
        loss: For a model that does not return its loss, else None.
        device: Where this process computes.
        optimizer: Called with the parameters of this process.
        replay: Sleep as long as predicted instead of computing.
        replayed: The problem whose times are slept, where it is not the plan's own: a cluster that differs from what is known.
        warmup: Steps before timing.
        repeats: Timed steps.
    """

    model: nn.Module
    inputs: Callable[[int], Any]
    loss: Loss | None
    device: torch.device
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam
    replay: bool = False
    replayed: Problem | None = None
    warmup: int = 2
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.repeats < 1:
            raise InputError("measure: it needs at least one warm-up step and one repeat")
        self._graphs = Graphs()
        self._settled = False

    def __call__(
        self,
        plan: PlacementPlan,
        problem: Problem | None,
        name: str = "",
        *,
        over: Callable[[Sequence[float]], bool] | None = None,
    ) -> Timed:
        """Runs a plan's steps and times them.

        Args:
            plan: A plan for the model.
            problem: What it was made for; needed for predictions and for replay.
            name: For people.
            over: Called after every timed step with the seconds so far, which are the same on every process; no further step
                is made once it says True. Default: after `repeats` steps.

        Returns:
            The same on every process.

        Raises:
            InputError: The plan cannot run here.
        """
        if plan.strategy is not None or asks_for_strategy(plan):
            raise InputError("measure: the plan runs as a whole strategy; 'rlplace run' trains and times it")
        begin = time.perf_counter()
        samples = 1 if problem is None else problem.samples_per_microbatch
        # Replay changes no value, and copying all of them would take longer than its steps.
        values = {} if self.replay else {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        placed = distribute(
            self.model,
            plan,
            self.inputs(samples),
            loss=self.loss,
            device=self.device,
            replayed=(self.replayed or problem) if self.replay else None,
            graphs=self._graphs,
        )
        batch = self.inputs(samples * plan.microbatches)
        own = [parameter for parameter in placed.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(own) if own and not self.replay else None
        recorder = Recorder(self.device)
        seconds: list[float] = []
        events: list[list[Event]] = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for step in range(self.warmup):
            self._step(placed, batch, optimizer, recorder)
            if step == 0:
                setup = time.perf_counter() - begin
        while not (over(seconds) if over is not None and seconds else len(seconds) >= self.repeats):
            took, what = self._step(placed, batch, optimizer, recorder)
            seconds.append(took)
            events.append(what)
        if values:
            self.model.load_state_dict(values)
        timing = self._collect(plan, problem, name, placed, seconds, events, setup)
        del placed, optimizer
        self._collect_garbage()
        return timing

    def _collect_garbage(self) -> None:
        """Frees what a plan has left in cycles. What stays for good is not looked at again: that took longer than a plan."""
        gc.collect()
        if not self._settled:
            gc.freeze()
            self._settled = True

    def _step(
        self, placed: DistributedModel, batch: Any, optimizer: torch.optim.Optimizer | None, recorder: Recorder
    ) -> tuple[float, list[Event]]:
        """One step, its time on the slowest process and this one's events, in seconds from its start."""
        placed.record(recorder)
        recorder.on = True
        self._synchronize()
        dist.barrier()
        start = time.perf_counter()
        output = placed(**batch) if isinstance(batch, dict) else placed(*batch)
        loss_of(output, None).backward()  # type: ignore[no-untyped-call]
        recorder.mark("update")
        if optimizer is not None:
            optimizer.step()
        elif self.replay:
            sleep_until(time.perf_counter() + sum(e.update_s for e in placed.engines() if isinstance(e, ReplayEngine)))
        recorder.mark(None)
        self._synchronize()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=self.device)
        for parameter in placed.parameters():
            parameter.grad = None
        dist.all_reduce(took, dist.ReduceOp.MAX)
        recorder.on = False
        return float(took), [Event(e.kind, e.start_s - start, e.end_s - start) for e in recorder.take()]

    def _collect(
        self,
        plan: PlacementPlan,
        problem: Problem | None,
        name: str,
        placed: DistributedModel,
        seconds: list[float],
        events: list[list[Event]],
        setup_s: float,
    ) -> Timed:
        median = sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]
        cuda = self.device.type == "cuda"
        own = {
            "host": socket.gethostname(),
            "events": [(e.kind, e.start_s, e.end_s) for e in events[median]],
            "peak": torch.cuda.max_memory_allocated(self.device) if cuda else None,
        }
        everybody = gather_objects(own)
        predicted = None if problem is None else predict(problem, plan)
        places = []
        for rank in sorted(rank for row in placed.ranks.replicas for rank in row):
            intervals = everybody[rank]["events"]
            total = {
                kind: sum(end - start for k, start, end in intervals if k == kind) for kind in ("wait", "reduce", "update")
            }
            places.append(
                PlaceTiming(
                    rank=rank,
                    host=everybody[rank]["host"],
                    busy_s=sum(end - start for k, start, end in intervals if k in ("forward", "backward")),
                    wait_s=total["wait"],
                    reduce_s=total["reduce"],
                    update_s=total["update"],
                    peak_memory_bytes=everybody[rank]["peak"],
                    predicted_busy_s=None if predicted is None else predicted.busy_s[rank],
                    predicted_peak_bytes=None if predicted is None else predicted.peak_memory_bytes[rank],
                )
            )
        timing = PlanTiming(
            name=name,
            plan=plan.fingerprint,
            problem=plan.problem,
            planner=plan.planner,
            engine=str(placed.report),
            mode="replayed" if self.replay else "computed",
            step_s=tuple(seconds),
            predicted_s=None if predicted is None else predicted.step_s,
            places=tuple(places),
            setup_s=setup_s,
        )
        return Timed(timing, tuple(tuple(Event(*event) for event in told["events"]) for told in everybody))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def plan_timer(loaded: LoadedModel, device: torch.device, *, optimizer: str = "adam", **options: Any) -> PlanTimer:
    """A timer of a loaded model, with made-up batches.

    Args:
        loaded: The model with inputs of one micro-batch, the same on every process.
        device: Where this process computes.
        optimizer: Name of the optimizer.
        **options: Further fields of `PlanTimer`.
    """
    make = OPTIMIZERS[optimizer]
    return PlanTimer(
        loaded.module,
        lambda samples: synthetic_batch(loaded.example_inputs, samples, 0, 0),
        loss=loaded.loss,
        device=device,
        optimizer=lambda parameters: make(parameters, lr=1e-3),
        **options,
    )


@dataclass(frozen=True)
class PredictedPlan:
    """What the simulator says of a plan, by device of the cluster."""

    step_s: float | None
    busy_s: Sequence[float]
    peak_memory_bytes: Sequence[int]


def predict(problem: Problem, plan: PlacementPlan) -> PredictedPlan:
    """Simulates a plan."""
    from rlplace.simulator import simulate

    timeline = simulate(problem, plan)
    return PredictedPlan(timeline.step_time_s, timeline.busy_s.tolist(), timeline.peak_memory_bytes.tolist())
