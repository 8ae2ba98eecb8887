"""``rlplace export``: a whole strategy as a training script of plain torch, or as a job file of torchtitan."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.cli.options import Options, argument, option
from rlplace.cli.output import print_json, say

HELP = "write a plan as a training script of plain torch, or as a job file of torchtitan"
EXAMPLE = "example: rlplace export gpt2.plan.json --to script --out train.py"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of the verb."""

    plan: str = argument("PLAN", "plan with a strategy that 'rlplace place MODEL' made")
    to: str = option("what to write", choices=("torchtitan", "script"), required=True)
    out: str | None = option("where to write it (shown)", None, "FILE")


def run(options: ExportOptions) -> int:
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
