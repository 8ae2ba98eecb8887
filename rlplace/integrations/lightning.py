"""A strategy that runs a plan in a Lightning `Trainer`, pipelines too.

Lightning's own strategies wrap the whole `LightningModule` and leave the step to torch. A distributed model of rlplace runs the
step of all processes when it is called, and its loss puts the gradients in place, so Lightning's loop is that of one device:
every process draws the batch of all replicas, and what reads all parameters, clipping and checkpoints, reads those of all
processes. Checkpoints are those that Lightning writes on one device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.environment import own_device
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import broadcast_object, start_group, wait_for_all
from rlplace.runtime.job.distribute import distribute, refuse_release
from rlplace.runtime.state.optimizer_state import load_whole_optimizer_state, whole_optimizer_state
from rlplace.runtime.state.whole import whole_state_dict

RANDOM = "rlplace.random_state"
"""Key of a checkpoint: seed and next step of the streams of random ops."""


class PlanStrategy(SingleDeviceStrategy):
    """A Lightning strategy that trains one submodule of a `LightningModule` as a plan says.

    Start the script with torchrun, one process per device of the plan, and give ``Trainer(strategy=PlanStrategy(plan))``
    neither ``devices`` nor ``num_nodes``. Batches are those of all replicas, alike on every process: ``seed_everything`` first.

    Args:
        plan: A plan for the submodule.
        submodule: Its name; it holds all parameters, and a training step uses no more of its output than its loss.
        timeout_s: How long a process may stand still while others wait, where Lightning starts the process group.
        **options: Further arguments of `rlplace.distribute`.
    """

    strategy_name = "rlplace"

    def __init__(self, plan: PlacementPlan, submodule: str = "model", *, timeout_s: float = 1800.0, **options: Any) -> None:
        super().__init__()
        refuse_release(plan, "PlanStrategy")
        if options.get("share", "global") != "global":
            raise InputError("PlanStrategy: share: every process loads the batch of all replicas here; leave it out")
        self.plan, self.submodule, self.timeout_s, self.options = plan, submodule, timeout_s, options
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # prepare_data runs once on a host
        self.node_rank = int(os.environ.get("GROUP_RANK", "0"))

    @property
    def distributed(self) -> DistributedModel:
        """This process's part of the submodule, once it is distributed."""
        model: Any = getattr(self.lightning_module, self.submodule)
        return model

    @property
    def is_global_zero(self) -> bool:
        """True on the process that logs and saves; `global_rank`, by which loaders seed their workers, is 0 on all."""
        return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"

    def setup_environment(self) -> None:
        """Joins the processes of the job."""
        self._root_device = own_device("cpu" if isinstance(self.accelerator, CPUAccelerator) else "cuda", "PlanStrategy")
        if not dist.is_initialized():
            start_group("gloo" if self._root_device.type == "cpu" else "nccl", self.timeout_s)
        rank_zero_only.rank = dist.get_rank()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Distributes the submodule, which Lightning has loaded a checkpoint into where one is given."""
        module: Any = self.lightning_module
        whole = getattr(module, self.submodule, None)
        if isinstance(whole, DistributedModel):  # fit, then test
            return
        if not isinstance(whole, nn.Module):
            raise InputError(
                f"PlanStrategy: the LightningModule has no submodule {self.submodule!r}; name the one that the plan is for: "
                "PlanStrategy(plan, 'NAME')"
            )
        own = {id(parameter) for parameter in whole.parameters()}
        if others := [name for name, parameter in module.named_parameters() if id(parameter) not in own]:
            raise InputError(
                f"PlanStrategy: {others[0]} is a parameter outside of {self.submodule!r}, and every process would train its "
                "own copy; make it a part of the model that you plan"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise InputError("PlanStrategy: loss scaling (16-mixed) would follow a step that has run already; use bf16-mixed")
        model = distribute(whole.train(), self.plan, **{"device": self._root_device, **self.options})
        setattr(module, self.submodule, model)
        module.parameters = model.parameters  # an optimizer needs one, also where this process holds none
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = lambda optimizer, clip_val: model.clip_grad_norm_(float(clip_val))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it in training mode: after an evaluation Lightning sets the flags of modules one by one."""
        if not self.distributed.training:
            self.distributed.train()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it without inference mode, in which sharded parameters would be gathered as tensors that cannot be trained."""
        with torch.inference_mode(False), torch.no_grad():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it without inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it without inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            return super().predict_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole module on rank 0; every process calls it."""
        module: Any = self.lightning_module
        whole, prefix = whole_state_dict(self.distributed), f"{self.submodule}."
        others = {name: value for name, value in module.state_dict().items() if not name.startswith(prefix)}
        return {**{prefix + name: value for name, value in whole.items()}, **others}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer over the whole module on rank 0; every process calls it."""
        return whole_optimizer_state(self.distributed, getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this process's part of the optimizers' state, which any plan or one device has saved."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_whole_optimizer_state(self.distributed, optimizer, state)
        if RANDOM in checkpoint:
            seed, step = checkpoint[RANDOM]
            self.distributed.random_state = int(seed), int(step)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint on rank 0."""
        if isinstance(self.distributed, DistributedModel):
            checkpoint[RANDOM] = [*self.distributed.random_state]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes."""
        wait_for_all()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank 0's object, where Lightning asks for no other."""
        if src != 0:
            raise InputError(f"PlanStrategy: broadcast is from rank 0, not {src}")
        return broadcast_object(obj)

    def teardown(self) -> None:
        """Ends what Lightning has set up; the model stays where it is."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
