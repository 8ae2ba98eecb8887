"""What a training script builds its model with, takes its batches from, and has as loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, show
from rlplace.model.capture.capture import DTYPES
from rlplace.model.zoo.functions import function_and_options, runs_code
from rlplace.model.zoo.options import config_file, split_spec
from rlplace.model.zoo.transformers import read_config
from rlplace.runtime.export.asked import Asked
from rlplace.runtime.strategy.blocks import tied_names
from rlplace.runtime.strategy.capture import observe
from rlplace.runtime.strategy.model_layouts import BlockLayout


def model_text(asked: Asked) -> dict[str, Any]:
    """Returns values of the template: import line of the model, lines of `build_model` and of `whole_batch`, and the loss."""
    _, _, rest = asked.recipe.model.partition(":")
    cast = "" if asked.recipe.dtype == "fp32" else f".to(torch.{DTYPES[asked.recipe.dtype]})"
    made = _of_function(asked, cast) if runs_code(asked.recipe.model) else _of_configuration(asked, rest, cast)
    return {**made, "loss": loss_text(asked)}


def _of_configuration(asked: Asked, rest: str, cast: str) -> dict[str, Any]:
    own: Any = asked.model.config
    model, config, options = type(asked.model).__name__, type(own).__name__, split_spec(rest)[1]
    if "gradient_checkpointing" in options:
        raise InputError("export: the MODEL text recomputes (gradient_checkpointing); leave that to the plan")
    if asked.loss or any("." in key for key in options):
        what = "computes no loss of its own" if asked.loss else "sets options of configurations inside its own"
        raise InputError(f"export: {asked.recipe.model[:80]} {what}, which a script does not say; use rlplace.distribute")
    values = {key: own._attn_implementation if key == "attn_implementation" else getattr(own, key) for key in options}
    if config_file(asked.recipe.model) is not None:
        named, plain = read_config(split_spec(rest)[0], ())[1], type(own)().to_dict()
        values = {key: value for key, value in named.items() if plain.get(key) != value and key != "architectures"} | values
    fresh = type(own)(**values)
    lines = [f"config = {config}({_arguments(values)})"]
    for key in ("use_cache", "decoder_start_token_id"):
        if getattr(own, key, None) != getattr(fresh, key, None):
            lines.append(f"config.{key} = {getattr(own, key)!r}")
    text = own.get_text_config(decoder=True) if hasattr(own, "get_text_config") else own
    return {
        "also": " and transformers",
        "model_import": f"from transformers import {config}, {model}",
        "build": [*lines, f"return {model}(config){cast}.train()"],
        "what": "Random samples",
        "batch": _random_batch(asked.inputs, text),
    }


def _random_batch(inputs: Mapping[str, Any], config: Any) -> list[str]:
    lines, seen = ["random = torch.Generator().manual_seed(step)"], dict[int, str]()
    for name, value in inputs.items():
        if seen.setdefault(id(value), name) != name:
            continue
        shape = f"(BATCH, {', '.join(map(str, value.shape[1:]))})" if value.dim() > 1 else "(BATCH,)"
        if value.is_floating_point():
            made = f"torch.rand({shape}, generator=random, dtype={value.dtype})"
        else:
            bound = config.num_labels if value.dim() == 1 else config.vocab_size
            made = f"torch.randint({bound}, {shape}, generator=random)"
        lines.append(f"{name} = {made}")
    returned = ", ".join(f'"{name}": {seen[id(value)]}' for name, value in inputs.items())
    return [*lines, f"return {{{returned}}}"]


def _of_function(asked: Asked, cast: str) -> dict[str, Any]:
    source, _, rest = asked.recipe.model.partition(":")
    function, values = function_and_options(source, rest, asked.pipeline.microbatch[0], asked.recipe.seq)
    call = f"{function.__name__}({_arguments(values)})"
    samples = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in asked.inputs.values()}
    if len(samples) > 1 or None in samples:
        raise InputError("export: inputs of the model are no tensors of so many samples; run the plan with rlplace.distribute")
    made = function(**values)[1]
    listed = "inputs" if isinstance(made, (tuple, list)) else "[inputs]"
    given = "inputs" if isinstance(made, Mapping) else f"dict(zip({json.dumps(list(asked.inputs))}, {listed}))"
    value = f"(value{cast} if value.is_floating_point() else value)" if cast else "value"
    module, folder = source, ""
    if source.endswith(".py"):
        module, folder = Path(source).stem, f'sys.path.insert(0, "{Path(source).parent}")\n'
    return {
        "model_import": f"\n{folder}from {module} import {function.__name__}",
        "own_loss": f"{call}[2]" if asked.loss else None,
        "build": [f"return {call}[0]{cast}"],
        "what": "Samples of the example inputs",
        "batch": [
            "with torch.random.fork_rng(devices=[]):",
            "    torch.manual_seed(SEED)",
            f"    inputs = {call}[1]",
            f"rows = torch.randint({samples.pop()}, (BATCH,), generator=torch.Generator().manual_seed(step))",
            f"return {{name: {value}[rows] for name, value in {given}.items()}}",
        ],
    }


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def loss_text(asked: Asked) -> str:
    """Returns the loss as an expression of `output`."""
    if asked.loss:
        return "loss_of(output)"
    if isinstance(asked.output, torch.Tensor):
        return "output"
    return 'output["loss"]' if isinstance(asked.output, dict) and not hasattr(asked.output, "loss") else "output.loss"


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
    """Returns paths as a list of Python; neighbours that count up stand as one range."""

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
    """Returns the style that changes the one activation of a call, by position or by name."""
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
    """Returns the first block of a stage takes its part of the sequence, the last gives the whole."""
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
