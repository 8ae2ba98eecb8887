"""Kernels are compiled once, whoever wants them at the same time, and anew when their sources change."""

from __future__ import annotations

import ast
import dis
import fcntl
import itertools
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError

from rlplace.agents import search as guided
from rlplace.cluster.parse import parse
from rlplace.compiled import AHEAD as FOLDER
from rlplace.compiled import entry, inner, is_compiled, stamp_of
from rlplace.problem.generate import random_problem
from rlplace.simulator import api, fast, loop, queues, records, simulate_many
from rlplace.strategy.executor import evaluate
from rlplace.strategy.executor import kernel as kernel_module
from tests.strategy.random_costs import random_costs, random_draft

MODULE = """
import sys

from rlplace.compiled import entry, inner, is_compiled


@inner
def twice(x):
    return 2 * x


@entry
def total(values):
    found = 0.0
    for value in values:
        found += twice(value)
    return found


if __name__ == "__main__":
    import numpy as np

    before = is_compiled(total)
    print("ready", flush=True)
    sys.stdin.readline()
    assert total(np.ones(3)) == 6.0
    print(before, sum(total.stats.cache_misses.values()), sum(total.stats.cache_hits.values()))
"""


def run_together(folder, count):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(folder / "mine.py")]
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    return sorted(job.communicate(timeout=600)[0].split() for job in jobs)


