"""The lines of a training script that lay a model out over the tensor axis, in torch's own styles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, show
from rlplace.runtime.export.asked import Asked
from rlplace.runtime.strategy.blocks import tied_names
from rlplace.runtime.strategy.capture import observe
from rlplace.runtime.strategy.model_layouts import BlockLayout

Wraps = list[tuple[list[str], str]]
"""Paths of blocks, and what is to be called for each of them as `block`."""


def tensor_wraps(asked: Asked) -> Wraps:
    """What `parallelize` does first.

    Args:
        asked: With a tensor axis.

    Raises:
        InputError: A layout is none of torch's styles.
    """
    assert asked.layouts is not None
    sequence, degree = asked.stage.sequence_parallel, asked.stage.axis("tensor")
    blocks: dict[str, list[str]] = {}
    entries = [f"{path}.{region.entry}" for path, b in asked.layouts.blocks.items() for region in b.regions if region.entry]
    watched = {name: asked.model.get_submodule(name) for name in (*asked.layouts.blocks, *entries)}
    calls = observe(asked.model, asked.inputs, watched).calls if sequence else {}
    for path, layout in asked.layouts.blocks.items():
        _check(asked, path, layout)
        blocks.setdefault(_styles(path, layout, calls, sequence), []).append(path)
    styled = [(paths, style) for style, paths in blocks.items()]
    for path in asked.layouts.vocabulary:
        unit: Any = asked.units[path]
        ids = isinstance(unit, nn.Embedding)
        if unit.weight.shape[0] % degree == 0:
            style = "RowwiseParallel(input_layouts=Replicate())" if ids else "ColwiseParallel(output_layouts=Replicate())"
            styled.append(([path], style))
    styled += _run_of_blocks(asked, calls) if sequence else []
    return [(paths, f'parallelize_module(block, mesh["tensor"], {style})') for paths, style in styled]


def numbered(paths: Sequence[str]) -> str:
    """Paths as a list of Python; neighbours that count up stand as one range."""

    def run(item: tuple[int, str]) -> tuple[Any, ...]:
        stem, _, number = item[1].rpartition(".")
        return (stem, int(number) - item[0]) if number.isdigit() else item

    texts = []
    for _, neighbours in groupby(enumerate(paths), run):
        names = [path for _, path in neighbours]
        stem, dot, first = names[0].rpartition(".")
        if len(names) > 1:
            texts.append(f'*(f"{stem}{dot}{{n}}" for n in range({first}, {int(first) + len(names)}))')
        else:
            texts.append(f'"{names[0]}"')
    return f"[{', '.join(texts)}]"


def _check(asked: Asked, path: str, layout: BlockLayout) -> None:
    if layout.draws:
        raise InputError(
            f"export: {path} draws random numbers, which torch's tensor-parallel styles draw alike on unlike parts"
        )
    for region in layout.regions:
        products = [product.module for product in (*region.columns, *region.rows)]
        strange = [name for name in products if type(asked.model.get_submodule(f"{path}.{name}")) is not nn.Linear]
        if strange or region.packed or region.stored:
            name = f"{path}.{(strange or [region.columns[0].module])[0]}"
            raise InputError(
                f"export: {show(name)} is no plain nn.Linear, or packs several weights, and torch's tensor-parallel styles cut "
                "nothing else; run the plan with rlplace.distribute, or plan with --space tensor=1"
            )
    held = [names for names in tied_names(asked.model) if any(name.startswith(f"{path}.") for name in names)]
    if held:
        raise InputError(f"export: {held[0][0]} is tied, and parallelize_module parts what is tied")


def _styles(path: str, layout: BlockLayout, calls: dict[str, Any], sequence: bool) -> str:
    styles: dict[str, str] = {name: "SequenceParallel()" for name in layout.positions if sequence}
    for region in layout.regions:
        alone = len(region.columns) == 1 and region.entry == region.columns[0].module
        if sequence and not alone:
            styles[region.entry] = _entry(calls[f"{path}.{region.entry}"], "Shard(1)", "Replicate()")
        for product in region.columns:
            styles[product.module] = "ColwiseParallel(input_layouts=Shard(1))" if sequence and alone else "ColwiseParallel()"
        for product in region.rows:
            styles[product.module] = "RowwiseParallel(output_layouts=Shard(1))" if sequence else "RowwiseParallel()"
    lines = (f'            "{name}": {style},' for name, style in styles.items())
    return "\n".join(["{", *lines, "        }"])


def _entry(call: tuple[tuple[Any, ...], dict[str, Any]], before: str, after: str, local: str = "") -> str:
    """The style that changes the one activation of a call, by position or by name."""
    args, kwargs = call
    if any(_is_activation(value) for value in args):
        given, wanted = (", ".join(to if _is_activation(v) else "None" for v in args) for to in (before, after))
        return f"PrepareModuleInput(input_layouts=({given},), desired_input_layouts=({wanted},){local})"
    name = next(name for name, value in kwargs.items() if _is_activation(value))
    given, wanted = f'{{"{name}": {before}}}', f'{{"{name}": {after}}}'
    return f"PrepareModuleInput(input_kwarg_layouts={given}, desired_input_kwarg_layouts={wanted}{local})"


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _run_of_blocks(asked: Asked, calls: dict[str, Any]) -> Wraps:
    """The first block of a stage takes its part of the sequence, the last gives the whole."""
    assert asked.layouts is not None
    firsts, lasts = [], []
    for stage in asked.pipeline.stages:
        held = asked.blocks_of(stage)
        inside = [path for path in held if path in asked.layouts.blocks]
        if not inside:
            continue
        if inside != held[held.index(inside[0]) : held.index(inside[-1]) + 1]:
            raise InputError("export: blocks without a layout stand between those that split the sequence")
        firsts.append(inside[0])
        lasts.append(inside[-1])
    parts = _entry(calls[firsts[0]], "Replicate()", "Shard(1)", ", use_local_output=True")
    whole = "PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))"
    return [(firsts, parts), (lasts, whole)]
