"""Contraction of ops, groups or vertices to parts: what crosses between parts, and which of it becomes one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def merged_edges(source: NDArray[Any], target: NDArray[Any], count: int, *weights: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Adds up parallel edges.

    Args:
        source: Integer [E], where each edge starts.
        target: Integer [E], where it ends.
        count: Number of nodes.
        *weights: Float [E] each.

    Returns:
        int64 [M] sources and targets, every pair once, by source and then target; the float64 [M] sums of each weight.
    """
    key, inverse = np.unique(source.astype(np.int64) * count + target, return_inverse=True)
    sums = (np.bincount(inverse, weights=weight, minlength=len(key)).astype(np.float64) for weight in weights)
    return key // max(count, 1), key % max(count, 1), *sums


def crossing(
    tensor: NDArray[Any], part: NDArray[Any], apart: NDArray[np.bool_], parts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct pairs of a tensor and a part that reads it from elsewhere, by tensor and then part.

    Args:
        tensor: Integer [E], what each reader reads.
        part: Integer [E], part of the reader.
        apart: bool [E], whether it is read outside of the part that holds it.
        parts: Number of parts.
    """
    pairs = np.unique(tensor[apart].astype(np.int64) * parts + part[apart])
    return pairs // max(parts, 1), pairs % max(parts, 1)


def alike(
    tensor: NDArray[np.int64], part: NDArray[np.int64], *keys: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[tuple[Any, ...]]]:
    """Finds the crossing tensors that can become one: those with equal keys that the same parts read.

    Args:
        tensor: int64 [P], from `crossing`.
        part: int64 [P], likewise.
        *keys: Integer [T] each, of all tensors, such as the part that makes each.

    Returns:
        int64 [K], the tensors that cross; int64 [K], the number of what each becomes, by first tensor; and for each number its
        keys and the tuple of its readers.
    """
    ids, first = np.unique(tensor, return_index=True)
    readers = part.tolist()
    rows: Iterable[tuple[Any, ...]] = zip(
        *(key[ids].tolist() for key in keys), pairwise([*first.tolist(), len(tensor)]), strict=True
    )
    known: dict[tuple[Any, ...], int] = {}
    number = [known.setdefault((*key, tuple(readers[begin:end])), len(known)) for *key, (begin, end) in rows]
    return ids, np.array(number, dtype=np.int64), list(known)
