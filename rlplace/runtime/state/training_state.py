"""Checkpoints in the format of `torch.distributed.checkpoint`, whatever plan wrote them.

A checkpoint is a folder. Tensors are stored under the names of the undistributed model (``model.NAME``) and of
`torch.distributed.checkpoint.state_dict` (``optimizer.state.NAME.KEY``, ``optimizer.param_groups.NAME.KEY``), so that plain
torch code loads it, and so does any other plan. All other state is in ``rlplace.json`` besides; loading reads it there and
unpickles only the index of tensors, with the classes allowed that such an index has, and the state of a data loader, which may
have tensors (``loader.pt``), with those that torch allows.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data.distributed import DistributedSampler

from rlplace.errors import InputError, RlplaceError, show
from rlplace.files import read_record, write_json
from rlplace.records import build
from rlplace.runtime.base.model import DistributedModel
from rlplace.runtime.base.ranks import broadcast_object, gather_objects, one_line, wait_for_all
from rlplace.runtime.state.optimizer_state import load_optimizer, optimizer_parts
from rlplace.runtime.state.untrusted import CheckpointFacts, IndexReader, check_index
from rlplace.runtime.state.whole import load_packed_whole, tensors_of, with_packed_whole

FORMAT = "rlplace.training"
VERSION = 1
_FACTS, _LOADER = "rlplace.json", "loader.pt"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TrainingState:
    """The state in a checkpoint apart from tensors.

    Attributes:
        path: Its folder.
        step: Training steps done.
        extra: The argument of `save_checkpoint`.
    """

    path: Path
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Writes ``folder/step-00000010``; every rank of a distributed model calls it, and all hosts see the same folder.

    It is written under another name and renamed when it is complete, so that a crash leaves the checkpoints before it. Of a
    PEFT model the folder holds the adapters as PEFT loads them, too (``PeftModel.from_pretrained(base, path)``).

    Args:
        folder: Holds all checkpoints of a run.
        model: Distributed or plain.
        optimizer: Updates this rank's parameters.
        step: Training steps done.
        scheduler: Learning rate schedule; its state must be plain data.
        loader: Data loader with a `state_dict`, such as torchdata's `StatefulDataLoader`. It loads the batches of all replicas,
            so that its state does not depend on the number of processes.
        extra: More plain data, the same on every rank.
        keep: Complete checkpoints to keep.

    Returns:
        Its folder.

    Raises:
        InputError: Something is no plain data, or the loader's state would not serve another number of processes.
        RlplaceError: It could not be written.
    """
    _check_loader(loader)
    folder, together = Path(folder), _together(model)
    final, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    writes = not isinstance(model, DistributedModel) or model.writes
    state: dict[str, Any] = {"model": with_packed_whole(tensors_of(model.state_dict()))} if writes else {}
    own: dict[str, Any] = {}
    if optimizer is not None and writes:
        flat, own = optimizer_parts(model, optimizer)
        state["optimizer"] = with_packed_whole(flat)
    facts = {
        "step": step,
        "torch": torch.__version__,
        "random": dict(zip(("seed", "step"), model.random_state, strict=True)) if isinstance(model, DistributedModel) else None,
        "scheduler": None if scheduler is None else dict(scheduler.state_dict()),
        "extra": dict(extra or {}),
        "optimizers": gather_objects(own) if together else [own],
    }
    _check_plain(facts)
    with _one_line("written", folder):
        first = not together or dist.get_rank() == 0
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".step-*.partial"):
                shutil.rmtree(left)
            unfinished.mkdir()
        if together:
            wait_for_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(state, storage_writer=FileSystemWriter(unfinished), no_dist=not together)
        if first:
            _write_adapters(unfinished, model.meta_model if isinstance(model, DistributedModel) else model)
            if loader is not None:
                torch.save(loader.state_dict(), unfinished / _LOADER)
            write_json(unfinished / _FACTS, {"format": FORMAT, "version": VERSION, **facts})
            if final.exists():
                shutil.rmtree(final)
            os.replace(unfinished, final)
            for old in _complete(folder)[: -max(keep, 1)]:
                shutil.rmtree(old)
        if together:
            wait_for_all()
    return final


