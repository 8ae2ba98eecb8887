"""Compiles ahead the kernels that `rlplace place` needs, for any processor of this architecture, into rlplace/kernels.

    python tools/kernels.py        what the package's build does; kernels that lie there and have the same sources stay

A wheel ships them, an editable installation has them in its checkout. Needs no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

PATIENCE_S = 600.0
"""Seconds for which a set waits for another process to save its kernels."""

ROOT = Path(__file__).resolve().parents[1]

SETS = (
    "rlplace.agents.search",
    "rlplace.placement.search",
    "rlplace.envs.vector",
    "rlplace.strategy.executor.evaluate",
    "rlplace.simulator.api",
)
"""Modules with a function `warm_up` that compiles their kernels, those that take longest first."""


def main() -> int:
    """Returns each set in a process of its own; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        any_processor = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": folder}
        # What pip has for a build alone, numba for one, is found by the PYTHONPATH that it gives.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **any_processor, "PYTHONPATH": path}
        command = [sys.executable, "-P", str(Path(__file__).resolve())]
        jobs = [subprocess.Popen([*command, name], env=environment, cwd=folder) for name in SETS]
        return max(job.wait() for job in jobs)


def compile_set(name: str) -> None:
    """Compiles a set where its kernels do not lie there yet, and keeps them."""
    from rlplace.compiled import AHEAD, ENTRIES, Ahead
    from rlplace.files import locked

    AHEAD.mkdir(exist_ok=True)
    import_module(name).warm_up()
    lock = Path("saving.lock")  # in the folder of this build
    lock.touch()
    with locked(lock, patience_s=PATIENCE_S):
        for kernel in ENTRIES:
            ahead = Ahead(kernel.py_func)
            for signature, compiled in kernel.overloads.items():
                if kernel.stats.cache_misses[signature]:
                    ahead.save_overload(signature, compiled)


def build() -> None:
    """Says what the build calls: without what kernels need it leaves them to the first use, and says so."""
    if main():
        print("kernels were not compiled ahead; the first use compiles them", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(compile_set(sys.argv[1]) if len(sys.argv) > 1 else main())
