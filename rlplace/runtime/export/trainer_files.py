"""Checkpoints of a Trainer whose model is distributed: whole, in the files and formats that a Trainer on one device writes.

A run can go on from such a checkpoint on one device, and the other way round, or by another plan.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rlplace.errors import InputError
from rlplace.model.capture.fake import first_names
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import one_line, wait_for_all
from rlplace.runtime.state.optimizer_state import load_whole_optimizer_state, whole_optimizer_state
from rlplace.runtime.state.whole import whole_state_dict

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def use_whole_files(trainer: Any, model: DistributedModel) -> None:
    """Makes a Trainer save and load the whole model and optimizer; all processes take part, rank 0 writes."""
    from transformers import PreTrainedModel

    save, save_rng_state = trainer._save, trainer._save_rng_state

    def _save(output_dir: str | None = None, state_dict: Any = None) -> None:
        state = whole_state_dict(model)
        if not isinstance(model.meta_model, PreTrainedModel):  # safetensors wants no tensor twice
            state = {name: value.clone() for name, value in state.items()}
        if trainer.args.should_save:
            trainer.model = model.meta_model
            try:
                save(output_dir, state)
            finally:
                trainer.model = model
        wait_for_all()  # what was written is there for everyone

    def _save_optimizer_and_scheduler(output_dir: str) -> None:
        state = whole_optimizer_state(model, trainer.optimizer)
        if trainer.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER))
            torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _save_rng_state(output_dir: str) -> None:
        if trainer.args.should_save:
            save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, OPTIMIZER)
        if not os.path.isfile(path):
            return  # saved with save_only_model, as on one device
        load_whole_optimizer_state(model, trainer.optimizer, torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        trainer.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))
        # Streams of random ops go on where the run that saved had them: one step of them per call of the model.
        seed, _ = model.random_state
        model.random_state = seed, trainer.state.global_step * trainer.args.gradient_accumulation_steps

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
