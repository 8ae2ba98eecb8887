"""Messages on stderr, results on stdout: as JSON or as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rlplace.cli.options import Options
from rlplace.text import table


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
