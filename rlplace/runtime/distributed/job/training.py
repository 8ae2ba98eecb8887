"""A plan in training on this process: the part of the model that it runs, the optimizer, and the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.batches import samples_of
from rlplace.runtime.distributed.graph.forward_graph import Graphs, Loss
from rlplace.runtime.distributed.job.recipe import recipe_of
from rlplace.runtime.distributed.joint.replay import ReplayEngine, sleep_until
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.placed_model import PlacedModel
from rlplace.runtime.distributed.ranks import devices_of
from rlplace.runtime.measure import OPTIMIZERS, loss_of
from rlplace.runtime.native.why_not import why_not

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def processes_needed(plan: PlacementPlan) -> int:
    """One for every device up to the last that a placement uses; one for every device of a strategy."""
    if plan.strategy is not None:
        return len(plan.strategy.devices)
    if plan.older is not None and plan.older.replicas:
        return 1 + max(device for row in plan.older.replicas for device in row)
    return devices_of(plan)


def check_strategy(plan: PlacementPlan, verb: str) -> None:
    """Refuses what cannot be run of a strategy by itself, before any process waits for another; placements pass.

    Raises:
        InputError: With the reason.
    """
    if plan.strategy is None:
        return
    reason = why_not(plan.strategy)
    if reason is not None:
        raise InputError(f"{verb}: {reason}")
    devices = sorted(plan.strategy.devices)
    if devices != list(range(devices[0], devices[0] + len(devices))):
        raise InputError(
            f"{verb}: the plan uses the devices {', '.join(map(str, devices))}, and processes are numbered without gaps; plan "
            "for a cluster of these devices alone"
        )
    if recipe_of(plan).master_weights and verb != "run":
        raise InputError(f"{verb}: the plan keeps its weights in fp32 (--master-weights); 'rlplace run' trains and times it")


def microbatch_of(plan: PlacementPlan, samples: int) -> int:
    """Samples of the micro-batch that a plan's model is built for, which are `samples` for a placement."""
    return samples if plan.strategy is None else plan.strategy.pipelines[0].microbatch[0]


class Training:
    """This process's part of a model in training.

    Attributes:
        model: The distributed model.
        optimizer: Updates this process's parameters; None where nothing is computed.
        samples: Of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        example_inputs: Any,
        device: torch.device,
        *,
        optimizer: str,
        lr: float = 1e-3,
        loss: Loss | None = None,
        seed: int = 0,
        clip: float | None = None,
        autocast: Autocast = contextlib.nullcontext,
        slept: Problem | None = None,
        graphs: Graphs | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
    ) -> None:
        """Distributes a model; every process of the job calls it.

        Args:
            model: The whole model, the same on every process; a strategy changes it.
            plan: A plan for it.
            example_inputs: Of one micro-batch, see `microbatch_of`.
            device: Where this process computes.
            optimizer: Name.
            lr: Learning rate.
            loss: Of a model that does not return it.
            seed: Of random ops.
            clip: Norm that gradients are clipped to.
            autocast: Makes what forwards run under.
            slept: A problem whose times are slept instead of computing.
            graphs: Keeps what was traced.
            mixed_precision: See `distribute`.
        """
        self.model: DistributedModel = distribute(
            model, plan, example_inputs, loss=loss, device=device, seed=seed, replayed=slept, graphs=graphs,
            mixed_precision=mixed_precision,
        )  # fmt: skip
        # Frozen parameters, too: they get no gradient and no update.
        self.optimizer = None if slept is not None else OPTIMIZERS[optimizer](self.model.parameter_groups(), lr=lr)
        self.samples = samples_of(example_inputs) if plan.strategy is None else plan.strategy.batch
        self._clip, self._autocast = clip, autocast

    def step(self, batch: Any) -> float:
        """One training step; leaves the gradients in place and returns the loss."""
        self.model.zero_grad(set_to_none=True)
        with self._autocast():
            output = self.model(**batch) if isinstance(batch, dict) else self.model(*batch)
        loss = loss_of(output, None)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip is not None:
            self.model.clip_grad_norm_(self._clip)
        activity.mark("update")
        if self.optimizer is not None:
            self.optimizer.step()
        elif isinstance(self.model, PlacedModel):
            engines = [engine for engine in self.model.engines() if isinstance(engine, ReplayEngine)]
            sleep_until(time.perf_counter() + sum(engine.update_s for engine in engines))
        activity.mark(None)
        return float(loss.detach())
