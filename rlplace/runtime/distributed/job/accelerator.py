"""accelerate's `Accelerator` with a distributed model.

Under torchrun accelerate takes every process for a data-parallel worker: it wraps the model in DDP, gives each process other
batches, divides lengths and learning-rate steps by the number of processes, and clips by the gradients of one process. A
process of a plan works on the whole batch of the job instead. So accelerate is told that there is one process, which is what
its part of the work looks like, except that only the first one is the main process, which prints and saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.state.whole_state import whole_state_dict

if TYPE_CHECKING:
    from accelerate import Accelerator


def distribute_accelerator(accelerator: Accelerator, model: nn.Module, plan: PlacementPlan, **options: Any) -> DistributedModel:
    """`rlplace.distribute` for a training loop with an `Accelerator`; call it before ``accelerator.prepare``.

    The loop stays as it is: ``accelerator.prepare`` does no more than on one device, ``accelerator.clip_grad_norm_`` clips by
    the norm of the whole model, ``accelerator.get_state_dict`` and ``save_model`` have the whole model on the main process.
    Batch sizes are those of the script on one device: of all replicas together.

    Args:
        accelerator: As the script makes it; ``Accelerator()`` joins the processes of a torchrun job by itself.
        model: The whole model.
        plan: A plan for it.
        **options: Further arguments of `rlplace.distribute`.

    Raises:
        InputError: Something cannot be combined with a plan, with the reason.
    """
    from rlplace.runtime.distributed.distribute import distribute

    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise InputError("distribute_accelerator: call it before accelerator.prepare, which then gets what it returns")
    check_share(options)
    see_one_process(accelerator)
    placed = distribute(model, plan, device=options.pop("device", accelerator.device), **options)
    use_model(accelerator, placed)
    return placed


def check_share(options: Mapping[str, Any]) -> None:
    """Every process draws the batch of all replicas."""
    if options.get("share", "global") != "global":
        raise InputError("share: every process loads the batch of all replicas here; leave it out")


def see_one_process(accelerator: Accelerator) -> None:
    """Makes accelerate treat this process as the only one; only rank 0 remains the main process.

    Raises:
        InputError: The accelerator uses something that distributes the model by itself.
        MissingError: accelerate is not installed.
    """
    try:
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType
    except ImportError as error:
        raise MissingError("accelerate is not installed; pip install 'rlplace[accelerate]'") from error

    plain = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
    if accelerator.distributed_type not in plain:
        raise InputError(
            f"accelerate is set to {accelerator.distributed_type.value}, which distributes the model by itself; use a plain "
            "configuration, the plan says where everything runs"
        )
    if getattr(accelerator, "scaler", None) is not None:
        raise InputError("loss scaling (fp16) comes too late for a step that runs as a whole; use bf16")
    for state in (PartialState(), AcceleratorState()):
        state.distributed_type = DistributedType.NO
        state.num_processes = 1
        if state.device.type == "cpu":
            state.device = torch.device("cpu")  # moving to cpu:0 would copy everything
    # Otherwise only the main process would read from iterable datasets.
    accelerator.dataloader_config.dispatch_batches = False


def use_model(accelerator: Any, model: DistributedModel) -> None:
    """What an accelerator does with all parameters or with all processes goes through the model."""

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return model.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(list(model.parameters()), clip_value)

    def get_state_dict(other: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        return whole_state_dict(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise InputError(
            "accelerator.save_state and load_state would write and read the optimizer of one process; save the model with "
            "accelerator.save_model, and model and optimizer with rlplace.save_checkpoint"
        )

    def wait_for_everyone() -> None:
        dist.barrier()

    for function in (clip_grad_norm_, clip_grad_value_, get_state_dict, wait_for_everyone):
        setattr(accelerator, function.__name__, function)
    accelerator.save_state = accelerator.load_state = refuse
