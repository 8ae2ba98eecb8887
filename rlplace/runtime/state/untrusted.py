"""Checks of a training checkpoint's records, before anything is allocated or set by them.

torch keeps the index of a checkpoint as a pickle. It is read without running code in it: only the classes that such an index is
made of are accepted.
"""

from __future__ import annotations

import enum
import io
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from rlplace.errors import InputError, show
from rlplace.files import read_bytes
from rlplace.records import Record

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
_Plain = bool | str | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | _Number | None


class RandomStreams(Record, frozen=True):
    """State of the streams of random ops.

    Attributes:
        seed: Of all streams.
        step: Next training step.
    """

    seed: _Natural
    step: _Natural


class OptimizerGroup(Record, frozen=True):
    """A group of an optimizer.

    Attributes:
        settings: Learning rate and others by name.
        parameters: Names of its parameters.
    """

    settings: dict[str, Any]
    parameters: list[str]


class OptimizerFacts(Record, frozen=True):
    """The state of one rank's optimizer apart from tensors.

    Attributes:
        groups: Parameter groups.
        numbers: State that is no tensor, by parameter and key.
    """

    groups: list[OptimizerGroup] = msgspec.field(default_factory=list)
    numbers: dict[str, dict[str, _Plain]] = msgspec.field(default_factory=dict)


class CheckpointFacts(Record, frozen=True):
    """The content of ``rlplace.json``.

    Attributes:
        step: Training steps done.
        torch: Version that wrote it.
        random: Streams of dropout and other random ops; null for a plain model.
        scheduler: State of the learning rate schedule.
        extra: Data of the program.
        optimizers: By rank.
    """

    step: _Natural
    torch: Any
    random: RandomStreams | None
    scheduler: dict[str, Any] | None
    extra: dict[str, Any]
    optimizers: list[OptimizerFacts]


def check_setting(saved: Any, present: Any, where: str) -> None:
    """Refuses a saved setting of an optimizer that is of another kind than the one that it takes the place of."""
    # A bool may be None: torch decides, as with `foreach`.
    kind: Any = {type(None): _Plain, bool: bool | None, str: str}.get(type(present), _Number)
    if isinstance(present, (tuple, list)):
        kind = tuple[(_Number,) * len(present)]  # type: ignore[misc]
    try:
        msgspec.convert(saved, kind)
    except msgspec.ValidationError:
        raise InputError(f"checkpoint: {where} is {show(saved)}, the optimizer has {show(present)}") from None


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple", "int", "float", "str"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise InputError(f"names {module}.{name}, which no checkpoint needs; do not load it")


def _member(owner: Any, name: str) -> Any:
    """Replaces ``getattr`` in an index: Python 3.11.0 to 3.11.3 pickle members of enums with it."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise InputError("names builtins.getattr of something that is no enum, which no checkpoint needs; do not load it")
    return owner[name]


def _claimed_bytes(index: Metadata) -> int:
    """Sums the bytes of all tensors; reads every field that loading needs, since unpickled objects may lack some."""
    claimed = 0
    for name, item in dict(index.state_dict_metadata).items():
        if not isinstance(name, str):
            raise TypeError("a name that is no text")
        if isinstance(item, TensorStorageMetadata):
            sizes = [int(size) for size in item.size]
            [(list(chunk.offsets), list(chunk.sizes)) for chunk in item.chunks]
            if min(sizes, default=0) < 0 or not isinstance(item.properties.dtype, torch.dtype):
                raise TypeError("a negative size, or a dtype that is none")
            claimed += math.prod(sizes) * item.properties.dtype.itemsize
    return claimed


class IndexReader(FileSystemReader):
    """A reader of a checkpoint that may come from anywhere."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self._folder = Path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index.

        Raises:
            InputError: It is damaged, or holds something else.
        """
        path = self._folder / ".metadata"
        try:
            index = _Unpickler(io.BytesIO(read_bytes(path))).load()
            if not isinstance(index, Metadata):
                raise InputError("holds no index of tensors")
            claimed = _claimed_bytes(index)
        except InputError as error:
            raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
        except Exception as error:  # a damaged pickle raises anything
            raise InputError(f"{path}: damaged ({type(error).__name__}); take an earlier checkpoint") from None
        check_storage(index.storage_data, self._folder, claimed)
        index.storage_meta = getattr(index, "storage_meta", None) or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def check_storage(storage: Any, folder: Path, claimed: int = 0) -> None:
    """Refuses an index whose tensors are in other folders, or in something else than files: reading a pipe would block.

    Args:
        storage: Where each tensor is stored.
        folder: The checkpoint's folder.
        claimed: Bytes of its tensors; they would be allocated before a read fails.

    Raises:
        InputError: Naming the first such file, or the files hold fewer bytes.
    """
    named = set()
    for entry in storage.values() if isinstance(storage, Mapping) else [None]:
        name = getattr(entry, "relative_path", None)
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise InputError(f"{folder}: the index names a file outside of the checkpoint: {show(name)}")
        named.add(name)
    for name in named:
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: is missing, or no regular file; take an earlier checkpoint")
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if claimed > held:
        raise InputError(
            f"{folder}: the index names {claimed} bytes of tensors, its files hold {held}; take an earlier checkpoint"
        )


def check_index(path: Path, index: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
    """Refuses a checkpoint of another model.

    Args:
        path: For the message.
        index: Metadata by name, ``model.`` in front of those of the model.
        wanted: All tensors of the model by name; only shapes matter.

    Raises:
        InputError: Naming the first difference.
    """
    saved = {name.removeprefix("model."): item for name, item in index.items() if name.startswith("model.")}
    lacking, strange = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if lacking or strange:
        first = f"it lacks {lacking[0]!r}" if lacking else f"it has {strange[0]!r}, which the model lacks"
        raise InputError(f"{path}: the checkpoint is of another model: {first} ({len(lacking) + len(strange)} such names)")
    for name, tensor in wanted.items():
        item = saved[name]
        if not isinstance(item, TensorStorageMetadata) or tuple(item.size) != tuple(tensor.shape):
            shape = list(item.size) if isinstance(item, TensorStorageMetadata) else "no tensor"
            raise InputError(
                f"{path}: the checkpoint is of another model: {name!r} is {shape} there and {list(tensor.shape)} in the model"
            )
