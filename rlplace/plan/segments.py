"""Proposes what to recompute: the repeated modules of a model as sets of groups."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from rlplace.errors import InputError, whole_number
from rlplace.problem import Problem


def layer_segments(problem: Problem, *, layers: int | None = 1, depth: int = 1) -> list[list[int]]:
    """Segments for `recompute`: the groups of every numbered module, such as ``transformer.h.3``.

    A group counts to the module that most of its ops are in. Groups outside of any, such as embeddings and the loss, are left
    out; so is a module that no group is mostly in, when groups are larger than modules.

    Args:
        problem: Priced from a graph, or with group names that are module paths.
        layers: Consecutive modules of one list that make a segment; None for the square root of their number, which needs the
            least memory when they are equal.
        depth: Which number of a module path counts: 1 for the outermost list of modules, 2 for the lists in its modules.

    Returns:
        Disjoint lists of group numbers, in order of their first group.

    Raises:
        InputError: No group lies in a numbered module, or an argument is no positive count.
    """
    for name, value in (("layers", layers), ("depth", depth)):
        if value is not None:
            whole_number(value, f"layer_segments: {name}", 1)
    groups_of: dict[str, dict[str, list[int]]] = {}  # by list of modules, then by module
    for group in range(problem.num_groups):
        counts = Counter(_layer(path, depth) for path in _paths(problem, group))
        layer = counts.most_common(1)[0][0]
        if layer is not None:
            groups_of.setdefault(layer.rpartition(".")[0], {}).setdefault(layer, []).append(group)
    if not groups_of:
        raise InputError(
            f"layer_segments: no group lies in {depth} numbered module(s); list the group numbers of segments yourself"
        )
    segments = []
    for groups_of_layer in groups_of.values():
        rows = list(groups_of_layer.values())
        size = max(1, round(math.sqrt(len(rows)))) if layers is None else layers
        segments += [sorted(itertools.chain(*rows[i : i + size])) for i in range(0, len(rows), size)]
    return sorted(segments)


def _paths(problem: Problem, group: int) -> list[str]:
    """Module paths of a group's ops; those that it names, or its name, where a problem file did not keep the ops."""
    if problem.group_ops is not None and problem.group_ops[group]:
        return [name.rpartition("/")[0] for name in problem.group_ops[group]]
    if problem.group_modules is not None and problem.group_modules[group]:
        return list(problem.group_modules[group])
    return [problem.group_names[group].partition("#")[0]]


def _layer(path: str, depth: int) -> str | None:
    """The path up to its `depth`-th number."""
    parts = path.split(".")
    for end, part in enumerate(parts, start=1):
        depth -= part.isdigit()
        if depth == 0:
            return ".".join(parts[:end])
    return None
