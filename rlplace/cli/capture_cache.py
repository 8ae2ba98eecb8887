"""A cache of captures: the same `hf:` or `zoo:` model is traced once on a machine.

Entries are files in ``$XDG_CACHE_HOME/rlplace`` (``~/.cache/rlplace``), or in the folder that ``RLPLACE_CACHE`` names (0: no
cache). Their names are digests of the request and of everything that decides the answer: versions of torch and transformers,
and the sources of this package. Models of a user's own code are never cached, since their dependencies are unknown.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlplace.files import cache_folder, read_bytes
from rlplace.limits import CONFIG_BYTES
from rlplace.model.zoo.functions import config_file
from rlplace.plugins import version_of

T = TypeVar("T")

MOST_ENTRIES = 64
"""Limit of the number of entries; the oldest are deleted."""


def cached(kind: str, model: str, asked: Mapping[str, Any], make: Callable[[], T]) -> T:
    """Returns the result of `make`, from an earlier command where one asked for the same.

    Args:
        kind: Name of the function of the model.
        model: MODEL of the command line.
        asked: Everything else that decides the result; plain values.
        make: Computes it; the result must pickle.
    """
    folder = cache_folder()
    if not model.startswith(("hf:", "zoo:")) or folder is None:
        return make()
    file = config_file(model)
    if file is not None and not file.is_file():
        return make()
    content = "" if file is None else hashlib.sha256(read_bytes(file, CONFIG_BYTES)).hexdigest()
    key = json.dumps([kind, model, sorted(asked.items()), _versions(), content])
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.pickle"
    with contextlib.suppress(Exception):  # an entry that cannot be read is made again
        if all(at.stat().st_uid == os.geteuid() and not at.stat().st_mode & 0o022 for at in (path, path.parent)):
            found: T = pickle.loads(path.read_bytes())
            path.touch()
            return found
    result = make()
    with contextlib.suppress(OSError):  # a cache that cannot be written is no error
        _write(path, pickle.dumps(result))
    return result


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.touch(0o600)
    part.write_bytes(data)
    part.replace(path)
    entries = sorted(path.parent.glob("*.pickle"), key=lambda entry: entry.stat().st_mtime)
    for old in entries[:-MOST_ENTRIES]:
        old.unlink(missing_ok=True)


@functools.cache
def _versions() -> list[Any]:
    root = Path(__file__).resolve().parents[1]
    sources = [
        (str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*.py"))
    ]
    return [*map(version_of, ("rlplace", "torch", "transformers")), hashlib.sha256(json.dumps(sources).encode()).hexdigest()]
