"""What a training script builds its model with, takes its batches from, and has as loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlplace.errors import InputError
from rlplace.model.capture.capture import DTYPES
from rlplace.model.zoo.functions import function_and_options, runs_code
from rlplace.model.zoo.options import config_file, split_spec
from rlplace.model.zoo.transformers import read_config
from rlplace.runtime.export.asked import Asked


def model_text(asked: Asked) -> dict[str, Any]:
    """Values of the template: import line of the model, lines of `build_model` and of `whole_batch`, and the loss."""
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
    """The loss as an expression of `output`."""
    if asked.loss:
        return "loss_of(output)"
    if isinstance(asked.output, torch.Tensor):
        return "output"
    return 'output["loss"]' if isinstance(asked.output, dict) and not hasattr(asked.output, "loss") else "output.loss"
