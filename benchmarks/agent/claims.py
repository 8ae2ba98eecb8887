"""What the agent must show, each claim with its figures and whether it holds; nothing is rounded in its favour.

(a) no violation, never worse than the floor; (b) at 64 and 256 calls at least 3 % better than annealing on branchy models and
not worse on any family; (c) at 1,024 and 4,096 calls not worse overall and better on branchy models; (d) the same at 1 and 5 s;
(e) not worse on clusters of unseen sizes and topologies; (f) 30 s of adapting to one problem against 30 s of annealing.

"Not worse" overall: the upper end of the interval is at most `NOT_WORSE`. "Better": the upper end is below 1. "Not worse on any
family": no family's mean is above 1. (c) and (d) are checked against every classical search that there are rows of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from benchmarks.agent.means import Mean, families, log_steps, mean_ratio, slices
from benchmarks.agent.records import ADAPT, AGENT, RIVAL, BenchmarkRow
from benchmarks.agent.store import Store
from benchmarks.agent.tables import faults, show_mean

NOT_WORSE = 1.002
BETTER_BY = 0.97
ADAPT_BUDGET = "30 s"
ADAPT_SHARE = 0.9
OPEN_GAP = 1.005
"""Annealing above this multiple of the best known step time leaves something to find."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Finding:
    """One checked statement.

    Attributes:
        claim: Letter.
        text: The statement with its figures.
        holds: None: there are no rows to tell by.
    """

    claim: str
    text: str
    holds: bool | None

    def __str__(self) -> str:
        return f"({self.claim}) {VERDICTS[self.holds]}: {self.text}"


VERDICTS = {True: "holds", False: "does not hold", None: "not measured"}


def findings(store: Store) -> list[Finding]:
    """All claims over the rows of a file."""
    return [*_sound(store), *_few_calls(store), *_many(store), *_unseen(store), *_adapted(store)]


def verdicts(found: Collection[Finding]) -> dict[str, bool | None]:
    """Claim to whether all its findings hold; one that does not decides, then one that was not measured."""
    result: dict[str, bool | None] = {}
    for item in found:
        before = result.get(item.claim, True)
        result[item.claim] = False if False in (before, item.holds) else None if None in (before, item.holds) else True
    return result


def best_known(store: Store) -> dict[str, float]:
    """Case to the shortest step time of any valid plan in the file, the floor among them."""
    best = {name: info.floor_s for name, info in store.cases.items() if info.floor_s is not None}
    for row in store.rows.values():
        if row.valid and row.step_time_s is not None:
            best[row.case] = min(best.get(row.case, math.inf), row.step_time_s)
    return best


def _names(store: Store, role: str) -> list[str]:
    return [method.name for method in store.methods.values() if method.role == role]


def _logs(store: Store, role: str, budget: str) -> dict[str, float]:
    return log_steps(store.rows.values(), _names(store, role), budget)


def _sound(store: Store) -> list[Finding]:
    names = {*_names(store, AGENT), *_names(store, ADAPT)}
    rows = [row for row in store.rows.values() if row.method in names]
    if not rows:
        return [Finding("a", "no rows of an agent", None)]
    bad, worse = faults(rows, store)
    return [
        Finding("a", f"{bad} of {len(rows)} runs without a valid plan or with wrong figures", bad == 0),
        Finding("a", f"{worse} of {len(rows)} runs worse than the floor", worse == 0),
    ]


def _few_calls(store: Store) -> list[Finding]:
    parts = slices(store.cases)
    found = []
    for budget in ("64 calls", "256 calls"):
        ours, annealing = _logs(store, AGENT, budget), log_steps(store.rows.values(), ["annealing"], budget)
        mean = mean_ratio(ours, annealing, parts.get("branchy", []))
        text = f"{budget}, branchy, over annealing {_show(mean)}, asked at most {BETTER_BY}"
        found.append(Finding("b", text, None if mean is None else mean.ratio <= BETTER_BY))
        per = {name: mean_ratio(ours, annealing, keys) for name, keys in families(store.cases).items()}
        known = {name: each for name, each in per.items() if each is not None}
        if not known:
            found.append(Finding("b", f"{budget}, by family", None))
            continue
        worse = {name: each for name, each in known.items() if each.ratio > 1 + _ROUNDING}
        clear = sum(each.low is not None and each.low > 1 for each in worse.values())
        name, most = max(known.items(), key=lambda pair: pair[1].ratio)
        text = (
            f"{budget}, worse than annealing on {len(worse)} of {len(known)} families, {clear} of them with the whole interval"
        )
        found.append(Finding("b", f"{text}; the worst is {name} with {_show(most)}", not worse))
    return found


