"""The background process of `StepWatch`: planning again, away from the training process and out of its way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlplace.errors import InputError
from rlplace.measured.drift import Drift
from rlplace.measured.replan_report import ReplanReport
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE_S = 600.0  # on top of the time limit of planning: imports, capture, pricing
_TOLD_BYTES = 4096


class ReplanJob:
    """One run of ``python -m rlplace.agents.replan``: one thread, low priority, no GPU, a session of its own.

    It ends by itself when the process that started it is gone.

    Attributes:
        report_path: Where its report will be.
        process: The process.
    """

    def __init__(
        self,
        plan: PlacementPlan | Path,
        problem: Problem | Path | None,
        drift: Drift,
        *,
        plan_path: Path,
        report_path: Path,
        busy_s: Sequence[float] | None,
        busy_before_s: Sequence[float] | None,
        time_limit_s: float,
        restart_s: float,
        seed: int,
    ) -> None:
        """Writes what the process needs and starts it.

        Raises:
            OSError: It cannot be started.
            InputError: Its files cannot be written.
        """
        self.report_path = report_path
        self.most_s = time_limit_s + _PATIENCE_S
        self._folder = Path(tempfile.mkdtemp(prefix="rlplace-replan-"))
        try:
            command = [
                *(sys.executable, "-P", "-m", "rlplace.agents.replan"),
                *("--plan", str(_file(plan, self._folder / "running.plan.json"))),
                *("--ratio", repr(drift.of_reference), "--measured-s", repr(drift.after_s)),
                *("--out", str(plan_path), "--report", str(report_path)),
                *("--time-limit-s", repr(time_limit_s), "--restart-s", repr(restart_s), "--seed", str(seed)),
                *("--parent", str(os.getpid())),
            ]
            if problem is not None:
                command += ["--problem", str(_file(problem, self._folder / "running.problem.json"))]
            for flag, values in (("--busy-s", busy_s), ("--busy-before-s", busy_before_s)):
                if values is not None:
                    command += [flag, ",".join(repr(float(value)) for value in values)]
            report_path.unlink(missing_ok=True)
            with open(self._folder / "stderr", "wb") as told:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=told,
                    env=_environment(),
                    start_new_session=True,  # an interrupt of the job is not for it; it is ended by its id
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def poll(self) -> ReplanReport | str | None:
        """The report when it is there, one line when the process has failed, None while it works."""
        code = self.process.poll()
        if code is None:
            return None
        try:
            if code == 0:
                return ReplanReport.load(self.report_path)
            return f"exit code {code}: {self._told()}" if code > 0 else f"ended by signal {-code}"
        except InputError as error:
            return str(error)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """Ends the process, by its id, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _told(self) -> str:
        with open(self._folder / "stderr", "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TOLD_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no message")


def _file(record: PlacementPlan | Problem | Path, path: Path) -> Path:
    if isinstance(record, Path):
        return record.absolute()
    record.save(path)
    return path


def _environment() -> dict[str, str]:
    """That of this process, without what makes a process a rank of a job, and with one thread and no GPU."""
    import rlplace

    kept = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN and not key.startswith("TORCHELASTIC_")}
    here = str(Path(rlplace.__file__).resolve().parent.parent)
    path = os.pathsep.join([here, kept["PYTHONPATH"]]) if kept.get("PYTHONPATH") else here
    return {**kept, **dict.fromkeys(_THREADS, "1"), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
