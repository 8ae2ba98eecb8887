"""The first use after an installation: other processes compile the kernels while this one captures a model or begins to."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import rlplace
from rlplace.compiled import is_compiled

PLACEMENT, STRATEGY = "placement", "strategy"

# What has a function `warm_up` that compiles, and the kernel that it compiles last.
_PARTS = {
    PLACEMENT: (
        ("rlplace.agents.planner", "rlplace.envs.construction:construct"),
        ("rlplace.placement.search", "rlplace.placement.published.compiler.nets:_match"),
    ),
    STRATEGY: (
        ("rlplace.strategy.executor.evaluate", "rlplace.strategy.executor.kernel:evaluate_packed"),
        ("rlplace.simulator.api", "rlplace.simulator.fast:simulate_plans"),
    ),
}


@cache
def compile_ahead(space: str = PLACEMENT) -> bool:
    """Starts a process for each set of kernels that was not compiled yet, once.

    Only a process that needs a kernel that is being compiled waits for it (`rlplace.compiled`). They end with this process at
    the latest.

    Args:
        space: What is planned, `PLACEMENT` or `STRATEGY`.

    Returns:
        Whether there is anything to compile.
    """
    kernels = [(module, *kernel.split(":")) for module, kernel in _PARTS[space]]
    cold = [module for module, where, name in kernels if not is_compiled(getattr(import_module(where), name))]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for module in cold:
            _start(f"from {module} import warm_up; warm_up()")
    return bool(cold)


def _start(code: str) -> None:
    root = str(Path(rlplace.__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    quiet = subprocess.DEVNULL
    helper = subprocess.Popen([sys.executable, "-P", "-c", code], env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    atexit.register(_end, helper)


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    helper.wait()
