"""``rlplace VERB``: parsing, exit codes, and the promise that an error is one line.

Nothing heavy is imported before a verb runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlplace import __version__
from rlplace.cli import (
    calibrate,
    capture,
    compare,
    diff,
    explain,
    export,
    finetune,
    info,
    measure,
    place,
    report,
    run,
    simulate,
    train,
)
from rlplace.errors import RlplaceError

_VERBS = (train, place, capture, simulate, compare, explain, diff, report, run, export, measure, calibrate, finetune, info)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rlplace: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = _Parser(
        prog="rlplace",
        description="Places PyTorch models on devices with reinforcement learning.",
        epilog="exit codes: 0 done, 1 failure, 2 bad input, 3 no feasible plan, 4 hardware or extra missing, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"rlplace {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in _VERBS:
        name = module.__name__.rpartition(".")[2]
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP, epilog=module.EXAMPLE)
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
        verb.add_argument("--json", action="store_true", help="print one JSON object")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    options = build_parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("rlplace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RlplaceError as error:
        if options.debug:
            raise
        print(f"rlplace: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if options.debug:
            raise
        print(f"rlplace: {error.filename or 'output'}: {error.strerror or _one_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(f"rlplace: unexpected {type(error).__name__}: {_one_line(error)}; --debug shows where", file=sys.stderr)
        return 1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
