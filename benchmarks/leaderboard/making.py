"""Making a submission with a planner of rlplace, or of a package that brings planners."""

from __future__ import annotations

import gzip
import json
import platform
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from benchmarks.agent.measure import after_floor, tell
from benchmarks.agent.methods import random_search
from benchmarks.agent.records import Budget
from benchmarks.leaderboard.submission import CARD, PLANS, Card, Row
from rlplace.agents.planner import load_agent
from rlplace.agents.problems.cases import ProblemCase
from rlplace.cost.contract import split_backward
from rlplace.errors import InfeasibleError, InputError
from rlplace.files import check_folder, write_bytes, write_text
from rlplace.placement import NEEDS_SPLIT, PLANNERS, get_planner
from rlplace.placement.ask import attempt
from rlplace.placement.common.floor import REPAIRS, OneShotPlanner
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.records import build
from rlplace.simulator import simulate

OURS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("ours.toml").read_text())
"""Texts of the cards of rlplace's own planners."""

SEARCHES = ("annealing", "local_search", "random", "agent")
"""Planners that start from a given plan and take a number of calls."""

Floors = Mapping[str, Sequence[int] | None]
"""Device of every group in the plan of `best`, by name of the case."""


def make(card: Card, place: Placer, cases: Mapping[str, ProblemCase], folder: Path, floors: Floors) -> None:
    """Places every case and writes the submission.

    Args:
        card: Its card; the first of its seeds is the seed of every run.
        place: The planner, see `placer`.
        cases: The cases of the board by name.
        folder: Where it goes; its name is that of the card.
        floors: Plans to start from, where they are known; `best` makes the others.
    """
    check_folder(folder)
    budget = None if card.budget == "one shot" else Budget.parse(card.budget)
    answer(ProblemCase("warm-up", "", random_problem(0, 8, 2)), place, budget, card.seeds[0], None)  # compiles
    rows = []
    for number, case in enumerate(cases.values(), start=1):
        rows.append(answer(case, place, budget, card.seeds[0], floors.get(case.name)))
        tell(f"{number}/{len(cases)} {case.name}: {rows[-1].step_time_s} s")
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({k: v for k, v in asdict(row).items() if v is not None}) + "\n" for row in rows)
    write_bytes(folder / PLANS[0], gzip.compress(lines.encode(), mtime=0))
    write_text(folder / CARD, card_text(card))


def answer(case: ProblemCase, place: Placer, budget: Budget | None, seed: int, floor: Sequence[int] | None) -> Row:
    """Returns the row of one case; a planner that finds no plan says so, whatever else goes wrong ends the making.

    Ops run in the default order, whatever priorities a plan has beside its devices.
    """
    start: NDArray[np.int32] | None = None
    options: dict[str, Any] = {} if budget is None else budget.arguments
    problem = case.problem
    if place.starts:
        start = get_planner("best")(problem).device_of_group if floor is None else np.array(floor, dtype=np.int32)
        options["start"] = start
    run = attempt(place.place, after_floor(problem, start), seed=seed, **options)
    calls = max(0, run.simulator_calls - (start is not None))
    line = None if run.answer is None else simulate(problem, run.answer.device_of_group)
    if run.answer is None or line is None or not line.feasible:
        return Row(case.name, problem.fingerprint, calls=calls, seconds=run.seconds)
    return Row(case.name, problem.fingerprint, run.answer.device_of_group.tolist(), line.step_time_s, calls, run.seconds)


class Placer(NamedTuple):
    """A planner as the board calls it, and whether it takes the plan of `best` to start from, which is in no budget."""

    place: Callable[..., PlacementPlan]
    starts: bool


def placer(name: str, budget: str, checkpoint: str | None = None, options: Mapping[str, Any] | None = None) -> Placer:
    """Returns the function of a planner in a class of the board.

    Args:
        name: Name of a planner.
        budget: The class.
        checkpoint: Of the agent; None: the shipped one.
        options: Further arguments of the planner.

    Raises:
        InputError: The planner is unknown, or has no such budget.
    """
    if checkpoint is not None and name != "agent":
        raise InputError(f"--agent is of the planner agent; {name} has no checkpoint, leave it out")
    searches = name in SEARCHES
    if searches and budget == "one shot" and name != "random":
        raise InputError(f"{name} searches; give --budget a class of calls or seconds")
    if budget.endswith("calls") and not searches and name in PLANNERS:
        raise InputError(f"{name} counts no calls; give --budget 'one shot' or a class of seconds")
    starts = searches and budget != "one shot"
    if name == "agent":
        place: Any = load_agent(checkpoint or "default").place
    elif name == "random" and starts:
        place = random_search
    else:
        place = partial(project, name) if name in NEEDS_SPLIT else get_planner(name)
    return Placer(partial(place, **(options or {})), starts)


def project(name: str, problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """Returns the answer of a planner that places the two passes of a group apart, as a plan that keeps them together.

    Both are where the forward pass is, or both where the backward pass is, whichever is faster; with all gaps of the planner
    and with gap 0, where it displaces nothing. What does not fit is repaired like the candidates of any planner.
    """
    whole = split_backward(problem)
    of_name = {group: number for number, group in enumerate(whole.group_names)}
    forward = np.array([of_name[group] for group in problem.group_names])
    backward = np.array([of_name.get(f"{group}.backward", of_name[group]) for group in problem.group_names])

    def candidates(problem: Problem, seed: int) -> list[NDArray[np.int32]]:
        drawn = []
        for options in ({}, {"gap": 0}):
            with suppress(InfeasibleError):
                plan = get_planner(name)(whole, seed=seed, time_limit_s=time_limit_s, **options)
                drawn += [plan.device_of_group[forward], plan.device_of_group[backward]]
        return drawn

    return OneShotPlanner(candidates, name, REPAIRS)(problem, seed=seed, time_limit_s=time_limit_s)


def new_card(name: str, planner: str, budget: str, said: Mapping[str, str | None], seed: int) -> Card:
    """Returns a card with what this machine and the planner tell; `said` replaces its texts."""
    import torch

    import rlplace

    known = OURS.get(planner, {})
    texts: dict[str, str | None] = {
        "authors": "The rlplace authors" if known else None,
        **{key: known.get(key) for key in ("method", "link", "kind")},
        "hardware": f"{processor()}, one thread",
        **{key: text for key, text in said.items() if text is not None},
    }
    for key, text in texts.items():
        if text is None:
            raise InputError(f"--{key} is missing: nothing is known of the planner {planner} that could stand there")
    versions = {"rlplace": rlplace.__version__, "python": platform.python_version(), "torch": torch.__version__}
    day = datetime.now(UTC).date().isoformat()
    return build(Card, {"name": name, "budget": budget, "seeds": [seed], "date": day, "versions": versions, **texts}, "card")


def processor() -> str:
    """Returns name of this machine's processor, as far as the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def card_text(card: Card) -> str:
    """Returns the card as TOML."""
    plain = asdict(card)
    versions = asdict(plain.pop("versions"))
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in plain.items()]
    return "\n".join([*lines, "", "[versions]", *(f"{key} = {json.dumps(value)}" for key, value in versions.items())]) + "\n"
