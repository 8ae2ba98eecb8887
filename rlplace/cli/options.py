"""The options of a verb as one record: a field declares an argument of the parser, its type, its default and its help.

And what verbs print: messages on stderr, results on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import get_annotations
from typing import Any, ClassVar, Self, TypeVar

from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.text import table

T = TypeVar("T")

CHOSEN = tuple(sorted(OPTIMIZERS))
DTYPES = ("fp32", "bf16", "fp16")
AUTOCAST = ("bf16", "fp16")
HOST_MODES = ("eager", "compiled")
MODEL = "hf:TYPE, zoo:NAME, package.module:function or file.py:function (runs that code)"

MICROBATCH = 8
"""Default number of samples of a micro-batch."""


def _whole(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} up")
    return value


def _number(what: str, text: str, below: float = 1e9, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < below or (zero and value == 0)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
    return value


positive, natural = partial(_whole, 1), partial(_whole, 0)
"""Parsers of a whole number from 1 up, and from 0 up."""

seconds, rate = partial(_number, "a positive number of seconds"), partial(_number, "a positive number")
"""Parsers of a positive time, and of a positive number such as a learning rate or a norm."""

share = partial(_number, "a share from 0 to below 1", below=1.0, zero=True)
"""Parser of a share from 0 to below 1."""


def argument(metavar: str, help: str, nargs: str | None = None) -> Any:
    """Declares a positional argument; its default is None where `nargs` makes it optional."""
    return field(metadata={"help": help, "metavar": metavar, "nargs": nargs})


def option(
    help: str,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    *,
    default: Any = None,
    name: str | None = None,
    group: str = "",
    **more: Any,
) -> Any:
    """Declares an option with a value.

    Args:
        help: What it does.
        parse: Parser of its text; None: the text.
        metavar: Placeholder of the value in help.
        default: Value where it is left out.
        name: Its name where it is not that of the field, with dashes.
        group: Title of its group in help.
        **more: Further arguments of argparse, such as `choices`, `nargs` and `required`.
    """
    more |= {} if parse is None else {"type": parse}
    more |= {} if metavar is None else {"metavar": metavar}
    return field(default=default, metadata={"help": help, "name": name, "group": group, **more})


def flag(help: str, group: str = "") -> Any:
    """Declares an option without a value."""
    return field(default=False, metadata={"help": help, "group": group, "action": "store_true"})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every verb, which runs with them.

    Attributes:
        HELP: What the verb does.
        EXAMPLE: Last line of its help.
    """

    HELP: ClassVar[str]
    EXAMPLE: ClassVar[str]

    debug: bool = flag("show the traceback of an error")
    json: bool = flag("print one JSON object")

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments to a parser: those of every verb, the verb's own, then groups that it shares."""
        bases = [base for base in cls.__mro__ if issubclass(base, Options)]
        groups: dict[str, Any] = {"": parser}
        for base in [bases[-1], *bases[:-1]]:
            for item in fields(base):
                if item.name not in get_annotations(base):
                    continue
                keywords = dict(item.metadata)
                if "group" not in keywords:
                    parser.add_argument(item.name, **keywords)
                    continue
                title, name = keywords.pop("group"), keywords.pop("name", None)
                if title not in groups:
                    groups[title] = parser.add_argument_group(title)
                groups[title].add_argument(name or _written(item.name), dest=item.name, default=item.default, **keywords)

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Self:
        """Returns the record of parsed arguments."""
        return cls(**{item.name: getattr(parsed, item.name) for item in fields(cls)})

    def check(self) -> None:
        """Refuses options that contradict each other, before any work.

        Raises:
            InputError: They do.
        """

    def run(self) -> int:
        """Runs the verb, and returns its exit code."""
        raise NotImplementedError

    def given(self, names: Iterable[str]) -> list[str]:
        """Returns those of these options that differ from their defaults, as they are written."""
        defaults = {item.name: item.default for item in fields(self)}
        return [_written(name) for name in names if getattr(self, name) != defaults[name]]


