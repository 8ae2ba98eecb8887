"""What a job trains: the part of a model that this process runs, here under a placement plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.graph.forward_graph import Loss
from rlplace.runtime.distributed.job.recipe import problem_of_plan, recipe_of
from rlplace.runtime.distributed.job.verify import whole_gradients
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.ranks import broadcast_text
from rlplace.runtime.distributed.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.host_memory import held_tensors
from rlplace.runtime.measure import loss_of

if TYPE_CHECKING:
    from rlplace.runtime.distributed.job.job import JobOptions

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class Part(Protocol):
    """This process's part of a model in training.

    Attributes:
        engine: What runs the plan.
        device_number: The plan's device that this process is; None: it has nothing to do.
        inputs: Example inputs, from which batches are made.
        loss: Of a model that does not return it.
        samples: Of a step.
        replicas: How the reference cuts a batch: so many replicas,
        microbatches: with so many micro-batches each.
        same_streams: Random ops draw what they draw in the reference.
    """

    engine: str | None
    device_number: int | None
    inputs: Any
    loss: Loss | None
    samples: int
    replicas: int
    microbatches: int
    same_streams: bool

    def step(self, batch: Any) -> float:
        """One training step; leaves the gradients in place and returns the loss."""

    def held(self) -> list[torch.Tensor]:
        """What stays from step to step."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """By name."""

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """By name; every process calls it."""

    def save(self, folder: str, step: int) -> None:
        """Writes a checkpoint."""

    def load(self, folder: str) -> int:
        """Reads the latest checkpoint; returns its step."""


class PlacedPart:
    """A model that `rlplace.distribute` places; see `Part`."""

    same_streams = True

    def __init__(
        self, plan: PlacementPlan, device: torch.device, options: JobOptions, make: MakeOptimizer, autocast: Autocast
    ) -> None:
        self.problem = _problem(plan, options.cluster, device)
        loaded = recipe_of(plan).build("cpu", options.seed)
        self.inputs, self.loss = loaded.example_inputs, loaded.loss
        self.model: DistributedModel = distribute(
            loaded.module, plan, self.inputs, loss=self.loss, device=device, seed=options.seed, problem=self.problem
        )
        self.optimizer = make(list(self.model.parameters()))  # frozen ones, too: they get no gradient and no update
        self.engine, self.device_number = self.model.report, self.model.ranks.plan_device
        self.replicas, self.microbatches = len(plan.replicas or [0]), plan.microbatches
        self.samples = self.problem.samples_per_microbatch * plan.microbatches * self.replicas
        self._plan, self._clip, self._autocast = plan, options.clip, autocast

    def step(self, batch: Any) -> float:
        return _step(self.model, self.optimizer, batch, self._clip, self._autocast())

    def held(self) -> list[torch.Tensor]:
        return held_tensors(self.model, self.optimizer)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.model.own_tensors.parameters

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        return whole_gradients(self.model)

    def save(self, folder: str, step: int) -> None:
        save_checkpoint(folder, self.model, self.optimizer, step=step, extra={"problem": self._plan.problem})

    def load(self, folder: str) -> int:
        return load_checkpoint(folder, self.model, self.optimizer).step


def _problem(plan: PlacementPlan, cluster: str | None, device: torch.device) -> Problem:
    """The plan's problem, built again by rank 0 and checked."""
    text = None
    if dist.get_rank() == 0:
        text = json.dumps(problem_to_dict(problem_of_plan(plan, cluster)))
    return problem_from_dict(json.loads(broadcast_text(text, device)))


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
