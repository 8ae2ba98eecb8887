"""Runs a plan in processes of their own: by a command, whose timings file says what it took."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlplace.cluster import Cluster
from rlplace.cost.timings import PlanTimings
from rlplace.errors import InputError, RlplaceError
from rlplace.measure.log import Ended
from rlplace.plan.plan import PlacementPlan

PLAN, TIMINGS = "{plan}", "{timings}"
"""What a command is told: the file of the plan, and the file that it must write (``rlplace measure --plans`` does)."""

_MEMORY = ("out of memory", "outofmemoryerror", "cannot allocate memory", "std::bad_alloc")
_TIMED_S, _END_S = 10, 40.0
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


def local_command(cluster: Cluster, device: str | None = None, options: str = "") -> str:
    """Returns the command for a cluster of one host: this machine; by default on its GPUs where it has any."""
    if len(set(cluster.hosts)) > 1:
        raise InputError(
            "finetune: the cluster has several hosts; --launch says how a plan is run on them, for example "
            f'--launch "srun torchrun ... -m rlplace measure --plans {PLAN} --out {TIMINGS}"'
        )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cluster.num_devices}"]
    asked = f"-m rlplace measure --plans {PLAN} --out {TIMINGS} --time-limit {_TIMED_S}"
    options = f"--device {device} {options}" if device else options
    return f"{shlex.join(words)} {asked} {options}".strip()


def launcher(command: str, cluster: Cluster, *, timeout_s: float = 600.0) -> Callable[[PlacementPlan], Ended]:
    """Returns a function that runs plans.

    Args:
        command: As a shell reads it, with ``{plan}`` and ``{timings}``; every word is quoted once they stand there.
        cluster: Whose memory the measured peaks are a share of.
        timeout_s: After which a run counts as crashed and is ended.

    Raises:
        InputError: The command says neither where the plan nor where the timings are.
    """
    for place in (PLAN, TIMINGS):
        if place not in command:
            raise InputError(f"finetune: --launch {command!r} does not say {place}, a file that it must be told")

    def run(plan: PlacementPlan) -> Ended:
        with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
            where = {PLAN: str(Path(folder, "run.plan.json")), TIMINGS: str(Path(folder, "run.timings.json"))}
            plan.save(where[PLAN])
            words = [where.get(word, word) for word in shlex.split(command)]
            status, said = _run(words, timeout_s)
            if status is None:
                return Ended(status="crashed", reason=f"it took more than {timeout_s:g} s")
            if status == 0:
                return _read(where[TIMINGS], cluster)
            last = next((line.strip() for line in reversed(said) if line.strip()), f"it ended with {status}")
            memory = status in _KILLED or any(word in line.lower() for line in said for word in _MEMORY)
            reason = next((line.strip() for line in said if any(word in line.lower() for word in _MEMORY)), last)
            return Ended(status="out_of_memory" if memory else "crashed", reason=reason[:4000])

    return run


def _run(words: list[str], timeout_s: float) -> tuple[int | None, list[str]]:
    """Exit status, None where it was ended for its time, and the last lines that it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            job = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise InputError(f"finetune: {words[0]} cannot be started: {error.strerror}; see --launch") from None
        try:
            status: int | None = job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # torchrun then ends its processes, which are in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_END_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - (1 << 16)))
        return status, said.read().splitlines()


def _read(path: str, cluster: Cluster) -> Ended:
    """What the timings of one plan say."""
    try:
        timing = PlanTimings.load(path).plans[-1]
    except (RlplaceError, IndexError) as error:
        return Ended(status="crashed", reason=f"its timings cannot be read: {error}")
    shares = [
        (peak - device.reserved_bytes) / (device.memory_bytes - device.reserved_bytes)
        for peak, device in zip(timing.peak_memory_bytes, cluster.devices, strict=False)
        if peak is not None and device.memory_bytes is not None
    ]
    share = max(0.0, *shares) if shares else None
    return Ended("done", step_s=timing.step_s, share=share, pace_s=timing.pace_s, stage_busy_s=timing.stage_busy_s)
