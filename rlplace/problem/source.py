"""The free-form `source` of problem and plan files: what other rooms read of it is of the right kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.errors import InputError, show

_OBJECTS = ("graph", "costs", "capture", "op_times")
_TEXTS = ("cluster", "cluster_fingerprint", "graph_fingerprint", "level", "host")


def check_source(source: Any, where: str) -> None:
    """Checks the `source` of a parsed file.

    Raises:
        InputError: It is no object, or an entry that says how the problem was made is of another kind than rlplace writes.
    """
    if not isinstance(source, Mapping):
        raise InputError(f"{where}: source: expected an object")
    for key in _OBJECTS:
        if not isinstance(source.get(key), (Mapping, type(None))):
            raise InputError(f"{where}: source.{key}: expected an object, found {show(source[key])}")
    for key in _TEXTS:
        if not isinstance(source.get(key), (str, type(None))):
            raise InputError(f"{where}: source.{key}: expected text, found {show(source[key])}")
    for kind, shares in (source.get("op_times") or {}).items():
        numbers = isinstance(shares, Mapping) and all(type(share) in (int, float) for share in shares.values())
        if not numbers:
            raise InputError(f"{where}: source.op_times: {show(kind)}: expected shares by basis, found {show(shares)}")
