"""On the first use other processes compile the kernels; after the warm-up nothing is left to compile."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from rlplace.agents import compile_ahead, search
from rlplace.envs.guide import analysis, draw, features
from rlplace.placement import annealing, get_planner
from rlplace.placement.common import kernels, listkernels, movekernels
from rlplace.placement.published.bipartition import solve as bipartition
from rlplace.placement.published.compiler import fm, nets, seeds
from rlplace.placement.published.pardnn import mapping, slicing
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.problem.generate import random_problem as toy_problem
from rlplace.simulator import fast, simulate, simulate_many

SCRIPT = """
import subprocess
from pathlib import Path

from rlplace import compiled

compiled.AHEAD = Path("nowhere")  # an installation without kernels

from rlplace.agents.compile_ahead import compile_ahead

started = []


class Noted(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        started.append(self.pid)


subprocess.Popen = Noted
print(compile_ahead(), *started)
"""


@pytest.fixture
def started(monkeypatch):
    compile_ahead.compile_ahead.cache_clear()
    found = []
    monkeypatch.setattr(compile_ahead, "_start", found.append)
    yield found
    compile_ahead.compile_ahead.cache_clear()


def test_what_is_cold_is_started_once(started, monkeypatch):
    monkeypatch.setattr(compile_ahead, "is_compiled", lambda kernel: kernel.py_func.__name__ == "construct")
    assert compile_ahead.compile_ahead() and compile_ahead.compile_ahead()
    assert started == ["from rlplace.placement.search import warm_up; warm_up()"]
    assert compile_ahead.compile_ahead(compile_ahead.STRATEGY)
    assert [code.split()[1] for code in started[1:]] == ["rlplace.strategy.executor.evaluate", "rlplace.simulator.api"]


def test_nothing_is_started_when_all_is_compiled(started, monkeypatch):
    monkeypatch.setattr(compile_ahead, "is_compiled", lambda kernel: True)
    assert not compile_ahead.compile_ahead() and started == []


def test_one_rank_of_a_host_starts_them(started, monkeypatch):
    monkeypatch.setattr(compile_ahead, "is_compiled", lambda kernel: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compile_ahead.compile_ahead() and started == []


def test_helpers_end_with_the_process(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    cold, *helpers = done.stdout.split()
    assert cold == "True" and len(helpers) == 2
    for pid in helpers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


KERNELS = {
    f"{module.__name__}.{name}": value
    for module in (
        fast,
        kernels,
        listkernels,
        movekernels,
        annealing,
        bipartition,
        fm,
        mapping,
        nets,
        seeds,
        slicing,
        analysis,
        draw,
        features,
        search,
    )
    for name, value in vars(module).items()
    if isinstance(value, Dispatcher)
}


def signatures():
    return {name: len(kernel.signatures) for name, kernel in KERNELS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generated", "toy", "loaded", "saved plan"])
def test_nothing_is_compiled_after_the_warm_up(kind, tmp_path, agents):
    search.warm_up()
    assert len(KERNELS) > 20
    before = signatures()
    problem = toy_problem(1, 20, 4) if kind == "toy" else random_problem(1, 20, 4, memory_factor=1.3, hosts=2)
    if kind == "loaded":
        problem.save(tmp_path / "p.problem.json")
        problem = Problem.load(tmp_path / "p.problem.json")
    plan = get_planner("best")(problem)
    simulate(problem, plan)
    simulate_many(problem, np.tile(plan.device_of_group, (3, 1)))
    get_planner("annealing")(problem, calls=100)
    start = plan.device_of_group if kind == "saved plan" else None
    agents["refinement"].place(problem, start=start, calls=100)
    assert {name: count for name, count in signatures().items() if count != before[name]} == {}
