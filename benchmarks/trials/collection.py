"""The collection: functions that return a model, its inputs and perhaps a loss; how a step of one is called."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError

OWN = Path(__file__).parent / "models"
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """A model of the collection.

    Attributes:
        spec: MODEL of the command line.
        build: The function.
        tolerance: How far figures may be off in units of the usual bounds; above 1 where the model itself rounds to bfloat16.
    """

    spec: str
    build: Callable[..., Any]
    tolerance: float

    @property
    def name(self) -> str:
        """Of the function."""
        return self.build.__name__

    @property
    def sized(self) -> bool:
        """True where the function takes the number of samples."""
        return "batch" in inspect.signature(self.build).parameters

    def make(self, seed: int, batch: int) -> tuple[nn.Module, Any, Loss | None]:
        """Returns model, inputs and loss, drawn with a seed."""
        torch.manual_seed(seed)
        model, inputs, *loss = self.build(batch=batch) if self.sized else self.build()
        whole = dict(inputs) if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return model, whole, loss[0] if loss else None


def call(model: Any, inputs: Any, loss: Loss | None) -> torch.Tensor:
    """Returns the loss of a call: of the loss function, else what the model returned or the ``loss`` or first part of it."""
    output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    if loss is not None:
        return loss(output)
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    return output[0] if type(output) in (tuple, list) else output.loss


def trials(paths: Sequence[Path] = (OWN,)) -> list[Trial]:
    """Returns all models of files, or of the Python files of folders.

    Raises:
        InputError: There is no such file, or it holds no function of a model.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    found = []
    for file in files:
        if not file.is_file():
            raise InputError(f"trials: {file} is no file; give a Python file or a folder of them")
        module = _load(file)
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if own and not name.startswith("_") and _buildable(function):
                found.append(Trial(f"{os.path.relpath(file)}:{name}", function, getattr(function, "tolerance", 1.0)))
    if not found:
        raise InputError(f"trials: no function in {', '.join(map(str, files)) or 'no files'} returns a model and its inputs")
    return found


def _buildable(function: Callable[..., Any]) -> bool:
    """Says whether it can be called with a batch or nothing; where it is not annotated it is called to see what it returns."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.default is p.empty and p.name != "batch" for p in parameters):
        return False
    if function.__module__.startswith("rlplace_trials_own"):
        return True
    torch.manual_seed(0)
    made = function(batch=8) if any(p.name == "batch" for p in parameters) else function()
    return isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)


def _load(file: Path) -> ModuleType:
    kind = "own" if file.resolve().parent == OWN else "given"
    spec = importlib.util.spec_from_file_location(f"rlplace_trials_{kind}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module
