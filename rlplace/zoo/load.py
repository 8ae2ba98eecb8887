"""`load_model`: from a MODEL text to a module, its example inputs and its loss.

The models of the zoo by name. Each builder takes the batch, the sequence length and its own options.

A builder returns a module whose output is a dict with the key ``loss``, and its keyword inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, RlplaceError, show, unknown_name, whole_number
from rlplace.limits import MODULES
from rlplace.zoo.options import parse_options, split_spec
from rlplace.zoo.tabular import build_dlrm, build_lstm, build_mlp, build_moe_toy, build_transformer
from rlplace.zoo.vision import build_inception, build_nasnet, build_unet

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
    """

    module: nn.Module
    example_inputs: dict[str, Any] | tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor] | None
    name: str


_COUNTS = ("blocks", "branches", "cells", "depth", "experts", "layers", "nodes", "tables")
"""Options of zoo models that set the number of modules, each of which takes memory even on the meta device."""

_NO_MODELS = frozenset({*sys.stdlib_module_names, "numpy", "pip", "pkg_resources", "setuptools", "torch"})
"""Packages whose functions build no models, but could do anything else with the options of a foreign plan."""


def runs_code(spec: str) -> bool:
    """Whether a MODEL text names a user's own function, so that loading it runs the user's code."""
    kind, colon, rest = spec.partition(":")
    return bool(kind and colon and rest) and kind not in ("hf", "zoo")


def load_model(spec: str, *, batch: int = 8, seq: int = 512, dtype: str = "fp32", device: str = "meta") -> LoadedModel:
    """Builds the model that a MODEL text names.

    ``package.module:function`` and ``file.py:function`` import that module and call that function: this is the only place
    where rlplace runs code that a text names. Everything else that is loaded is data.

    Args:
        spec: ``hf:TYPE[,key=value...]`` (a transformers configuration, random weights), ``zoo:NAME[,key=value...]``,
            ``package.module:function[,key=value...]`` or ``file.py:function[,key=value...]``. Such a function returns a module,
            its example inputs and optionally a loss; it is given `batch` and `seq` if it takes parameters of these names.
        batch: Samples per step.
        seq: Sequence length, for models that have one.
        dtype: "fp32", "bf16", "fp16" or "fp64". A user's own function keeps its dtypes at "fp32".
        device: "meta" allocates no weights; "cpu" gives real random ones. A user's own function chooses its device.

    Returns:
        The model.

    Raises:
        InputError: Unknown type, name or option (with the nearest known one), or a value that does not fit the model.
        MissingError: The transformers extra is not installed.
    """
    from rlplace.graph.capture import DTYPES

    for name, size in (("batch", batch), ("seq", seq)):
        whole_number(size, name, 1, MAX_SIZE)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if device not in DEVICES:
        raise unknown_name("device for models", device, DEVICES)
    kind, colon, rest = spec.partition(":")
    if not colon or not rest or not kind:
        raise InputError(
            f"model {show(spec, 120)}: expected hf:TYPE, zoo:NAME, package.module:function or file.py:function, as in hf:gpt2"
        )
    if kind == "hf":
        from rlplace.zoo.transformers import load_transformers

        module, inputs, loss = load_transformers(rest, batch, seq, device)
    elif kind == "zoo":
        module, inputs, loss = *_load_zoo(rest, batch, seq, device), None
    else:
        module, inputs, loss = _load_function(kind, rest, batch, seq)
    kept = dtype == "fp32" and kind not in ("hf", "zoo")
    if not kept:
        target = getattr(torch, DTYPES[dtype])
        module = module.to(target)
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf.to(target) if leaf.is_floating_point() else leaf, inputs
        )
    return LoadedModel(module, inputs, loss, spec)


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
        raise InputError(f"zoo:{name}: cannot be built: {_first_line(error)}") from None
    return module, inputs


def function_and_options(source: str, rest: str, batch: int, seq: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A user's own function that a MODEL text names, and its arguments; importing it runs its module.

    Args:
        source: Text before the colon: a dotted module or a file.
        rest: Text after the colon: function and options.
        batch: Samples.
        seq: Sequence length.

    Raises:
        InputError: It is not found, or has no such option.
    """
    name, options = split_spec(rest)
    where = f"{source}:{name}"
    if not source.endswith(".py") and source.partition(".")[0] in _NO_MODELS:
        raise InputError(
            f"model {show(where)}: {show(source)} holds no function that returns a model and its inputs; write one"
        )
    module = _import(source)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise unknown_name(f"function of {source}", name, functions)
    parameters = inspect.signature(function).parameters
    defaults = {key: None if p.default is p.empty else p.default for key, p in parameters.items()}
    sizes = {"batch": batch, "seq": seq}
    for key in sizes.keys() - parameters.keys():
        if alike := [other for other in parameters if other.startswith(key) and other not in options]:
            raise InputError(
                f"model {show(where)}: its parameter {alike[0]} gets no --{key}, which goes to one named {key}; rename it, or "
                f"fix it by an option: {name},{alike[0]}=8"
            )
    values: dict[str, Any] = {key: size for key, size in sizes.items() if key in parameters}
    values |= parse_options(options, defaults, where)
    return function, values


def _load_function(source: str, rest: str, batch: int, seq: int) -> tuple[nn.Module, Any, Any]:
    function, values = function_and_options(source, rest, batch, seq)
    where = f"{source}:{split_spec(rest)[0]}"
    try:
        result = function(**values)
    except RlplaceError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"model {show(where)}: the function raised {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise InputError(
            f"model {show(where)}: the function must return (module, example_inputs) or (module, example_inputs, loss)"
        )
    inputs = result[1]
    loss = result[2] if len(result) == 3 else None
    if loss is not None and not callable(loss):
        raise InputError(f"model {show(where)}: the loss must be a function of the module's output")
    if not isinstance(inputs, Mapping):
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return result[0], dict(inputs) if isinstance(inputs, Mapping) else inputs, loss


def _import(source: str) -> Any:
    """Imports a dotted module, also from the current folder, or a Python file."""
    if source.endswith(".py"):
        path = Path(source)
        if not os.path.isfile(path):
            raise InputError(f"model {show(source)}: file not found")
        file_spec = importlib.util.spec_from_file_location(f"rlplace_model_{path.stem}", path)
        assert file_spec is not None and file_spec.loader is not None
        module = importlib.util.module_from_spec(file_spec)
        sys.modules[file_spec.name] = module
        run: Callable[[], Any] = lambda: file_spec.loader.exec_module(module)  # type: ignore[union-attr]  # noqa: E731
    else:
        module = None
        run = lambda: importlib.import_module(source)  # noqa: E731
    sys.path.insert(0, str(Path.cwd()))
    try:
        imported = run()
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise InputError(
                f"model {show(source)}: no module of this name; hf:, zoo:, package.module: or file.py: come first"
            ) from None
        raise InputError(f"model {show(source)}: its import fails: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"model {show(source)}: its import raised {type(error).__name__}: {_first_line(error)}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    return imported if module is None else module


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
