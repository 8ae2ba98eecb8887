"""``rlplace export``: a whole strategy as a training script of plain torch, or as a job file of torchtitan."""

from __future__ import annotations

import argparse

from rlplace.cli.common import print_json, say

HELP = "write a plan as a training script of plain torch, or as a job file of torchtitan"
EXAMPLE = "example: rlplace export gpt2.plan.json --to script --out train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("plan", metavar="PLAN", help="plan with a strategy that 'rlplace place MODEL' made")
    parser.add_argument("--to", choices=("torchtitan", "script"), required=True, help="what to write")
    parser.add_argument("--out", metavar="FILE", help="where to write it (shown)")


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import write_text
    from rlplace.plan.plan import PlacementPlan
    from rlplace.runtime.export.export import export

    plan = PlacementPlan.load(options.plan)
    text = export(plan, options.to)
    for note in plan.predicted.extra.get("notes", ()):
        say(f"note: {note}")
    if plan.strategy is not None and plan.strategy.reduction == "targets":
        say("note: replicas are averaged by samples there: give all as many targets that are not ignored")
    if options.out is not None:
        write_text(options.out, text)
    if options.json:
        print_json({"to": options.to, "text": text})
    elif options.out is None:
        print(text, end="")
    return 0
