"""The first use after an installation: other processes compile the kernels while this one captures a model or begins to."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import rlplace
from rlplace.agents import guided
from rlplace.compiled import is_compiled
from rlplace.planners.compiler import coarsen

# What compiles, and the kernel that it compiles last.
_PARTS = (
    ("from rlplace.agents.search import warm_up; warm_up()", guided.search),
    ("from rlplace.planners.best import warm_up; warm_up()", coarsen._match),
)


@cache
def compile_ahead() -> bool:
    """Starts a process for each set of kernels that was not compiled on this machine yet, once.

    Only a process that needs a kernel that is being compiled waits for it (`rlplace.compiled`). They end with this process at
    the latest.

    Returns:
        Whether there is anything to compile.
    """
    cold = [code for code, kernel in _PARTS if not is_compiled(kernel)]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for code in cold:
            _start(code)
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