@pytest.mark.slow
def test_one_process_compiles_and_the_others_load(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    assert run_together(tmp_path, 3) == [["False", "0", "1"], ["False", "0", "1"], ["False", "1", "0"]]
    assert run_together(tmp_path, 1) == [["True", "0", "1"]]


AHEAD = """
import sys
from pathlib import Path

import numpy as np

from rlplace import compiled

compiled.AHEAD = Path(sys.argv[1])

import mine

if sys.argv[2] == "build":
    mine.total(np.ones(3))
    [(signature, found)] = mine.total.overloads.items()
    compiled.Ahead(mine.total.py_func).save_overload(signature, found)
else:
    known = compiled.is_compiled(mine.total)
    assert mine.total(np.ones(3)) == float(sys.argv[2])
    print(known, sum(mine.total.stats.cache_misses.values()), sum(mine.total.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_was_compiled_ahead_is_known_by_its_source_and_serves_any_processor(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "ahead").mkdir()
    runs = itertools.count()

    def run(word, **environment):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / f"cache{next(runs)}"), **environment}
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
        command = [sys.executable, "-c", AHEAD, str(tmp_path / "ahead"), word]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout.split()

    run("build", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert run("6.0") == ["True", "0", "1"]
    os.utime(tmp_path / "mine.py", (0, 0))  # an installation keeps no times
    assert run("6.0") == ["True", "0", "1"]
    (tmp_path / "mine.py").write_text(MODULE.replace("2 * x", "3 * x"))
    assert run("9.0") == ["False", "1", "0"]


def test_what_the_build_compiles_is_what_planning_calls():
    """A kernel that is called with other types than `warm_up` would be compiled on the first use all the same."""
    rng, cluster = np.random.default_rng(0), parse("a100-80g:4")
    evaluate.warm_up()
    api.warm_up()
    kernels = kernel_module.evaluate_packed, kernel_module.moved_s, kernel_module.place_blocks, fast.simulate_plans
    known = [kernel.signatures for kernel in kernels]  # other tests of this process may have called them with other types
    costs = random_costs(rng, cluster, 6, tied=True)
    evaluate.DraftEvaluator(costs, cluster).score(random_draft(rng, cluster, 6))
    problem = random_problem(2, 12, 3, unlike=True)
    simulate_many(problem, np.zeros((2, problem.num_groups), dtype=np.int32))
    assert [kernel.signatures for kernel in kernels] == known


@pytest.mark.slow
def test_a_first_placement_compiles_nothing(tmp_path):
    """Where the kernels of an installation lie, whatever planner the default asks."""
    if not FOLDER.is_dir():
        pytest.skip("kernels were not compiled when the package was installed")
    code = (
        "import rlplace, rlplace.problem.generate as g; p = g.random_problem(3, num_groups=30, num_devices=3)\n"
        "rlplace.place(p, calls=500, time_limit_s=None); rlplace.place(p, planner='best')\n"
        "from rlplace.compiled import ENTRIES\n"
        "print([k.py_func.__name__ for k in ENTRIES if sum(k.stats.cache_misses.values())])"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "[]"


def test_a_compilation_that_fails_leaves_no_lock():
    @entry
    def wrong(value):
        return value.nothing

    with pytest.raises(TypingError, match="nothing"):
        wrong(1.0)
    with (Path(wrong._cache.cache_path) / f"{wrong._cache._impl.filename_base}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody keeps it
    assert not is_compiled(wrong)


def test_options_reach_numba():
    @entry(nogil=True)
    def outside(x):
        return part(x)

    @inner(fastmath=True, forceinline=True)
    def part(x):
        return x + 1

    assert outside.targetoptions["nogil"] and outside.targetoptions["error_model"] == "numpy"
    assert part.targetoptions["fastmath"] and part.targetoptions["forceinline"] and part.targetoptions["no_cpython_wrapper"]


ROOT = Path(__file__).parents[1]


def kernel_modules() -> list[str]:
    """Names of the modules that compile something."""
    found = []
    for folder in ("rlplace", "envs", "agents"):
        for path in (ROOT / folder).rglob("*.py"):
            if any(isinstance(n, ast.ImportFrom) and n.module == "rlplace.compiled" for n in ast.parse(path.read_text()).body):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.append(name if folder == "rlplace" else f"rlplace.{name}")
    return sorted(found)


def reached(kernel: Dispatcher) -> set[str]:
    """The modules of all compiled functions that a kernel holds."""
    seen, left = {kernel}, [kernel]
    while left:
        function = left.pop().py_func
        names = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
        values = [function.__globals__.get(name) for name in names]
        values += [cell.cell_contents for cell in function.__closure__ or ()]
        new = {value for value in values if isinstance(value, Dispatcher)} - seen
        seen |= new
        left += new
    return {found.py_func.__module__ for found in seen}


def entries() -> dict[str, Dispatcher]:
    """Kernels that Python calls, by where they are."""
    return {
        f"{module}.{name}": value
        for module in kernel_modules()
        if module != "rlplace.agents.compile_ahead"
        for name, value in vars(import_module(module)).items()
        if isinstance(value, Dispatcher)
        and value.py_func.__module__ == module
        and not value.targetoptions.get("no_cpython_wrapper")
    }


def test_kernels_of_several_files_enclose_a_stamp() -> None:
    found = entries()
    assert len(found) > 25
    for name, kernel in found.items():
        if len(reached(kernel)) > 1:
            stamps = [cell.cell_contents for cell in kernel.py_func.__closure__ or ()]
            assert len(stamps) == 1 and isinstance(stamps[0], int) and stamps[0] > 0, name


def test_the_stamp_of_the_simulator_is_of_all_its_files() -> None:
    kernel = fast.simulate_plans
    assert reached(kernel) <= {module.__name__ for module in (records, queues, loop, fast)}
    assert [cell.cell_contents for cell in kernel.py_func.__closure__] == [stamp_of(records, queues, loop, fast)]


def test_the_walk_finds_what_a_kernel_holds() -> None:
    assert {"rlplace.simulator.loop", "rlplace.envs.guide.draw", "rlplace.placement.common.movekernels"} <= reached(
        guided.draw_ranked
    )


@pytest.mark.long
@pytest.mark.slow
def test_an_index_of_older_sources_counts_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signatures may name a class that is gone."""
    (tmp_path / "kernels.py").write_text(
        "from typing import NamedTuple\nfrom rlplace.compiled import entry\n\n"
        "class Pair(NamedTuple):\n    a: int\n    b: int\n\n@entry\ndef total(pair):\n    return pair.a + pair.b\n"
    )
    code = "import kernels; print(kernels.total(kernels.{}(2, 3)))"
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=600, cwd=tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert run([sys.executable, "-c", code.format("Pair")]).stdout == "5\n"
    (tmp_path / "kernels.py").write_text((tmp_path / "kernels.py").read_text().replace("Pair", "Two"))
    assert run([sys.executable, "-c", code.format("Two")]).stdout == "5\n"
