"""MODEL texts: their options, and a person's own function that returns a model, called and checked.

Options, ``NAME,key=value,...``, are parsed against the type of a default value. ``package.module:function`` and
``file.py:function`` import that module and call that function: this is the only place where rlplace runs code that a text
names.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, RlplaceError, show, unknown_name
from rlplace.model.capture.inputs import resize_batch, rows_of

if TYPE_CHECKING:
    from torch import nn

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """Splits ``name,key=value,...`` into the name and its options.

    Raises:
        InputError: An option has no ``=``, no name, or appears twice.
    """
    name, *parts = text.split(",")
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"model {show(text, 120)}: expected key=value after the name, found {show(part, 40)}")
        if key in options:
            raise InputError(f"model {show(text, 120)}: option {show(key)} appears twice")
        options[key] = value.strip()
    return name.strip(), options


def config_file(model: str) -> Path | None:
    """Returns the configuration that ``hf:PATH[,key=value...]`` names, a JSON file or a folder with a ``config.json``; None: no
    path.

    Args:
        model: MODEL text.
    """
    kind, _, rest = model.partition(":")
    name = rest.partition(",")[0].strip()
    path = Path(name)
    if kind != "hf" or not ("/" in name or name.endswith(".json")):
        return None
    return path / "config.json" if path.is_dir() else path if path.is_file() else None


def parse_options(
    options: Mapping[str, str], defaults: Mapping[str, Any], where: str, extra: Iterable[str] = ()
) -> dict[str, Any]:
    """Parses option texts against the types of their defaults.

    Args:
        options: Texts by name.
        defaults: All known options with a value of the right type; None accepts any number, truth value or text.
        where: Model of the options, for messages.
        extra: Further known names, without a default.

    Returns:
        Values by name, only for the options in `options`.

    Raises:
        InputError: Unknown option (with the nearest known one), or a text that is not of the right type.
    """
    known = {**dict.fromkeys(extra), **defaults}
    result = {}
    for key, text in options.items():
        if key not in known:
            raise unknown_name(f"option of {where}", key, known)
        result[key] = _parse(text, known[key], f"{where}: option {key}")
    return result


def _parse(text: str, default: Any, where: str) -> Any:
    if isinstance(default, bool):
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InputError(f"{where}: {show(text, 40)} is not true or false")
        return text.lower() in _TRUE
    if isinstance(default, int):
        return _number(text, int, where, "a whole number")
    if isinstance(default, float):
        return _number(text, float, where, "a number")
    if isinstance(default, str):
        return text
    if isinstance(default, (list, tuple)):
        like = default[0] if default else None
        return type(default)(_parse(item, like, where) for item in text.split("/"))
    if default is None:
        return guessed(text)
    raise InputError(f"{where}: cannot be given as text (it is a {type(default).__name__})")


def _number(text: str, kind: type[Any], where: str, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise InputError(f"{where}: {show(text, 40)} is not {what}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise InputError(f"{where}: {show(text, 40)} is not finite")
    return value


def guessed(text: str) -> Any:
    """Returns a text as a number, a truth value, None or text, by its form."""
    lower = text.lower()
    if lower in ("none", "null"):
        return None
    if lower in ("true", "false"):
        return lower == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


PAGE = "docs/quickstart.md, A model of your own"
"""Page of the documentation about such functions."""

_NO_MODELS = frozenset({*sys.stdlib_module_names, "numpy", "pip", "pkg_resources", "setuptools", "torch"})
"""Packages whose functions build no models, but could do anything else with the options of a foreign plan."""

_folders: list[str] = []
"""Folders whose modules the files that were loaded may import."""


@dataclass(frozen=True)
class Returned:
    """The checked result of a function.

    Attributes:
        module: The model.
        inputs: Keyword inputs (dict) or positional inputs (tuple).
        loss: Function of the output, or None.
        fixed: Samples that the function gives whatever is asked, before they were cut or repeated; None: those asked for.
    """

    module: nn.Module
    inputs: Any
    loss: Callable[[Any], Any] | None
    fixed: int | None


def runs_code(spec: str) -> bool:
    """Returns whether a MODEL text names a user's own function, so that loading it runs the user's code."""
    kind, colon, rest = spec.partition(":")
    return bool(kind and colon and rest) and kind not in ("hf", "zoo")


def function_and_options(source: str, rest: str, batch: int, seq: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Finds the function that a MODEL text names, and its arguments; importing it runs its module.

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


def takes_batch(spec: str) -> bool:
    """Returns whether a model is built for the samples that are asked for: all but a function without a free parameter
    `batch`.
    """
    source, _, rest = spec.partition(":")
    return not runs_code(spec) or _sized(rest, function_and_options(source, rest, 8, 512)[1])


def fixed_samples(spec: str, seq: int) -> int | None:
    """Samples that a function gives which is not given their number; None where it, or a model by name, gives as many as asked.

    Args:
        spec: MODEL text.
        seq: Sequence length.
    """
    if takes_batch(spec):
        return None
    source, _, rest = spec.partition(":")
    return call_function(source, rest, None, seq).fixed


def _sized(rest: str, values: Mapping[str, Any]) -> bool:
    return "batch" in values and "batch" not in split_spec(rest)[1]


def call_function(source: str, rest: str, batch: int | None, seq: int, *, resize: bool = False) -> Returned:
    """Calls the function that a MODEL text names.

    Args:
        source: Text before the colon.
        rest: Text after the colon.
        batch: Samples; None: 8, or as many as a function gives that is not given their number.
        seq: Sequence length.
        resize: Inputs of a fixed number of samples are cut or repeated to `batch`, and not refused.

    Raises:
        InputError: It fails, returns something else than a model and its inputs, or another number of samples.
    """
    from torch import nn

    function, values = function_and_options(source, rest, batch or 8, seq)
    where = f"model {show(f'{source}:{split_spec(rest)[0]}')}"
    try:
        result = function(**values)
    except RlplaceError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: the function raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise InputError(
            f"{where}: the function must return (module, example_inputs) or (module, example_inputs, loss), found "
            f"{_kind(result)} ({PAGE})"
        )
    inputs, loss = result[1], result[2] if len(result) == 3 else None
    if loss is not None and not callable(loss):
        raise InputError(f"{where}: the loss must be a function of the module's output, found {_kind(loss)}")
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    else:
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    samples, sized = rows_of(inputs), _sized(rest, values)
    if not samples:
        raise InputError(
            f"{where}: its example inputs hold no tensor, found {_kind(result[1])}; return a dict of tensors by the names of "
            f"the forward's arguments, or a tuple of tensors ({PAGE})"
        )
    if sized and samples != values["batch"]:
        raise InputError(
            f"{where}: asked for batch={values['batch']} it gives {samples} samples, the rows of the first tensor of its "
            f"inputs; put a tensor with batch rows first ({PAGE})"
        )
    if not sized and batch not in (None, samples):
        if not resize:
            raise InputError(fixed_line(f"{source}:{rest}", samples, f"{batch} cannot be had"))
        inputs = resize_batch(inputs, samples, batch or samples)
    return Returned(result[0], inputs, loss, None if sized else samples)


def fixed_line(spec: str, samples: int, then: str) -> str:
    """Returns the line about a function that is not given the number of samples.

    Args:
        spec: MODEL text.
        samples: The samples that it gives.
        then: The consequence.
    """
    return (
        f"model {show(spec)} gives {samples} sample{'s' if samples > 1 else ''} whatever is asked: {then}; give the function a "
        f"parameter batch for other numbers ({PAGE})"
    )


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value[:6]) or 'nothing'}"
    return type(value).__name__


def _import(source: str) -> Any:
    """Imports a dotted module, also from the current folder, or a Python file, which sees the files beside it.

    The folder stays importable, for the module's code may import more when it runs.
    """
    if source.endswith(".py"):
        path = Path(source)
        if not os.path.isfile(path):
            raise InputError(f"model {show(source)}: file not found")
        _make_importable(str(path.resolve().parent))
        file_spec = importlib.util.spec_from_file_location(f"rlplace_model_{path.stem}", path)
        assert file_spec is not None and file_spec.loader is not None
    else:
        file_spec = None
        _make_importable(str(Path.cwd()))
    try:
        if file_spec is None:
            return importlib.import_module(source)
        module = sys.modules[file_spec.name] = importlib.util.module_from_spec(file_spec)
        file_spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise InputError(
                f"model {show(source)}: no module of this name; hf:, zoo:, package.module: or file.py: come first"
            ) from None
        raise InputError(f"model {show(source)}: its import fails: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"model {show(source)}: its import raised {type(error).__name__}: {first_line(error)}") from error


def _make_importable(folder: str) -> None:
    """Puts a folder first on the path, as Python does with that of a script.

    Modules that another such folder gave make room for those of the same name that lie here.
    """
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    for name, module in [*sys.modules.items()]:
        home = os.path.dirname(os.path.abspath(getattr(module, "__file__", None) or os.sep))
        home = os.path.dirname(home) if hasattr(module, "__path__") else home
        if "." not in name and home != folder and home in _folders:
            if any(os.path.exists(os.path.join(folder, end)) for end in (f"{name}.py", os.path.join(name, "__init__.py"))):
                for inner in [inner for inner in sys.modules if inner.partition(".")[0] == name]:
                    del sys.modules[inner]
    if folder not in _folders:
        _folders.append(folder)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that is not empty, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