def _many(store: Store) -> list[Finding]:
    parts = slices(store.cases)
    rivals = _names(store, RIVAL) or ["annealing"]
    found = []
    for claim, budgets in (("c", ("1024 calls", "4096 calls")), ("d", ("1 s", "5 s"))):
        for budget in budgets:
            ours = _logs(store, AGENT, budget)
            if not ours:
                found.append(Finding(claim, f"{budget}, no rows of an agent", None))
                continue
            for rival in rivals:
                theirs = log_steps(store.rows.values(), [rival], budget)
                mean = mean_ratio(ours, theirs, parts.get("all", []))
                text = f"{budget}, all, over {rival} {_show(mean)}, asked an upper end of at most {NOT_WORSE}"
                found.append(Finding(claim, text, _upper(mean, NOT_WORSE)))
                mean = mean_ratio(ours, theirs, parts.get("branchy", []))
                text = f"{budget}, branchy, over {rival} {_show(mean)}, asked an upper end below 1"
                found.append(Finding(claim, text, _upper(mean, 1 - _ROUNDING)))
    return found


def _unseen(store: Store) -> list[Finding]:
    keys = slices(store.cases).get("unseen clusters", [])
    found = []
    for budget in ("64 calls", "256 calls", "1024 calls", "4096 calls"):
        mean = mean_ratio(_logs(store, AGENT, budget), log_steps(store.rows.values(), ["annealing"], budget), keys)
        text = f"{budget}, unseen clusters, over annealing {_show(mean)}, asked an upper end of at most {NOT_WORSE}"
        found.append(Finding("e", text, _upper(mean, NOT_WORSE)))
    return found


def _adapted(store: Store) -> list[Finding]:
    ours, theirs = _logs(store, ADAPT, ADAPT_BUDGET), log_steps(store.rows.values(), ["annealing"], ADAPT_BUDGET)
    both = sorted(set(ours) & set(theirs))
    if not both:
        return [Finding("f", f"no instance with {ADAPT_BUDGET} of adapting and of annealing", None)]
    near = sum(ours[name] - theirs[name] <= math.log(NOT_WORSE) for name in both)
    text = f"adapted, at most {100 * (NOT_WORSE - 1):.1f} % above annealing on {near} of {len(both)} instances"
    found = [Finding("f", f"{text}, asked {ADAPT_SHARE:.0%}", near >= ADAPT_SHARE * len(both) - _ROUNDING)]
    best = best_known(store)
    open_ = [name for name in both if theirs[name] - math.log(best[name]) > math.log(OPEN_GAP)]
    mean = mean_ratio(ours, theirs, open_)
    where = f"on the {len(open_)} instances where annealing is more than {100 * (OPEN_GAP - 1):.1f} % above the best known"
    text = f"{where}, adapted over annealing {_show(mean)}, asked below 1"
    # Where annealing leaves nothing to find, there is nothing to be better at.
    return [*found, Finding("f", text, True if not open_ else mean is not None and mean.ratio < 1)]


def _show(mean: Mean | None) -> str:
    return "-" if mean is None else f"{show_mean(mean)} ({mean.count} cases)"


def _upper(mean: Mean | None, most: float) -> bool | None:
    """Whether the upper end of the interval is at most `most`; too few cases have no interval and tell nothing."""
    return None if mean is None or mean.high is None else mean.high <= most


def adapt_rows(store: Store) -> list[list[str]]:
    """A line an instance that was adapted to: annealing, adapted and best known, over the floor."""
    ours, theirs = _logs(store, ADAPT, ADAPT_BUDGET), log_steps(store.rows.values(), ["annealing"], ADAPT_BUDGET)
    best: Mapping[str, float] = best_known(store)
    lines = []
    for name in sorted(set(ours) & set(theirs)):
        floor_s = store.cases[name].floor_s or math.nan
        values = (math.exp(theirs[name]), math.exp(ours[name]), best[name])
        lines.append([name, *(f"{value / floor_s:.4f}" for value in values)])
    return lines


def unsound(store: Store) -> list[BenchmarkRow]:
    """The rows of agents that (a) counts."""
    names = {*_names(store, AGENT), *_names(store, ADAPT)}
    return [row for row in store.rows.values() if row.method in names and any(faults([row], store))]