def _written(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_GROUP = "model options"
SIZES = ("batch", "microbatch", "seq", "dtype", "optimizer", "granularity")
"""Options that determine what is captured."""
PRICES = ("autocast", "costs", "host_us_per_op", "host_us_per_layer", "master_weights", "host_mode")
"""Options that change how it is captured and priced."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of every verb with a MODEL."""

    batch: int | None = option("samples of a step, everything together", positive, "N", group=_GROUP)
    microbatch: int | None = option(f"samples of a micro-batch ({MICROBATCH})", positive, "N", group=_GROUP)
    seq: int = option("sequence length (512)", positive, "N", default=512, group=_GROUP)
    dtype: str = option("parameters and compute (fp32)", choices=DTYPES, default="fp32", group=_GROUP)
    autocast: str | None = option("mixed precision: compute under torch.autocast in this dtype", choices=AUTOCAST, group=_GROUP)
    optimizer: str = option("decides the optimizer state (adam)", choices=CHOSEN, default="adam", group=_GROUP)
    lora: str | None = option(
        "freeze an hf: model and add adapters by PEFT, such as r=16,targets=q_proj+v_proj", None, "r=R,...", group=_GROUP
    )
    quantize: str | None = option("pack the frozen linear weights of an hf: model", choices=("nf4", "int8"), group=_GROUP)
    master_weights: bool = flag("optimizer state and a copy of the weights in fp32", group=_GROUP)
    granularity: int = option("target number of groups (200)", positive, "N", default=200, group=_GROUP)
    costs: str | None = option(
        "op times, imbalance of experts: a *.cost.json or a plug-in over the built-in coefficients", None, "COSTS", group=_GROUP
    )
    host_mode: str = option("how the host issues ops (eager)", choices=HOST_MODES, default="eager", group=_GROUP)
    host_us_per_op: float | None = option("host time to issue a kernel (7 eager, 1.5 compiled)", rate, "N", group=_GROUP)
    host_us_per_layer: float | None = option("host time of a layer's forward and backward", rate, "N", group=_GROUP)

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Self:
        """Returns the record of parsed arguments; adapters and packed weights become a part of MODEL, which plans record."""
        lora, quantize = parsed.lora, parsed.quantize
        if lora or quantize:
            from rlplace.model.zoo.adapters import with_options

            for name in (item.name for item in fields(cls) if "MODEL" in (item.metadata.get("metavar") or "")):
                texts = getattr(parsed, name)
                changed = [with_options(text, lora, quantize) for text in (texts if isinstance(texts, list) else [texts or ""])]
                setattr(parsed, name, changed if isinstance(texts, list) else changed[0])
        parsed.lora = parsed.quantize = None
        return super().of(parsed)

    def shared(self) -> dict[str, Any]:
        """Returns the options of every verb with a MODEL, to make another verb's record of."""
        return {item.name: getattr(self, item.name) for item in fields(ModelOptions)}

    def model_words(self) -> list[str]:
        """Returns the options of the model that were given, other than by their default, as words of a command."""
        words = self.given(SIZES + PRICES)
        values = (getattr(self, word[2:].replace("-", "_")) for word in words)
        return [word if value is True else f"{word}={value}" for word, value in zip(words, values, strict=True)]


def say(line: str) -> None:
    """Prints a message to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Prints one JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def show(answer: Any, options: Options) -> None:
    """Prints an answer as JSON or, without ``--json``, as text."""
    if options.json:
        print_json(answer.to_dict())
    else:
        print(answer.text())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a plain table on stdout: first column left, the others right aligned."""
    print("\n".join(table(header, rows)))


def print_records(records: Sequence[T], cells: Mapping[str, Callable[[T], str]]) -> None:
    """Prints a table with a row a record; `cells` has the text of every column by its header."""
    print_table(list(cells), [[cell(record) for cell in cells.values()] for record in records])
