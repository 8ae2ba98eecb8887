"""What a job trains: the part of a model that this process runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.as_strategy import asks_for_strategy, strategy_of_plan
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.job.recipe import check_graph, cluster_of_plan, problem_of_plan, recipe_of
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.ranks import broadcast_object
from rlplace.runtime.distributed.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.host_memory import held_tensors
from rlplace.runtime.measure import loss_of

if TYPE_CHECKING:
    from rlplace.runtime.distributed.job.job import JobOptions

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class Part:
    """This process's part of a model in training.

    Attributes:
        model: The distributed model.
        engine: What runs the plan.
        device_number: The plan's device that this process is; None: it has nothing to do.
        inputs: Example inputs, from which batches are made.
        loss: Of a model that does not return it.
        samples: Of a step.
        microbatches: In so many the reference cuts a batch.
        same_streams: Random ops draw what they draw in the reference.
    """

    def __init__(
        self, plan: PlacementPlan, device: torch.device, options: JobOptions, make: MakeOptimizer, autocast: Autocast
    ) -> None:
        recipe = recipe_of(plan)
        problem = _problem(plan, options.cluster) if plan.strategy is None else None
        if plan.strategy is not None:
            if dist.get_rank() == 0:
                cluster_of_plan(plan, options.cluster)
                check_graph(plan)
            broadcast_object(None)  # the others wait for the check
        size = None if plan.strategy is None else plan.strategy.pipelines[0].microbatch[0]
        loaded = recipe.build("cpu", options.seed, batch=size)
        if problem is not None and asks_for_strategy(plan):
            plan = replace(plan, strategy=strategy_of_plan(plan, loaded.module, problem.samples_per_microbatch))
        strategy = plan.strategy
        self.inputs, self.loss = loaded.example_inputs, loaded.loss
        self.model: DistributedModel = distribute(
            loaded.module, plan, self.inputs, loss=self.loss, device=device, seed=options.seed
        )
        self.optimizer = make(self.model.parameter_groups())  # frozen ones, too: they get no gradient and no update
        self.engine, self.device_number = self.model.report, self.model.ranks.plan_device
        self.same_streams = strategy is None
        if strategy is None:
            assert problem is not None
            self.microbatches = plan.microbatches
            self.samples = problem.samples_per_microbatch * plan.microbatches
        else:
            pipeline = strategy.pipelines[0]
            several = len(pipeline.microbatches) > 1
            self.device_number, self.samples = sorted(strategy.devices)[dist.get_rank()], strategy.batch
            self.microbatches = sum(pipeline.microbatches) * (1 if several else pipeline.data_degree)
        self._plan, self._clip, self._autocast, self._device = plan, options.clip, autocast, device

    def step(self, batch: Any) -> float:
        """One training step; leaves the gradients in place and returns the loss."""
        return _step(self.model, self.optimizer, batch, self._clip, self._autocast())

    def held(self) -> list[torch.Tensor]:
        """What stays from step to step."""
        return held_tensors(self.model, self.optimizer)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """By name."""
        return {name: parameter.detach().to(self._device) for name, parameter in self.model.trained()}

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """By name; every process calls it."""
        return {name: None if p.grad is None else p.grad.to(self._device) for name, p in self.model.trained()}

    def save(self, folder: str, step: int) -> None:
        """Writes a checkpoint."""
        save_checkpoint(folder, self.model, self.optimizer, step=step, extra={"problem": self._plan.problem})

    def load(self, folder: str) -> int:
        """Reads the latest checkpoint; returns its step."""
        return load_checkpoint(folder, self.model, self.optimizer).step


def _problem(plan: PlacementPlan, cluster: str | None) -> Problem:
    """The plan's problem, built again by rank 0 and checked."""
    problem: Problem = broadcast_object(problem_of_plan(plan, cluster) if dist.get_rank() == 0 else None)
    return problem


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip: float | None,
    autocast: contextlib.AbstractContextManager[Any],
) -> float:
    optimizer.zero_grad(set_to_none=True)
    with autocast:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
    value = loss_of(output, None)
    value.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        model.clip_grad_norm_(clip)  # type: ignore[operator]
    optimizer.step()
    return float(value.detach())
