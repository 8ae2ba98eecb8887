"""`load_model`: from a MODEL text to a module, its example inputs and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, show, unknown_name, whole_number
from rlplace.limits import MODULES
from rlplace.model.torch_adapter import pytree
from rlplace.model.zoo.functions import call_function, first_line, parse_options, split_spec
from rlplace.model.zoo.models import (
    build_dlrm,
    build_inception,
    build_lstm,
    build_mlp,
    build_moe_toy,
    build_nasnet,
    build_transformer,
    build_unet,
)

BUILDERS: dict[str, Callable[..., tuple[nn.Module, dict[str, Any]]]] = {
    "dlrm": build_dlrm,
    "inception": build_inception,
    "lstm": build_lstm,
    "mlp": build_mlp,
    "moe_toy": build_moe_toy,
    "nasnet": build_nasnet,
    "transformer": build_transformer,
    "unet": build_unet,
}


DEVICES = ("meta", "cpu")
MAX_SIZE = 1 << 24
"""Largest accepted batch and sequence length."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be captured.

    Attributes:
        module: The module, in training mode.
        example_inputs: Keyword inputs (dict) or positional inputs (tuple) of one training step, on the CPU.
        loss: Function of the output, None when the output carries its loss.
        name: The MODEL text that it was loaded from.
        fixed: Samples that a user's own function gives whatever is asked; None where it gives as many as are asked for.
    """

    module: nn.Module
    example_inputs: dict[str, Any] | tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor] | None
    name: str
    fixed: int | None = None


_COUNTS = ("blocks", "branches", "cells", "depth", "experts", "layers", "nodes", "tables")
"""Options of zoo models that set the number of modules, each of which takes memory even on the meta device."""


def load_model(
    spec: str, *, batch: int | None = None, seq: int = 512, dtype: str = "fp32", device: str = "meta", resize: bool = False
) -> LoadedModel:
    """Builds the model that a MODEL text names.

    A text ``package.module:function`` or ``file.py:function`` runs code, the user's own (`rlplace.model.zoo.functions`);
    everything else that is loaded is data.

    Args:
        spec: ``hf:TYPE[,key=value...]`` (a transformers configuration, random weights), ``zoo:NAME[,key=value...]``,
            ``package.module:function[,key=value...]`` or ``file.py:function[,key=value...]``. Such a function returns a module,
            its example inputs and optionally a loss; it is given `batch` and `seq` if it takes parameters of these names.
        batch: Samples per step; None: 8, or as many as a function gives that has no parameter `batch`.
        seq: Sequence length, for models that have one.
        dtype: "fp32", "bf16", "fp16" or "fp64". A user's own function keeps its dtypes at "fp32".
        device: "meta" allocates no weights; "cpu" gives real random ones. A user's own function chooses its device.
        resize: Inputs of a function that gives a fixed number of samples are cut or repeated to `batch`, and not refused.

    Returns:
        The model.

    Raises:
        InputError: Unknown type, name or option (with the nearest known one), a value that does not fit the model, or a
            function that gives another number of samples.
        MissingError: The transformers extra is not installed.
    """
    from rlplace.model.capture.capture import DTYPES

    for name, size in (("batch", 8 if batch is None else batch), ("seq", seq)):
        whole_number(size, name, 1, MAX_SIZE)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if device not in DEVICES:
        raise unknown_name("device for models", device, DEVICES)
    kind, colon, rest = spec.partition(":")
    fixed: int | None = None
    if not colon or not rest or not kind:
        file = spec.partition(",")[0]
        like = f"hf:{file}" if file.endswith(".json") or "/" in file else "hf:gpt2"
        raise InputError(
            f"model {show(spec, 120)}: expected hf:TYPE, zoo:NAME, package.module:function or file.py:function, as in {like}"
        )
    if kind == "hf":
        from rlplace.model.zoo.transformers import load_transformers

        module, inputs, loss = load_transformers(rest, 8 if batch is None else batch, seq, device)
    elif kind == "zoo":
        module, inputs, loss = *_load_zoo(rest, 8 if batch is None else batch, seq, device), None
    else:
        made = call_function(kind, rest, batch, seq, resize=resize)
        module, inputs, loss, fixed = made.module, made.inputs, made.loss, made.fixed
    kept = dtype == "fp32" and kind not in ("hf", "zoo")
    if not kept:
        target = getattr(torch, DTYPES[dtype])
        module = module.to(target)
        inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(target) if leaf.is_floating_point() else leaf, inputs)
    return LoadedModel(module, inputs, loss, spec, fixed)


def _load_zoo(text: str, batch: int, seq: int, device: str) -> tuple[nn.Module, dict[str, Any]]:
    name, options = split_spec(text)
    if name not in BUILDERS:
        raise unknown_name("zoo model", name, BUILDERS)
    build = BUILDERS[name]
    defaults = {key: p.default for key, p in inspect.signature(build).parameters.items() if key not in ("batch", "seq")}
    values = parse_options(options, defaults, f"zoo:{name}")
    for key, value in values.items():
        most = MODULES if key in _COUNTS else MAX_SIZE
        if isinstance(value, int) and not isinstance(value, bool) and key != "seed" and not 1 <= value <= most:
            raise InputError(f"zoo:{name}: option {key} must be from 1 to {most}, found {show(value)}")
    try:
        with torch.device(device):
            module, inputs = build(batch=batch, seq=seq, **values)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise InputError(f"zoo:{name}: cannot be built: {first_line(error)}") from None
    return module, inputs
