"""The leaderboard of learned placement (LEADERBOARD.md).

python -m benchmarks.leaderboard check [FOLDER...]      every plan simulated again, exactly
python -m benchmarks.leaderboard table --write          checks all, makes the page
python -m benchmarks.leaderboard make NAME --planner heft --budget "one shot"
python -m benchmarks.leaderboard problems --out FOLDER  the problems as files
python -m benchmarks.leaderboard freeze                 a new board: the test split of today; all entries are void
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from msgspec.structs import replace

from benchmarks.agent.measure import tell
from benchmarks.agent.methods import options_of
from benchmarks.leaderboard.board import BASE, FILE, board_cases, freeze, info_of, page
from benchmarks.leaderboard.making import OURS, make, new_card, placer
from benchmarks.leaderboard.submission import (
    BUDGETS,
    SUBMISSIONS,
    check_submission,
    folders,
    read_submission,
)
from rlplace.agents.problems import save_cases, split_cases
from rlplace.agents.problems.cases import ProblemCase, made_by
from rlplace.errors import InputError, RlplaceError
from rlplace.files import write_text

PAGE = Path(__file__).resolve().parents[2] / "LEADERBOARD.md"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaderboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=FILE, help="file of cases of another board")
    parser.add_argument("--submissions", type=Path, default=SUBMISSIONS, help="folder of the submissions")
    verbs = parser.add_subparsers(dest="verb", required=True)
    check = verbs.add_parser("check", help="check submissions")
    check.add_argument("folders", nargs="*", help="default: all")
    table = verbs.add_parser("table", help="check all submissions and make the page")
    table.add_argument("--write", action="store_true", help="write it to --page instead of stdout")
    table.add_argument("--page", type=Path, default=PAGE)
    making = verbs.add_parser("make", help="make a submission with a planner")
    making.add_argument("name")
    making.add_argument("--planner", required=True)
    making.add_argument("--budget", required=True, choices=BUDGETS)
    making.add_argument("--agent", metavar="CKPT", help="checkpoint of the planner agent, default the shipped one")
    making.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the planner")
    making.add_argument("--seed", type=int, default=0)
    for key in ("authors", "method", "link", "kind", "hardware"):
        making.add_argument(f"--{key}", help=f"{key} on the card")
    problems = verbs.add_parser("problems", help="write the problems")
    problems.add_argument("--out", type=Path, required=True)
    verbs.add_parser("freeze", help="begin a new board with the test split of today")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code."""
    options = arguments(words)
    try:
        if options.verb == "freeze":
            freeze(split_cases("test", progress=tell), made_by(), options.cases)
            return 0
        cases = board_cases(options.cases)
        if options.verb == "check":
            return _check(folders(options.folders, options.submissions), cases)
        if options.verb == "table":
            _table(options, cases)
        elif options.verb == "make":
            _make(options, cases)
        else:
            save_cases(list(cases.values()), options.out)
    except RlplaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _check(chosen: Sequence[Path], cases: dict[str, ProblemCase]) -> int:
    """Checks each, and goes on behind one that is refused."""
    refused = 0
    for folder in chosen:
        try:
            check_submission(read_submission(folder), cases)
            print(f"{folder.name}: {len(cases)} rows are right")
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            refused = error.exit_code
    return refused


def _table(options: argparse.Namespace, cases: dict[str, ProblemCase]) -> None:
    entries = [read_submission(folder) for folder in folders(None, options.submissions)]
    for entry in entries:
        check_submission(entry, cases)
    text = page(entries, {name: info_of(case) for name, case in cases.items()})
    if options.write:
        write_text(options.page, text)
    else:
        print(text)


def _make(options: argparse.Namespace, cases: dict[str, ProblemCase]) -> None:
    said = {key: getattr(options, key) for key in ("authors", "method", "link", "kind", "hardware")}
    planner = options.planner
    if planner == "pase":  # places no groups; the card says what stands in
        said |= {key: text for key, text in OURS["pase"].items() if said[key] is None}
        planner = "single"
    place = placer(planner, options.budget, options.agent, options_of(options.option, f"--planner {planner}"))
    if options.agent is not None and said["method"] is None:
        raise InputError("--method is missing: say in a paragraph how the checkpoint of --agent was trained")
    card = new_card(options.name, planner, options.budget, said, options.seed)
    if options.option:
        card = replace(card, method=f"{card.method} Options: {', '.join(options.option)}.")
    folder = options.submissions / options.name
    if folder.exists():
        raise InputError(f"{folder}: is there already; remove it, or choose another name")
    best = options.submissions / BASE
    floors = {name: row.devices for name, row in read_submission(best).rows.items()} if best.exists() else {}
    make(card, place, cases, folder, floors)


if __name__ == "__main__":
    sys.exit(main())
