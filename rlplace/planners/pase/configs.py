"""Configurations of a layer: every way to cut its dimensions over at most p devices.

A dimension of size n may be cut into e equal parts when e divides n and a part has at least `smallest_part` iterations; parts
are not only powers of two. Order: lexicographic, the first dimension slowest, the uncut configuration first.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rlplace.errors import InputError
from rlplace.planners.pase.layers import Layer, LayerGraph
from rlplace.planners.pase.terms import Dim, IntArray


def configurations(layer: Layer, devices: int, smallest_part: int = 1) -> IntArray:
    """Legal configurations of a layer.

    Returns:
        Array of shape (configurations, dimensions).

    Raises:
        InputError: Fewer than one device.
    """
    if devices < 1:
        raise InputError(f"cannot split layers over {devices} devices; give at least 1")
    rows = _rows(tuple(cuts(dim, devices, smallest_part) for dim in layer.dims), devices)
    if layer.allows is not None:
        rows = tuple(row for row in rows if layer.allows(layer.sizes(), row))
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(layer.dims))


def all_configurations(graph: LayerGraph, devices: int) -> list[IntArray]:
    """Legal configurations of every layer of a graph."""
    return [configurations(layer, devices, graph.smallest_part) for layer in graph.layers]


def cuts(dim: Dim, devices: int, smallest_part: int) -> tuple[int, ...]:
    """Numbers of parts that a dimension may be cut into, ascending; 1 is always one of them."""
    if not dim.splittable:
        return (1,)
    most = min(devices, dim.size // max(1, smallest_part))
    return (1, *(parts for parts in range(2, most + 1) if dim.size % parts == 0))


@lru_cache(maxsize=4096)
def _rows(cuts: tuple[tuple[int, ...], ...], devices: int) -> tuple[tuple[int, ...], ...]:
    """Products of cuts that need no more than `devices`; cached because layers repeat."""
    rows: list[tuple[tuple[int, ...], int]] = [((), 1)]
    for options in cuts:
        rows = [((*row, parts), used * parts) for row, used in rows for parts in options if used * parts <= devices]
    return tuple(row for row, _ in rows)
