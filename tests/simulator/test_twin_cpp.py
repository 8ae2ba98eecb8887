"""The plain C++ simulator of the benchmark equals the compiled one, so that their times may be compared."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "simulator_cpp" / "driver.py"
    spec = importlib.util.spec_from_file_location("simulator_cpp_driver", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_plain_cpp_equals_the_compiled_simulator(driver: ModuleType, tmp_path: Path) -> None:
    executable = driver.compile_simulator(tmp_path)
    shapes = ("layered", "branchy", "chain")
    for seed in range(30):
        rng = np.random.default_rng(seed)
        devices = int(rng.integers(1, 9))
        problem = random_problem(
            seed, int(rng.integers(1, 120)), devices, shape=shapes[seed % 3], unlike=seed % 2 == 0, memory_factor=1.5,
            hosts=1 + seed % min(2, devices), shared_parameters=seed % 7, null_fraction=0.01 * (seed % 5 == 0),
        )  # fmt: skip
        plans = rng.integers(0, devices, (6, problem.num_groups))
        ours = simulate_many(problem, plans)
        with driver.PlainCpp(executable, tmp_path, problem, plans) as cpp:
            cpp.seconds()
            outcome, step, peak, busy = cpp.results()
        done = outcome == 0
        assert (done == ~np.isnan(ours.step_time_s)).all()
        assert (step[done] == ours.step_time_s[done]).all()
        assert (peak[done] == ours.peak_memory_bytes[done]).all()
        assert busy[done].tobytes() == ours.busy_s[done].tobytes()
