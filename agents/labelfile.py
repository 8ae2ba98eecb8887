"""Label files: a numpy archive, read without trust. No pickle, no array that is larger than the file says, no odd shape."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rlplace.envs.guide.features import NUM_FEATURES
from rlplace.envs.observation import NUM_NODE_FEATURES
from rlplace.errors import InputError
from rlplace.files import read_bytes, write_bytes

MAX_ARRAY_BYTES = 1 << 28
"""Of one array when decompressed."""

_TYPES = {
    "features": "float16", "change": "float32", "group": "int32", "nodes": "float32", "edges": "int64",
    "edge_values": "float32",
}  # fmt: skip
_MAX_HEADER = 1000


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays by name as one compressed file, atomically."""
    stream = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(stream, **named)
    write_bytes(path, stream.getvalue())


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Reads the arrays of `rlplace.agents.labels.Labels` by name.

    Raises:
        InputError: The file is damaged, or its arrays have other types, shapes or values than labels have.
    """
    payload = read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            arrays = {name: _array(archive, name) for name in _TYPES}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # zipfile, zlib and numpy raise anything for a damaged archive
        raise InputError(f"{path}: not a file of labels ({type(error).__name__}); remove it to have it made anew") from None
    _check(arrays, path)
    return arrays


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    entry = archive.getinfo(f"{name}.npy")
    if entry.file_size > MAX_ARRAY_BYTES:
        raise InputError(f"{name} has {entry.file_size} bytes, the limit is {MAX_ARRAY_BYTES}")
    with archive.open(entry) as member:
        data = member.read(MAX_ARRAY_BYTES + 1)
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise InputError(f"{name} is of version {version} of numpy's format")
    shape, columns_first, dtype = read(stream, max_header_size=_MAX_HEADER)
    if dtype != np.dtype(_TYPES[name]) or columns_first:
        raise InputError(f"{name} is not an array of {_TYPES[name]}")
    body = data[stream.tell() :]
    count = 1
    for size in shape:  # Python's integers do not overflow
        count *= int(size)
    if any(size < 0 for size in shape) or count * dtype.itemsize != len(body):
        raise InputError(f"{name} does not hold what its shape says")
    return np.frombuffer(body, dtype=dtype).reshape(shape).copy()


def _check(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    features, change, group, nodes = (arrays[name] for name in ("features", "change", "group", "nodes"))
    edges, values = arrays["edges"], arrays["edge_values"]
    fits = (
        features.ndim == 3
        and features.shape[2] == NUM_FEATURES
        and change.shape == group.shape == features.shape[:2]
        and nodes.ndim == 2
        and nodes.shape[1] == NUM_NODE_FEATURES
        and edges.ndim == values.ndim == 2
        and edges.shape == (2, len(values))
        and values.shape[1] == 2
    )
    if not fits:
        raise InputError(f"{path}: its arrays are not of the shapes of labels; remove it to have it made anew")
    count = len(nodes)
    if (edges < 0).any() or (edges >= count).any() or (group < -1).any() or (group >= count).any():
        raise InputError(f"{path}: names a group that its graph lacks; remove it to have it made anew")
    if not all(np.isfinite(array).all() for array in (features, nodes, values)) or np.isinf(change).any():
        raise InputError(f"{path}: holds numbers that are not finite; remove it to have it made anew")
