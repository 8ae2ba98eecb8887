"""Which rows are asked for, and making those that are not there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.agent.measure import Job, workers
from benchmarks.agent.methods import learned, rival
from benchmarks.agent.records import ABLATION, ADAPT, AGENT, CURVE, BenchmarkRow, Budget, CaseInfo, Method
from benchmarks.agent.sets import describe
from benchmarks.agent.store import Store
from benchmarks.agent.tables import ADAPT_BUDGET
from rlplace.agents.cases import Case
from rlplace.errors import InputError

Ask = tuple[Case, Method, Budget, int]
"""Case, method, budget and seed of a row that is asked for."""


def tell(line: str) -> None:
    """A line about how it goes; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def chosen_methods(rivals: Sequence[str], agents: str, ablations: Sequence[str]) -> list[Method]:
    """The methods of the main tables.

    Args:
        rivals: Names of classical searches, some with ``,option=value``.
        agents: ``LABEL=CHECKPOINT`` or ``CHECKPOINT`` a training seed, with commas.
        ablations: ``LABEL=CHECKPOINT,option=value,...`` each.
    """
    methods = [rival(text) for text in rivals]
    methods += [learned(text, AGENT) for text in split(agents)]
    methods += [learned(text, ABLATION) for text in ablations]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two methods are called {name}; give one another label, LABEL=CHECKPOINT")
    return methods


def matrix(cases: Sequence[Case], methods: Sequence[Method], budgets: str, seeds: int, agent_seeds: int) -> list[Ask]:
    """Every method on every case, budget after budget, so that what is cut short is complete for the first ones."""
    return [
        (case, method, budget, seed)
        for budget in [Budget.parse(text) for text in split(budgets)]
        for case in cases
        for method in methods
        for seed in range(agent_seeds if method.checkpoint else seeds)
    ]


def adapting(cases: Sequence[Case], agents: str, count: int, seeds: int) -> list[Ask]:
    """Adapting to one problem against annealing, both for 30 seconds, on `count` cases spread over the families."""
    methods = [rival("annealing"), *(learned(text, ADAPT) for text in split(agents))]
    budget = Budget.parse(ADAPT_BUDGET)
    return [(case, method, budget, seed) for case in spread(cases, count) for method in methods for seed in range(seeds)]


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` cases, drawn with a fixed seed, one a family in turn."""
    rng = np.random.default_rng(0)
    families: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.name):
        families.setdefault(case.family, []).append(case)
    piles = [[members[k] for k in rng.permutation(len(members))] for _, members in sorted(families.items())]
    chosen: list[Case] = []
    while len(chosen) < count and any(piles):
        chosen += [pile.pop() for pile in piles if pile]
    return chosen[:count]


def curve(cases: Sequence[Case], runs: str, budgets: str, seeds: int) -> list[Ask]:
    """Every checkpoint of run folders (``LABEL=FOLDER``, with commas), and annealing beside them."""
    methods = [rival("annealing")]
    for text in split(runs):
        label, _, folder = text.rpartition("=")
        found = sorted(path.parent for path in Path(folder).rglob("policy.safetensors"))
        if not found:
            raise InputError(f"{folder}: holds no checkpoint (policy.safetensors); give a folder that training has written")
        methods += [learned(f"{label or Path(folder).name}@{_trained(path)}={path}", CURVE) for path in found]
    known: dict[str, Method] = {}
    for method in methods:  # the last checkpoint may lie in the folder twice
        other = known.setdefault(method.name, method)
        if other.fingerprint != method.fingerprint:
            raise InputError(f"{other.checkpoint} and {method.checkpoint}: two checkpoints after equal steps; move one away")
    return matrix(cases, list(known.values()), budgets, seeds, 1)


def _trained(folder: Path) -> str:
    """Steps that a checkpoint was trained, those of pre-training and PPO decisions together, to order a curve by."""
    from rlplace.agents.checkpoint import load_checkpoint

    training = load_checkpoint(folder).training
    steps = [training.get("steps_done", training.get("steps")), training.get("fitted", 0)]
    if not all(isinstance(part, int) and not isinstance(part, bool) for part in steps):
        raise InputError(f"{folder / 'config.json'}: training has no number of steps, so that it has no place in a curve")
    return str(sum(steps))


def measure(store: Store, asked: Sequence[Ask], *, cases_in_set: int, processes: int) -> None:
    """Makes the rows that are asked for and not in the file, floors first."""
    cores = len(os.sched_getaffinity(0))
    if not 1 <= processes <= cores:
        raise InputError(f"--processes {processes}: this machine has {cores} cores for it, give 1 to {cores}")
    cases = list({case.name: case for case, *_ in asked}.values())
    for case in cases:
        store.check_case(case.name, case.problem.fingerprint)
    for method in {method.name: method for _, method, *_ in asked}.values():
        store.add_method(method)
    open_ = [ask for ask in asked if not store.done((ask[0].name, ask[1].name, str(ask[2]), ask[3]))]
    if not open_:
        return
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    store.add_run(
        {"processes": processes, "cores": cores, "load": os.getloadavg()[0], "started": started, "cases": cases_in_set}
    )
    with workers(cases, processes) as run:
        unknown = [Job(describe(case)) for case in cases if case.name not in store.cases]
        for number, info in enumerate(run(unknown), start=1):
            assert isinstance(info, CaseInfo)
            store.add_case(info)
            step = "none that fits" if info.floor_s is None else f"{1e3 * info.floor_s:.3f} ms"
            tell(f"floor {number}/{len(unknown)} of {info.name}: {step}, {info.floor_seconds:.2f} s")
        jobs = [Job(store.cases[case.name], method, budget, seed) for case, method, budget, seed in open_]
        begin = told = time.monotonic()
        for number, row in enumerate(run(jobs), start=1):
            assert isinstance(row, BenchmarkRow)
            store.add_row(row)
            if row.violation is not None and store.cases[row.case].floor_s is not None:
                tell(f"{row.method} on {row.case} with {row.budget}: {row.violation}")
            now = time.monotonic()
            if now - told > 10 or number == len(jobs):
                told = now
                tell(f"row {number}/{len(jobs)}, {row.budget}, {now - begin:.0f} s")


def pick(cases: Sequence[Case], names: str) -> list[Case]:
    """The cases whose name holds one of the texts in `names` (all when empty)."""
    wanted = split(names)
    kept = [case for case in cases if not wanted or any(text in case.name for text in wanted)]
    if not kept:
        raise InputError(f"--cases {names}: no case has such a name; for example {cases[0].name}")
    return kept


def split(text: str) -> list[str]:
    """The items of a list with commas."""
    return [item.strip() for item in text.split(",") if item.strip()]
