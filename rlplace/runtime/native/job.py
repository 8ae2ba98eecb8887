"""What ``rlplace run`` trains under a whole strategy: the recipe's model through `prepare`, with an optimizer and batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.runtime.distributed.job import faults
from rlplace.runtime.distributed.job.recipe import check_graph, cluster_of_plan, recipe_of, synthetic_batch
from rlplace.runtime.distributed.ranks import broadcast_text
from rlplace.runtime.distributed.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.measure import loss_of
from rlplace.runtime.native.batches import Batch, share_of
from rlplace.runtime.native.run import prepare
from rlplace.runtime.native.why_not import why_not

if TYPE_CHECKING:
    from rlplace.runtime.distributed.job.job import JobOptions
    from rlplace.runtime.distributed.job.placed import Autocast, MakeOptimizer

ENGINE = "native"


def check_strategy(plan: PlacementPlan, autocast: str | None) -> None:
    """Refuses what `rlplace run` cannot do with a strategy, before any process waits for another.

    Args:
        plan: With a strategy.
        autocast: ``--autocast``; None takes what the plan was captured with.

    Raises:
        InputError: With the reason.
    """
    assert plan.strategy is not None
    reason = why_not(plan.strategy)
    if reason is not None:
        raise InputError(f"run: {reason}")
    devices = sorted(plan.strategy.devices)
    if devices != list(range(devices[0], devices[0] + len(devices))):
        raise InputError(
            f"run: the plan uses the devices {', '.join(map(str, devices))}, and processes are numbered without gaps; plan for "
            "a cluster of these devices alone"
        )
    if len(plan.strategy.stages) > 1 and (autocast or recipe_of(plan).autocast):
        raise InputError(
            "run: what stages hand on was recorded without autocast and has other dtypes under it; run without it, or plan "
            "with --space pipeline=1"
        )
    if recipe_of(plan).master_weights:
        raise InputError(
            "run: the plan keeps optimizer state and a copy of the weights in fp32, which is not run yet for strategies; plan "
            "without --master-weights, in fp32 with --autocast"
        )


def keyword_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Example inputs under the names that the model's forward gives them.

    Raises:
        InputError: It has no names for them.
    """
    if isinstance(inputs, Mapping):
        return dict(inputs)
    signature = inspect.signature(model.forward)
    strange = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind not in strange]
    if len(names) < len(inputs):
        raise InputError(
            f"run: a strategy is run with keyword inputs, but forward{signature} names {len(names)} of its {len(inputs)} inputs"
        )
    return dict(zip(names, inputs, strict=False))


def own_microbatch(strategy: Strategy, rank: int) -> int:
    """Samples of one pass of the replica that a process is part of."""
    device = sorted(strategy.devices)[rank]
    stage = next(stage for stage in strategy.stages if device in stage.devices)
    replica = stage.devices.index(device) * stage.data_degree // len(stage.devices)
    return share_of(strategy, replica).microbatch


class StrategyPart:
    """A model under a strategy; see `rlplace.runtime.distributed.job.placed.Part`."""

    engine: str | None = ENGINE
    same_streams = False

    def __init__(
        self,
        plan: PlacementPlan,
        strategy: Strategy,
        device: torch.device,
        options: JobOptions,
        make: MakeOptimizer,
        autocast: Autocast,
    ) -> None:
        rank, recipe, pipeline = dist.get_rank(), recipe_of(plan), strategy.pipelines[0]
        if rank == 0:
            cluster_of_plan(plan, options.cluster)
            check_graph(plan)
        broadcast_text("", device)  # the others wait for the check
        self.device_number: int | None = sorted(strategy.devices)[rank]
        faults.watch_over(f"device {self.device_number}")
        loaded = recipe.build("cpu", options.seed, batch=pipeline.microbatch[0])
        self.inputs, self.loss = keyword_inputs(loaded.module, loaded.example_inputs), loaded.loss
        self.samples = strategy.batch
        degree, several = pipeline.data_degree, len(pipeline.microbatches) > 1
        self.replicas = 1 if several else degree
        self.microbatches = sum(pipeline.microbatches) if several else pipeline.microbatches[0]
        example = synthetic_batch(self.inputs, own_microbatch(strategy, rank), options.seed, 0)
        self.model = prepare(loaded.module, strategy, example, device.type)
        self.optimizer = make(self.model.parameter_groups())
        self._device, self._clip, self._autocast = device, options.clip, autocast
        self._seed, self._steps, self._question = options.seed, 0, plan.problem

    def step(self, batch: Batch) -> float:
        """See `Part.step`."""
        own = self.model.own_samples(batch)
        moved = {name: value.to(self._device) if isinstance(value, torch.Tensor) else value for name, value in own.items()}
        self._seed_random_ops()
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.model.step(moved, lambda output, part: loss_of(output, self.loss))
        if self._clip is not None:
            self.model.clip_grad_norm_(self._clip)
        self.optimizer.step()
        self._steps += 1
        return float(loss.detach())

    def held(self) -> list[torch.Tensor]:
        """See `Part.held`."""
        tensors = [*self.model.parameters(), *(b for body in self.model.bodies.values() for b in body.buffers())]
        tensors += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """See `Part.parameters`."""
        return {name: parameter.detach().to(self._device) for name, parameter in self.model.named_parameters()}

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """See `Part.gradients`."""
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {name: None if gradient is None else gradient.to(self._device) for name, gradient in gradients.items()}

    def save(self, folder: str, step: int) -> None:
        """See `Part.save`."""
        save_checkpoint(folder, self.model, self.optimizer, step=step, extra={"problem": self._question})

    def load(self, folder: str) -> int:
        """See `Part.load`."""
        self._steps = load_checkpoint(folder, self.model, self.optimizer).step
        return self._steps

    def _seed_random_ops(self) -> None:
        """Dropout draws anew in every step, replica and place, and the same again after a checkpoint was loaded."""
        place = self.model.place
        torch.manual_seed(((self._seed * 1_000_003 + self._steps) * 1_009 + place.replica) * 1_009 + place.index["pipeline"])
