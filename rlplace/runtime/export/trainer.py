"""accelerate's `Accelerator` and transformers' `Trainer` with a distributed model.

Under torchrun accelerate takes every process for a data-parallel worker: it wraps the model in DDP, gives each process other
batches, divides lengths and learning-rate steps by the number of processes, and clips by the gradients of one process. A
process of a plan works on the whole batch of the job instead. So accelerate is set to see one process, except that only rank 0
is the main process, which prints and saves.

Checkpoints of a Trainer are whole, in the files and formats that a Trainer on one device writes, so that a run can continue
from one on one device, the reverse, or by another plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rlplace.errors import InputError, MissingError
from rlplace.model.capture.fake import first_names
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import one_line, wait_for_all
from rlplace.runtime.job.distribute import distribute, refuse_release
from rlplace.runtime.state.optimizer_state import load_whole_optimizer_state, whole_optimizer_state
from rlplace.runtime.state.whole import whole_state_dict

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def use_whole_files(trainer: Any, model: DistributedModel) -> None:
    """Makes a Trainer save and load the whole model and optimizer; all processes take part, rank 0 writes."""
    from transformers import PreTrainedModel

    save, save_rng_state = trainer._save, trainer._save_rng_state

    def _save(output_dir: str | None = None, state_dict: Any = None) -> None:
        state = whole_state_dict(model)
        if not isinstance(model.meta_model, PreTrainedModel):  # safetensors refuses shared tensors
            state = {name: value.clone() for name, value in state.items()}
        if trainer.args.should_save:
            with mock.patch.object(trainer, "model", model.meta_model):
                save(output_dir, state)
        wait_for_all()  # the files are there for all processes

    def _save_optimizer_and_scheduler(output_dir: str) -> None:
        state = whole_optimizer_state(model, trainer.optimizer)
        if trainer.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER))
            torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _save_rng_state(output_dir: str) -> None:
        if trainer.args.should_save:
            save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isfile(path := os.path.join(checkpoint, OPTIMIZER)):
            return  # saved with save_only_model, as on one device
        load_whole_optimizer_state(model, trainer.optimizer, torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        trainer.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))
        # Streams of random ops continue where the run that saved had them: one step of them per call of the model.
        steps = trainer.state.global_step * trainer.args.gradient_accumulation_steps
        model.random_state = model.random_state[0], steps

    for function in (_save, _save_optimizer_and_scheduler, _save_rng_state, _load_optimizer_and_scheduler):
        setattr(trainer, function.__name__, function)
    trainer._load_from_checkpoint = lambda checkpoint, other=None: load_weights(model, checkpoint)
    trainer._load_best_model = lambda: load_weights(model, trainer.state.best_model_checkpoint)


def load_weights(model: DistributedModel, folder: str) -> None:
    """Reads this process's part of a model from the safetensors files of a folder.

    Raises:
        InputError: There are none, or something is missing or has another shape.
    """
    from safetensors import SafetensorError

    first, own, reader = first_names(model.meta_model), model.state_dict(), HuggingFaceStorageReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
        saved_as = {first[name]: name for name in saved if name in first}  # of tied tensors only one is saved
        load({saved_as.get(first[name], name): own[name] for name in own}, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder}: {one_line(error)}; name a checkpoint of the Trainer with this model") from None
    model.load_state_dict(own)  # copies of one tensor follow


def distribute_accelerator(accelerator: Accelerator, model: nn.Module, plan: PlacementPlan, **options: Any) -> DistributedModel:
    """Distributes the model of a training loop with an `Accelerator`; call it before ``accelerator.prepare``.

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
    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise InputError("distribute_accelerator: call it before accelerator.prepare, and pass its result to that")
    return _distributed(accelerator, model, plan, options)


def _distributed(accelerator: Accelerator, model: nn.Module, plan: PlacementPlan, options: dict[str, Any]) -> DistributedModel:
    """Returns the distributed model, and sets an accelerator to use it; every process draws the batch of all replicas."""
    if options.get("share", "global") != "global":
        raise InputError("share: every process loads the batch of all replicas here; leave it out")
    refuse_release(plan, "distribute_trainer and distribute_accelerator")
    see_one_process(accelerator)
    placed = distribute(model, plan, **{"device": accelerator.device, **options})
    use_model(accelerator, placed)
    return placed


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
            "configuration"
        )
    if getattr(accelerator, "scaler", None) is not None:
        raise InputError("loss scaling (fp16) would follow a step that has run already; use bf16")
    for state in (PartialState(), AcceleratorState()):
        state.distributed_type = DistributedType.NO
        state.num_processes = 1
        if state.device.type == "cpu":
            state.device = torch.device("cpu")  # moving to cpu:0 would copy everything
    # Otherwise only the main process would read from iterable datasets.
    accelerator.dataloader_config.dispatch_batches = False


