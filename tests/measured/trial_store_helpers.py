"""Stores and trials that the tests of the trial store share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from toys import fork_join, two_device_chain

from rlplace.cost.timings import PlaceTiming
from rlplace.measured.site import Site
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Trial

PROBLEM = fork_join(width=3, num_devices=2).problem
OTHER_PROBLEM = two_device_chain().problem
SITE = Site("lab", {"device": "cpu", "processes": 2})
OTHER_SITE = Site("attic", {"device": "cpu", "processes": 2, "label": "slow"})
PLACE = PlaceTiming(0, "a", 0.1, 0.02, 0.0, 0.01, peak_memory_bytes=123, predicted_busy_s=0.09, predicted_peak_bytes=120)


def plan_number(number: int) -> tuple[int, ...]:
    """The plan whose devices are the binary digits of a number."""
    return tuple(number >> group & 1 for group in range(PROBLEM.num_groups))


def done(number: int = 0, **changes: object) -> Trial:
    """A trial that has ended, of the plan of that number."""
    trial = Trial(
        problem=PROBLEM.fingerprint,
        site=SITE.fingerprint,
        device_of_group=plan_number(number),
        status="done",
        step_s=(0.1, 0.2, 0.15),
        places=(PLACE, msgspec.structs.replace(PLACE, rank=1, peak_memory_bytes=None)),
        predicted_s=0.12,
        engine="joint_graph",
        setup_s=0.5,
        began_at=1000.0 + number,
        run="first",
    )
    return msgspec.structs.replace(trial, **changes)


def begun(number: int = 0, **changes: object) -> Trial:
    """The same trial before it has ended."""
    empty = {"status": "running", "step_s": (), "places": (), "predicted_s": None, "engine": "", "setup_s": 0.0}
    return done(number, **(empty | changes))


def new_store(path: Path | None = None) -> TrialStore:
    """A store that knows the problems and clusters of this module."""
    store = TrialStore(path)
    for problem in (PROBLEM, OTHER_PROBLEM):
        store.add_problem(problem)
    for site in (SITE, OTHER_SITE):
        store.add_site(site)
    return store


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a Python process that can import this module."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    start = f"import sys\nsys.path[:0] = {folders}\nfrom trial_store_helpers import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def output(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended without an error."""
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return printed
