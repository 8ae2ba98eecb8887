"""``rlplace VERB``: parsing, exit codes, the promise that an error is one line; and ``rlplace info``.

Nothing heavy is imported before a verb runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import shtab

from rlplace import __version__
from rlplace.cli.calibrate import CalibrateOptions
from rlplace.cli.compare import CompareOptions
from rlplace.cli.explain import ExplainOptions, ReportOptions
from rlplace.cli.measure import MeasureOptions
from rlplace.cli.models import CaptureOptions
from rlplace.cli.options import Options, print_json
from rlplace.cli.place import PlaceOptions
from rlplace.cli.plans import DiffOptions, ExportOptions, SimulateOptions
from rlplace.cli.run import RunOptions
from rlplace.cli.train import FinetuneOptions, TrainOptions
from rlplace.errors import RlplaceError
from rlplace.plugins import version_of

_PACKAGES = (
    "rlplace", "torch", "gymnasium", "stable-baselines3", "sb3-contrib", "networkx", "numpy", "numba", "pymetis",
    "transformers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Options):
    """Options of the verb."""

    HELP = "show versions, devices, planners, presets, checkpoints, environments and plug-ins"
    EXAMPLE = "example: rlplace info --json"

    def run(self) -> int:
        """Runs the verb."""
        facts = _facts()
        if self.json:
            print_json(facts)
            return 0
        for title, value in facts.items():
            print(f"{title}:")
            for line in _lines(value):
                print(f"  {line}")
        return 0


def _facts() -> dict[str, Any]:
    import gymnasium

    from rlplace.agents.checkpoint import shipped_checkpoints
    from rlplace.cluster.parse import Cluster
    from rlplace.cluster.presets import KINDS
    from rlplace.placement import OF_STRATEGIES, PLANNERS

    host = Cluster.detect()
    return {
        "versions": {package: version_of(package) or None for package in _PACKAGES},
        "devices": [{"name": d.name, "kind": d.kind, "memory_bytes": d.memory_bytes} for d in host.devices],
        "planners": sorted([*PLANNERS, *OF_STRATEGIES]),
        "presets": sorted(KINDS),
        "checkpoints": shipped_checkpoints(),
        "environments": sorted(name for name in gymnasium.registry if name.startswith("rlplace/")),
        "plugins": _plug_ins(),
    }


def _plug_ins() -> list[dict[str, str | None]]:
    """Lists the plug-ins of installed packages, each tried, with the reason where it cannot be used."""
    from rlplace import plugins as extensions
    from rlplace.agents.policies import BUILT_IN, policy_class
    from rlplace.cluster.presets import KINDS, RESERVED, device_kind
    from rlplace.cost.foreign import own_costs
    from rlplace.errors import RlplaceError
    from rlplace.placement import PLANNERS, get_planner

    groups: dict[str, tuple[Collection[str], Callable[[str], Any]]] = {
        extensions.PLANNERS: (PLANNERS, get_planner),
        extensions.DEVICES: ({*KINDS, *RESERVED}, device_kind),
        extensions.COSTS: ((), own_costs),
        extensions.POLICIES: (BUILT_IN, policy_class),
    }
    plug_ins = []
    for group, what in extensions.GROUPS.items():
        taken, use = groups[group]
        for extension in extensions.extensions(group).values():
            problem = extensions.refusal(extension, taken)
            if problem is None:
                try:
                    use(extension.name)
                except RlplaceError as error:
                    problem = str(error)
            plug_ins.append({"name": extension.name, "what": what, "package": extension.distribution, "error": problem})
    return plug_ins


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key:20s} {item if item is not None else 'not installed'}" for key, item in value.items()]
    return [
        ", ".join(str(v) for v in item.values() if v is not None) if isinstance(item, dict) else str(item) for item in value
    ]


_VERBS: tuple[type[Options], ...] = (
    TrainOptions, PlaceOptions, CaptureOptions, SimulateOptions, CompareOptions, ExplainOptions, DiffOptions, ReportOptions,
    RunOptions, ExportOptions, MeasureOptions, CalibrateOptions, FinetuneOptions, InfoOptions,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest word that is right; the usage is a --help away."""

    verbs: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        if wrong := _CHOICE.search(message):
            message += _meant(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        self.exit(2, f"rlplace: {' '.join(message.split())}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but what a verb does not know is refused by the verb, whose options are near."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb = self.verbs.get(getattr(options, "verb", None) or "", self)
            meant = _meant(unknown[0].partition("=")[0], verb._option_string_actions)
            verb.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return options


_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word[:80], [*known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all verbs."""
    parser = _Parser(
        prog="rlplace",
        description="Places PyTorch models on devices with reinforcement learning.",
        epilog="exit codes: 0 done, 1 failure, 2 bad input, 3 no feasible plan, 4 hardware or extra missing, 130 interrupted",
    )
    parser.add_argument("-V", "--version", action="version", version=f"rlplace {__version__}")
    shtab.add_argument_to(parser, help="print a script that completes with Tab")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for record in _VERBS:
        name = record.__name__.removesuffix("Options").lower()
        verb = verbs.add_parser(name, help=record.HELP, description=record.HELP, epilog=record.EXAMPLE)
        record.add_to(verb)
        verb.set_defaults(run=functools.partial(_run, record))
    parser.verbs = verbs.choices
    about = verbs.add_parser("help", help="show the help of a verb")
    about.add_argument("of", nargs="?", choices=[name for name in parser.verbs if name != "help"], metavar="VERB")
    about.set_defaults(run=lambda options: _help(parser.verbs[options.of] if options.of else parser), debug=False)
    return parser


def _run(record: type[Options], parsed: argparse.Namespace) -> int:
    """Runs a verb with its options, once they are checked."""
    options = record.of(parsed)
    options.check()
    return options.run()


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.verb is None:
        return _help(parser)
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
    except Exception as error:
        if options.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError):
            text = f"{error.filename or 'output'}: {error.strerror or text}"
        elif not isinstance(error, RlplaceError):
            text = f"unexpected {type(error).__name__}: {text}; --debug shows where"
        print(f"rlplace: {text}", file=sys.stderr)
        return error.exit_code if isinstance(error, RlplaceError) else 1


def command() -> NoReturn:
    """Runs the command ``rlplace`` and exits at once: collecting a capture's garbage at the end took seconds."""
    code = main()
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    command()