def _write_adapters(folder: Path, model: nn.Module) -> None:
    """Writes the trained tensors of a PEFT model, which may be without values, from the checkpoint in a folder."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    values = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters() if p.requires_grad}
    load({"model": values}, storage_reader=FileSystemReader(folder), no_dist=True)
    own = get_peft_model_state_dict(model, state_dict=values, save_embedding_layers=False)
    save_file({name: value.contiguous() for name, value in own.items()}, folder / "adapter_model.safetensors")
    configs[model.active_adapter].save_pretrained(str(folder))  # type: ignore[index]


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
) -> TrainingState:
    """Loads a checkpoint that any plan wrote into a model; every rank of a distributed model calls it.

    Args:
        path: A checkpoint, or the folder of a run, of which the latest is taken.
        model: With the same parameters and buffers as the one that was saved; they are overwritten in place.
        optimizer: Likewise; also its learning rates and other settings.
        scheduler: Likewise.
        loader: Over the same data; its next batch is the one that follows those that were trained.

    Returns:
        The saved step and extra data.

    Raises:
        InputError: There is no checkpoint, or it is of another model.
        RlplaceError: It could not be read.
    """
    folder = _resolve(Path(path), model)
    facts = read_record(folder / _FACTS, FORMAT, VERSION, partial(build, CheckpointFacts, where="checkpoint"))
    with _one_line("read", folder):
        index = IndexReader(folder).read_metadata().state_dict_metadata
        state = tensors_of(model.state_dict())
        whole = model.meta_model if isinstance(model, DistributedModel) else model
        check_index(folder, index, tensors_of(whole.state_dict()))

        def fill(kind: str, tensors: dict[str, Any]) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load({kind: tensors}, storage_reader=IndexReader(folder), no_dist=not _together(model))

        load_packed_whole(state, partial(fill, "model"))
        model.load_state_dict(state, strict=False)  # a no-op for what was loaded in place
        if optimizer is not None:
            load_all = partial(load_packed_whole, load=partial(fill, "optimizer"))
            load_optimizer(model, optimizer, index, facts.optimizers, load_all)
    if scheduler is not None:
        if facts.scheduler is None:
            raise InputError(f"{folder}: it was saved without a learning rate schedule; leave scheduler out")
        for key in facts.scheduler:  # torch sets whatever attributes a state names
            if key not in scheduler.state_dict():
                raise InputError(f"{folder / _FACTS}: scheduler has {show(key)}, which this learning rate schedule lacks")
        scheduler.load_state_dict(facts.scheduler)
    if loader is not None:
        _check_loader(loader)
        _load_loader(folder / _LOADER, loader)
    if isinstance(model, DistributedModel) and facts.random is not None:
        model.random_state = facts.random.seed, facts.random.step
    return TrainingState(folder, facts.step, facts.extra)


def latest_checkpoint(folder: str | Path, *, itself: bool = False) -> Path | None:
    """Returns the complete checkpoint of the most steps in a folder, as this host sees it; None when there is none.

    Args:
        folder: Of checkpoints.
        itself: Whether it may be a checkpoint.
    """
    if itself and (Path(folder) / _FACTS).is_file():
        return Path(folder)
    complete = _complete(Path(folder))
    return complete[-1] if complete else None


def _complete(folder: Path) -> list[Path]:
    folders = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / _FACTS).is_file()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def _resolve(path: Path, model: nn.Module) -> Path:
    """Returns the checkpoint at a path, the same on every rank."""
    folder = latest_checkpoint(path, itself=True)
    if _together(model):
        folder = broadcast_object(folder)
    if folder is None:
        raise InputError(f"{path}: there is no complete checkpoint")
    if not (folder / _FACTS).is_file():
        raise InputError(f"{folder}: this host does not see the checkpoint; put it on storage that all hosts share")
    return folder


def _check_loader(loader: Any) -> None:
    """Refuses a data loader whose position cannot be saved, or says nothing to another number of processes."""
    if loader is None:
        return
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise InputError(
            f"checkpoint: a {type(loader).__name__} has no state_dict; use torchdata.stateful_dataloader.StatefulDataLoader"
        )
    if getattr(loader, "generator", None) is not None and getattr(loader, "num_workers", 1) == 0:
        raise InputError(
            "checkpoint: torchdata draws other numbers too from a loader's own generator, so that later epochs would have "
            "another order than without the restart; leave generator out and call torch.manual_seed before you make the loader"
        )
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise InputError(
            "checkpoint: a DistributedSampler counts the samples of one replica, so that another number of replicas would skip "
            "samples or repeat them; load the batch of all replicas on every process (distribute with share='global')"
        )


def _load_loader(path: Path, loader: Any) -> None:
    if not path.is_file():
        raise InputError(f"{path.parent}: it was saved without a data loader; leave loader out")
    try:
        loader.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file raises anything
        raise InputError(f"{path}: {one_line(error)}; take an earlier checkpoint, or the loader that was saved") from None


def _together(model: nn.Module) -> bool:
    """Returns whether all ranks save or load at once; a plain model is this process's own."""
    return isinstance(model, DistributedModel) and dist.is_initialized()


def _check_plain(facts: Mapping[str, Any], where: str = "") -> None:
    """Refuses data that JSON does not express."""
    for key, value in facts.items():
        name = f"{where}.{key}" if where else str(key)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Mapping):
                _check_plain(item, name)
            elif not isinstance(item, (list, tuple)) and not (item is None or isinstance(item, (bool, int, float, str))):
                raise InputError(f"checkpoint: {name} is a {type(item).__name__}; give numbers, texts, lists and dicts")


@contextlib.contextmanager
def _one_line(what: str, path: Path) -> Any:
    try:
        yield
    except CheckpointException as error:
        rank, failure = next(iter(error.failures.items()))
        raise RlplaceError(f"{path}: rank {rank}: the checkpoint could not be {what}: {one_line(failure[0])}") from error
    except OSError as error:
        raise RlplaceError(f"{path}: the checkpoint could not be {what}: {error.strerror or error}") from error
