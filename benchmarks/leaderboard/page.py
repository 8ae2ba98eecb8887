"""LEADERBOARD.md from submissions: a table a class, ordered, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.tables import RESAMPLES, markdown
from benchmarks.leaderboard.cases import CaseInfo
from benchmarks.leaderboard.records import BUDGETS, Submission
from rlplace.errors import InputError
from rlplace.stats import TIE, interval

BASE = "best"
"""The submission that step times are divided by."""


@dataclass(frozen=True)
class Standing:
    """A line of a table.

    Attributes:
        submission: Whose it is.
        logs: Log of step time over that of `BASE` by case, where there is a plan.
        first: Cases where nothing of its class is more than `TIE` faster.
    """

    submission: Submission
    logs: dict[str, float]
    first: int

    @property
    def order(self) -> tuple[int, float, str]:
        """More plans first, then the smaller mean: leaving out hard cases must not help."""
        mean = float(np.mean(list(self.logs.values()))) if self.logs else math.inf
        return -len(self.logs), mean, self.submission.card.name


def standings(submissions: Sequence[Submission], infos: Mapping[str, CaseInfo]) -> dict[str, list[Standing]]:
    """Returns the lines of every class that has any, in order.

    Args:
        submissions: Checked ones, `BASE` among them.
        infos: The cases by name.
    """
    base = next((item for item in submissions if item.card.name == BASE), None)
    if base is None:
        raise InputError(f"submissions: {BASE} is not among them, and step times are divided by its; add its folder")
    floor_s = {case: row.step_time_s for case, row in base.rows.items() if row.step_time_s is not None}
    lines: dict[str, list[Standing]] = {}
    for budget in BUDGETS:
        mine = [item for item in submissions if item.card.budget == budget]
        steps = {item.card.name: {c: row.step_time_s for c, row in item.rows.items() if row.step_time_s} for item in mine}
        fastest = {
            case: min(s[case] for s in steps.values() if case in s) for case in infos if any(case in s for s in steps.values())
        }
        lines[budget] = sorted(
            (
                Standing(
                    item,
                    {c: math.log(s / floor_s[c]) for c, s in steps[item.card.name].items() if c in floor_s},
                    sum(s <= fastest[c] * (1 + TIE) for c, s in steps[item.card.name].items()),
                )
                for item in mine
            ),
            key=lambda line: line.order,
        )
    return {budget: found for budget, found in lines.items() if found}


def page(submissions: Sequence[Submission], infos: Mapping[str, CaseInfo]) -> str:
    """Returns the whole of LEADERBOARD.md."""
    branchy = [name for name, info in infos.items() if info.branchy]
    parts = [_HEAD.format(cases=len(infos), branchy=len(branchy), tie=f"{TIE:.1%}")]
    for budget, lines in standings(submissions, infos).items():
        body = []
        for place, line in enumerate(lines, start=1):
            card = line.submission.card
            body.append(
                [
                    str(place),
                    f"[{card.name}](benchmarks/leaderboard/submissions/{card.name}/card.toml)",
                    card.authors,
                    card.kind,
                    _ratio(line.logs, list(infos)),
                    _ratio(line.logs, branchy),
                    f"{line.first / len(infos):.0%}",
                    f"{len(line.logs)}/{len(infos)}",
                    _mean([row.calls for row in line.submission.rows.values()]),
                    _mean([row.seconds for row in line.submission.rows.values()]),
                    card.date,
                ]
            )
        header = ["", "entry", "authors", "kind", "all", "branchy", "fastest", "feasible", "calls", "seconds", "date"]
        parts.append(f"## {budget[0].upper()}{budget[1:]}\n\n{markdown(header, body)}")
    return "\n".join([*parts, _HOW])


def _ratio(logs: Mapping[str, float], names: Sequence[str]) -> str:
    values = [logs[name] for name in names if name in logs]
    if not values:
        return "-"
    low, high = interval(values, resamples=RESAMPLES)
    between = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
    return f"{math.exp(float(np.mean(values))):.4f}{between}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean = float(np.mean(known))
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


_HEAD = """# Leaderboard of learned placement

Placements of {cases} problems ([the test split](docs/agent/problems.md) as it was when the board began), {branchy} of
them branchy, of model families that the shipped agent's training never sees. Every plan here is simulated again,
exactly: step times, memory and fixed groups are checked. **Calls and seconds are what the submission claims; they
cannot be checked**, nor can it be checked that nothing was tuned on these cases.

- *all*, *branchy*: geometric mean of step time over that of `best`, the best of ten heuristics; less is faster. In
  brackets the 95 % bootstrap interval over cases.
- *fastest*: share of cases where no entry of the class is more than {tie} faster.
- *feasible*: cases with a plan. Entries with more plans come first, since leaving out hard cases must not help; means
  are over the cases that an entry has.
- *calls*, *seconds*: claimed means per case, - where not all were measured. *One shot* has no limit; other classes
  count only what comes after the plan of `best`, from which any entry may start. Compare seconds only on the same
  hardware, which the card names.
"""

_HOW = """## How to submit

1. `python -m benchmarks.leaderboard problems --out problems` writes each problem as `NAME.problem.json`
   ([format](docs/formats.md)). Do not tune on them.
2. Place each within one budget: *one shot* (a method that takes no budget; what it spends is shown), 256 or 4,096
   simulator calls, 1 s or 5 s of wall time, counted after the plan of `best` if you start there.
3. Make `benchmarks/leaderboard/submissions/NAME/` with `card.toml` (copy one) and `plans.jsonl.gz` (or `plans.json`,
   a list): one row per case, `{"case": "test-t5-00", "problem": FINGERPRINT, "devices": [0, 1, ...], "step_time_s":
   0.1, "calls": 256, "seconds": 0.2}`. `devices` is the device of every group; leave it and `step_time_s` out where
   you have no plan.
4. `python -m benchmarks.leaderboard make NAME --planner P --budget "256 calls"` does steps 2 and 3 for any planner
   that rlplace knows, including [yours](docs/plugins.md), and with `--planner agent --agent runs/mine` for an agent
   that you trained.
5. `python -m benchmarks.leaderboard check benchmarks/leaderboard/submissions/NAME` reports what is wrong, if
   anything.
6. `python -m benchmarks.leaderboard table --write` makes this page; open a pull request with both.
"""
