"""The lines of a training script that build the model, make its batches and take its loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlplace.errors import InputError
from rlplace.exporting.asked import Asked
from rlplace.graph.capture import DTYPES
from rlplace.zoo.load import function_and_options, runs_code
from rlplace.zoo.options import split_spec


def model_text(asked: Asked) -> tuple[str, str]:
    """The import line of the model, and the functions `build_model` and `whole_batch`."""
    spec = asked.recipe.model
    kind, _, rest = spec.partition(":")
    if runs_code(spec):
        return _of_function(asked, kind, rest)
    return _of_configuration(asked, rest)


def _of_configuration(asked: Asked, rest: str) -> tuple[str, str]:
    model, config = type(asked.model).__name__, type(asked.model.config).__name__  # type: ignore[union-attr]
    options = split_spec(rest)[1]
    if "gradient_checkpointing" in options:
        raise InputError("export: the MODEL text recomputes (gradient_checkpointing); leave that to the plan")
    own: Any = asked.model.config
    values = {key: own._attn_implementation if key == "attn_implementation" else getattr(own, key) for key in options}
    fresh = type(own)(**values)
    lines = [f"    config = {config}({', '.join(f'{key}={value!r}' for key, value in values.items())})"]
    for key in ("use_cache", "decoder_start_token_id"):
        if getattr(own, key, None) != getattr(fresh, key, None):
            lines.append(f"    config.{key} = {getattr(own, key)!r}")
    cast = "" if asked.recipe.dtype == "fp32" else f".to(torch.{DTYPES[asked.recipe.dtype]})"
    lines += [f"    return {model}(config){cast}.train()"]
    text = own.get_text_config(decoder=True) if hasattr(own, "get_text_config") else own
    return f"from transformers import {config}, {model}", _build(asked, lines) + _random_batch(asked.inputs, text)


def _build(asked: Asked, lines: list[str]) -> str:
    head = [
        "",
        "def build_model():",
        '    """The model with random weights, which depend on the seed alone."""',
        "    torch.manual_seed(SEED)",
    ]
    return "\n".join([*head, *lines]) + "\n\n"


def _random_batch(inputs: Mapping[str, Any], config: Any) -> str:
    lines, seen = [], dict[int, str]()
    for name, value in inputs.items():
        if id(value) in seen:
            continue
        seen[id(value)] = name
        shape = f"(BATCH, {', '.join(map(str, value.shape[1:]))})" if value.dim() > 1 else "(BATCH,)"
        if value.is_floating_point():
            made = f"torch.rand({shape}, generator=random, dtype={value.dtype})"
        else:
            bound = config.num_labels if value.dim() == 1 else config.vocab_size
            made = f"torch.randint({bound}, {shape}, generator=random)"
        lines.append(f"    {name} = {made}")
    returned = ", ".join(f'"{name}": {seen[id(value)]}' for name, value in inputs.items())
    return _batch(["    random = torch.Generator().manual_seed(step)", *lines, f"    return {{{returned}}}"], "Random samples")


def _batch(lines: list[str], what: str) -> str:
    text = f'    """{what} where your data goes: the whole batch of a step, the same on every process."""'
    return "\n".join(["", "def whole_batch(step):", text, *lines]) + "\n\n"


def _of_function(asked: Asked, source: str, rest: str) -> tuple[str, str]:
    function, values = function_and_options(source, rest, asked.pipeline.microbatch[0], asked.recipe.seq)
    call = f"{function.__name__}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
    samples = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in asked.inputs.values()}
    if len(samples) > 1 or None in samples:
        raise InputError("export: inputs of the model are no tensors of so many samples; run the plan with rlplace.distribute")
    cast = "" if asked.recipe.dtype == "fp32" else f".to(torch.{DTYPES[asked.recipe.dtype]})"
    made, names = function(**values)[1], json.dumps(list(asked.inputs))
    given = f"dict(zip({names}, {'inputs' if isinstance(made, (tuple, list)) else '[inputs]'}))"
    given = "inputs" if isinstance(made, Mapping) else given
    value = f"(value{cast} if value.is_floating_point() else value)" if cast else "value"
    batch = [
        "    with torch.random.fork_rng(devices=[]):",
        "        torch.manual_seed(SEED)",
        f"        inputs = {call}[1]",
        f"    rows = torch.randint({samples.pop()}, (BATCH,), generator=torch.Generator().manual_seed(step))",
        f"    return {{name: {value}[rows] for name, value in {given}.items()}}",
    ]
    module, folder = source, ""
    if source.endswith(".py"):
        module, folder = Path(source).stem, f'sys.path.insert(0, "{Path(source).parent}")\n'
    line = f"\n{folder}from {module} import {function.__name__}"
    loss = f"\nloss_of = {call}[2]\n\n" if asked.loss else ""
    return line, loss + _build(asked, [f"    return {call}[0]{cast}"]) + _batch(batch, "Samples of the example inputs")


def loss_text(asked: Asked) -> str:
    """The loss as an expression of `output`."""
    if asked.loss:
        return "loss_of(output)"
    if isinstance(asked.output, torch.Tensor):
        return "output"
    return 'output["loss"]' if isinstance(asked.output, dict) and not hasattr(asked.output, "loss") else "output.loss"
