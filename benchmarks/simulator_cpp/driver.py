"""Compiles and runs the plain C++ simulator on the arrays of the compiled one."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from types import TracebackType

import numpy as np

from rlplace.problem import Problem
from rlplace.simulator import records as r
from rlplace.simulator.lowering import lower, part_of

HERE = Path(__file__).parent


def compile_simulator(folder: Path) -> Path | None:
    """The executable, or None where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    executable = folder / "simulator"
    subprocess.run([compiler, "-O2", "-std=c++17", "-o", str(executable), str(HERE / "main.cpp")], check=True)
    return executable


class PlainCpp:
    """The C++ simulator at work on some plans, as a process that waits for orders."""

    def __init__(self, executable: Path, folder: Path, problem: Problem, plans: np.ndarray) -> None:
        lowered = lower(problem)
        assert not problem.collectives, "the C++ simulator knows no collectives"
        graph, groups, devices = lowered.graph, problem.num_groups, problem.num_devices
        self._rows, self._devices, self._results = len(plans), devices, folder / "results"
        sizes = [devices, graph.time_s.shape[1], lowered.num_channels, graph.layout[r.WIDTH]]
        arrays = {
            "sizes": np.array(sizes, dtype=np.uint32), "plans": np.ascontiguousarray(plans, dtype=np.uint32),
            "time_s": graph.time_s, "table_s": graph.table_s, "task": graph.task, "value": lowered.value,
            "readers": graph.readers, "pair": graph.pair, "missing": part_of(graph, r.MISSING),
            "first": part_of(graph, r.FIRST), "inputs": part_of(graph, r.INPUTS), "outputs": part_of(graph, r.OUTPUTS),
            "owner": part_of(graph, r.OWNER), "column": part_of(graph, r.COLUMN), "channels": part_of(graph, r.CHANNELS),
            "rank_of_task": lowered.ranks[0], "task_of_rank": lowered.ranks[1],
            "resident_bytes": graph.bytes[:groups], "reserved_bytes": graph.bytes[groups : groups + devices],
        }  # fmt: skip
        with (folder / "arrays").open("wb") as file:
            for name, array in arrays.items():
                data = array.tobytes()
                file.write(name.encode().ljust(16, b"\0") + struct.pack("<Q", len(data)) + data)
        command = [str(executable), str(folder / "arrays"), str(self._results)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, passes: int = 1) -> float:
        """Time of some passes over all plans, by the process's own clock."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{passes}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ends the process; of the last pass outcome int64 [K], step_s float64 [K], peak int64 and busy_s float64 [K, D]."""
        self.close()
        numbers, k, d = self._results.read_bytes(), self._rows, self._devices
        floats, ints = np.frombuffer(numbers, np.float64), np.frombuffer(numbers, np.int64)
        end = 2 * k + k * d
        return ints[:k], floats[k : 2 * k], ints[2 * k : end].reshape(k, d), floats[end:].reshape(k, d)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> PlainCpp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