def use_model(accelerator: Any, model: DistributedModel) -> None:
    """Makes an accelerator's operations on all parameters or all processes call the model."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise InputError(
            "accelerator.save_state and load_state would write and read the optimizer of one process; save the model with "
            "accelerator.save_model, and model and optimizer with rlplace.save_checkpoint"
        )

    own, clip = model.parameters, nn.utils.clip_grad_value_
    accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2.0: model.clip_grad_norm_(max_norm, norm_type)
    accelerator.clip_grad_value_ = lambda parameters, clip_value: clip(list(own()), clip_value)
    accelerator.get_state_dict = lambda other, unwrap=True: whole_state_dict(model)
    accelerator.wait_for_everyone = dist.barrier
    accelerator.save_state = accelerator.load_state = refuse


def distribute_trainer(trainer: Trainer, plan: PlacementPlan, **options: Any) -> DistributedModel:
    """Makes a Trainer train its model as a plan says; call it on every process, after the Trainer is made.

    Batch sizes are those of the script on one device: ``per_device_train_batch_size`` is the batch of all processes together.
    Only rank 0 logs and saves. ``save_model`` and checkpoints hold the whole model in the format of transformers.

    Args:
        trainer: Made with the whole model, and without an optimizer.
        plan: A plan for the model.
        **options: Further arguments of `rlplace.distribute`.

    Returns:
        The distributed model, which the Trainer has now.

    Raises:
        InputError: Something cannot be combined with a plan, with the reason.
    """
    _refuse(trainer)
    whole = trainer.model.train()
    model = _distributed(trainer.accelerator, whole, plan, options)
    if trainer.args.device.type != "cpu" and plan.strategy is None:
        whole.to("cpu")  # the tensors that this process owns stay where they are
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model
    decaying = trainer.get_decay_parameter_names  # needs the classes of modules, which a process's own part lacks
    trainer.get_decay_parameter_names = lambda other: decaying(model.meta_model)
    use_whole_files(trainer, model)
    for name in ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"):
        setattr(trainer, name, _as_first()(getattr(trainer, name)))
    for name in ("train", "evaluate", "predict", "save_model"):
        setattr(trainer, name, _alone(trainer)(getattr(trainer, name)))
    return model


def _refuse(trainer: Any) -> None:
    """Refuses settings that do not work with a plan."""
    args = trainer.args
    reasons = {
        "the Trainer has no model": not isinstance(trainer.model, nn.Module),
        "its model is distributed already": isinstance(trainer.model, DistributedModel),
        "it was given an optimizer, whose parameters are not those of the distributed model": trainer.optimizer is not None,
        "model_init makes a new model for every run": trainer.model_init is not None,
        "gradient_checkpointing: what is recomputed is part of a plan": args.gradient_checkpointing,
        "fsdp and deepspeed distribute the model by themselves": bool(args.fsdp) or args.deepspeed is not None,
        "torch_compile: a plan's segments run as they are": args.torch_compile,
        "auto_find_batch_size: every process would find its own": args.auto_find_batch_size,
        "neftune_noise_alpha hooks a module": args.neftune_noise_alpha is not None,
        "a loss outside the model needs its outputs, which training does not send to every process: label_smoothing_factor, "
        "compute_loss_func": bool(args.label_smoothing_factor) or getattr(trainer, "compute_loss_func", None) is not None,
        "predict_with_generate needs the whole model on one process": getattr(args, "predict_with_generate", False),
        "save_on_each_node: the whole model is gathered on rank 0 only": args.save_on_each_node,
    }
    refusal = next((reason for reason, holds in reasons.items() if holds), None)
    if refusal is not None:
        raise InputError(f"distribute_trainer: {refusal}; change it, or train on one device")


@contextlib.contextmanager
def _as_first() -> Iterator[None]:
    """Sets the process number to 0, by which worker processes of loaders are seeded: all processes must draw alike."""
    from accelerate.state import AcceleratorState, PartialState

    one, other = (mock.patch.object(state, "process_index", 0) for state in (PartialState(), AcceleratorState()))
    with one, other:
        yield


@contextlib.contextmanager
def _alone(trainer: Any) -> Iterator[None]:
    """Sets accelerate to see one process before a Trainer works: any new TrainingArguments undo it."""
    see_one_process(trainer.accelerator)
    yield
