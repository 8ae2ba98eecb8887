"""`StepWatch`: put into a training loop, it notices when steps change their pace and has a better plan looked for.

It only looks at the clock. Model, plan and optimizer are never touched; what it finds out is told, and what is done about it
is up to the person who trains.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show
from rlplace.measured.drift import WARMUP, Drift, DriftDetector
from rlplace.measured.migration import RESTART_S
from rlplace.measured.replan_report import ReplanReport
from rlplace.measured.steps_file import StepHeader, StepsWriter
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.problem import Problem
from rlplace.runtime.replan_job import ReplanJob

if TYPE_CHECKING:
    from rlplace.runtime.distributed.busy_steps import BusySteps

REFERENCES = ("first", "predicted")
_FLUSH_STEPS, _FLUSH_S = 64, 5.0
_BUSY_KEPT, _BUSY_NEEDED = 64, 3
_OFF = 0.25  # share by which a prediction may be wrong before it is mentioned


def _print(line: str) -> None:
    print(f"rlplace: {line}", file=sys.stderr, flush=True)


class StepWatch:
    """Watches the step times of a training run.

    Use it in the loop of every process; only rank 0 measures, writes and decides::

        watch = rlplace.StepWatch(plan, problem)
        for batch in loader:
            with watch.step():
                ...forward, backward, optimizer...

    Not for several threads at once. In a forked process, or unpickled in another one, a watch does nothing.

    Attributes:
        drifts: Changes that were noticed.
        reports: What planning again has found, one report a finished background process.
        last_step_s: Seconds of the last step; None before the first, and on processes that do not measure.
    """

    last_step_s: float | None = None

    def __init__(
        self,
        plan: PlacementPlan | str | Path,
        problem: Problem | str | Path | None = None,
        out: str | Path = "run.steps.jsonl",
        *,
        reference: str | None = None,
        replan: bool = True,
        report: Callable[[str], Any] | None = None,
        warmup: int = WARMUP,
        least: float = 0.05,
        rank: int | None = None,
        synchronize: Callable[[], Any] | None = None,
        time_limit_s: float = 20.0,
        restart_s: float = RESTART_S,
        pause_s: float = 300.0,
        seed: int = 0,
        model: Any = None,
        busy_every: int = 16,
    ) -> None:
        """Starts a watch.

        Args:
            plan: The running plan, or its file.
            problem: What it was made for, or the file; None builds it again from the plan's source when it is needed.
            out: Steps file, see `rlplace.measured.steps_file`; proposed plans and reports are written beside it.
            reference: ``"first"``, the default: the median of the first healthy steps, for a prediction that is off by a
                constant; or ``"predicted"``: what the plan predicts.
            replan: Plan again in a background process after a drift; False only tells of drifts.
            report: Called with one line of text after the other; default prints them on stderr.
            warmup: Steps that do not count.
            least: Smallest relative change of interest.
            rank: Of this process; default that of torch.distributed or of torchrun.
            synchronize: Called before the clock is read, such as ``torch.cuda.synchronize``. Without it, let a step end with
                something that waits for the device, such as ``loss.item()``.
            time_limit_s: Of planning.
            restart_s: Assumed to stop and start the job.
            pause_s: Least time from one background process to the next.
            seed: Of planning.
            model: What `rlplace.distribute` returned; given on every process, one step in `busy_every` notes how long each
                device computes, which needs one small collective after it, and drifts can be located. Every process must
                then make the same calls to the watch.
            busy_every: See `model`.

        Raises:
            InputError: An argument is out of its range, or the plan is not for the problem.
        """
        self.drifts: list[Drift] = []
        self.reports: list[ReplanReport] = []
        self._step = _Step(self)
        self._probe: BusySteps | None = None
        if model is not None:
            from rlplace.runtime.distributed.busy_steps import BusySteps

            if reference == "predicted":
                raise InputError("StepWatch: model= compares devices with the first steps; leave reference out")
            self._probe = BusySteps(model, busy_every)
        self._synchronize, self._last_s = synchronize, math.nan
        self._pid = os.getpid() if (_rank() if rank is None else rank) == 0 else -1
        if self._pid < 0:
            return
        if reference not in (None, *REFERENCES):
            raise InputError(f"StepWatch: reference is {show(reference)}; it must be one of {', '.join(REFERENCES)}")
        for name, value in (("time_limit_s", time_limit_s), ("restart_s", restart_s), ("pause_s", pause_s)):
            if not 0 <= value < 1e9:
                raise InputError(f"StepWatch: {name} must be a number of seconds from 0 up, found {show(value)}")
        loaded = plan if isinstance(plan, PlacementPlan) else PlacementPlan.load(plan)
        if isinstance(problem, Problem):
            check_plan(loaded, problem)
        elif problem is not None and not Path(problem).is_file():
            raise InputError(f"{problem}: there is no such file")
        predicted = loaded.predicted.get("step_time_s")
        self._predicted_s = float(predicted) if isinstance(predicted, (int, float)) and predicted > 0 else None
        if reference == "predicted" and self._predicted_s is None:
            raise InputError("StepWatch: the plan predicts no step time; take reference='first'")
        self._plan = loaded if isinstance(plan, PlacementPlan) else Path(plan)
        self._problem = problem if problem is None or isinstance(problem, Problem) else Path(problem)
        self._held = reference == "predicted"
        self._detector = DriftDetector(self._predicted_s if self._held else None, warmup=warmup, least=least)
        self._least, self._report, self._warmup = math.log1p(least), report or _print, warmup
        self._settings = {"time_limit_s": time_limit_s, "restart_s": restart_s, "seed": seed}
        self._pause_s, self._replan = pause_s, replan
        self._lines: list[str] = []
        self._busy_first: list[tuple[int, tuple[float, ...]]] = []
        self._busy: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_BUSY_KEPT)
        self._job: ReplanJob | None = None
        self._pending: Drift | None = None
        self._started_s, self._flushed_s = -math.inf, time.monotonic()
        self._mentioned = False
        self._out = Path(out)
        self._writer: StepsWriter | None = None
        try:
            self._writer = StepsWriter(self._out, StepHeader(loaded.fingerprint, loaded.problem, self._predicted_s))
        except OSError as error:
            self._replan = False
            self._say(f"{out}: cannot be written ({error.strerror}): drifts are told, but not recorded or planned for")
        atexit.register(self.close)

    @property
    def active(self) -> bool:
        """Whether this process is the one that watches."""
        return self._pid == os.getpid()

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step by the plan; None: it predicts none, or this process does not watch."""
        return getattr(self, "_predicted_s", None)

    def step(self) -> _Step:
        """A context around one training step. A step that raises does not count."""
        return self._step

    def step_done(self, seconds: float | None = None, busy_s: Sequence[float] | None = None) -> None:
        """Tells the time of a step that was measured otherwise; never raises.

        Args:
            seconds: Of the step; None takes the time since the last call.
            busy_s: Per device of the cluster the seconds that it computed, where they are known: then a drift can be located.
        """
        if seconds is None:
            now = time.perf_counter()
            seconds, self._last_s = now - self._last_s, now
        probe = self._probe
        if probe is not None:
            busy_s = probe.end() or busy_s
            probe.begin()
        if self._pid == os.getpid() and seconds == seconds:  # the first call without seconds starts the clock
            self._take(seconds, busy_s)
        if self._last_s == self._last_s:
            self._last_s = time.perf_counter()  # what the watch itself took is not the next step's

    def close(self) -> None:
        """Writes what is left and ends the background process; the watch does nothing from then on.

        It happens by itself when the interpreter exits. With `model`, every process calls it after the same step, or none does.
        """
        self._probe = None
        if self._pid != os.getpid():
            return
        self._flush()
        if self._job is not None:
            self._job.end()
            self._job = None
        self._pid = -1
        atexit.unregister(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _passive, ()

    def _take(self, seconds: float, busy_s: Sequence[float] | None) -> None:
        self.last_step_s = seconds
        try:
            detector = self._detector
            number = detector.count
            if busy_s is None:
                self._lines.append(f'{{"step": {number}, "s": {seconds:.9g}, "at": {time.time():.3f}}}')
            else:
                self._take_busy(number, seconds, busy_s)
            drift = detector.update(seconds)
            if drift is not None:
                self._noticed(drift)
            if not self._mentioned and detector.level_s is not None:
                self._mention()
            if self._job is not None or self._pending is not None:
                self._look()
            if len(self._lines) >= _FLUSH_STEPS or time.monotonic() - self._flushed_s > _FLUSH_S:
                self._flush()
        except Exception as error:  # training goes on whatever happens here
            self._give_up(error)

    def _take_busy(self, number: int, seconds: float, busy_s: Sequence[float]) -> None:
        busy = tuple(float(value) for value in busy_s)
        told = ", ".join(f"{value:.9g}" for value in busy)
        self._lines.append(f'{{"step": {number}, "s": {seconds:.9g}, "at": {time.time():.3f}, "busy_s": [{told}]}}')
        self._busy.append((number, busy))
        if number >= self._warmup and not self.drifts and len(self._busy_first) < _BUSY_KEPT:
            self._busy_first.append((number, busy))

    def _mention(self) -> None:
        self._mentioned = True
        level_s, predicted_s = self._detector.level_s, self._predicted_s
        if level_s is not None and predicted_s is not None and abs(math.log(level_s / predicted_s)) > math.log1p(_OFF):
            self._say(
                f"the first steps take {level_s * 1e3:.4g} ms, {level_s / predicted_s:.3g} times what the plan predicts; "
                "later steps are compared with them"
            )

    def _noticed(self, drift: Drift) -> None:
        self.drifts.append(drift)
        self._event("drift", began=drift.began, before_s=drift.before_s, after_s=drift.after_s, ratio=drift.of_reference)
        self._say(drift.text())
        if abs(math.log(drift.of_reference)) < self._least:
            self._pending = None
            self._say("the steps are as long as the reference again; nothing to plan")
        elif self._replan:
            self._pending = drift

    def _look(self) -> None:
        """Starts a background process that is due, takes the result of one that is finished, ends one that hangs."""
        now = time.monotonic()
        if self._job is None:
            drift = self._pending
            if drift is not None and now - self._started_s >= self._pause_s and not self._awaits_busy(drift):
                self._start(drift, now)
            return
        result = self._job.poll()
        if result is None and now - self._started_s > self._job.most_s:
            self._job.end()
            result = f"it did not end within {self._job.most_s:.0f} s"
        if result is None:
            return
        self._job = None
        if isinstance(result, str):
            self._event("replan_failed", reason=result)
            self._say(f"planning again failed ({result}); training goes on with the running plan")
            return
        self.reports.append(result)
        self._event("replanned", proposal=result.proposal, mean_gain=result.mean_gain, worst_gain=result.worst_gain)
        for line in result.lines():
            self._say(line)

    def _awaits_busy(self, drift: Drift) -> bool:
        """Whether it is worth waiting for steps that tell where the drift is."""
        if self._probe is None or self._detector.count - drift.step > 2 * _BUSY_NEEDED * self._probe.every:
            return False
        return sum(number >= drift.began for number, _ in self._busy) < _BUSY_NEEDED

    def _start(self, drift: Drift, now: float) -> None:
        self._pending, self._started_s = None, now
        since = [busy for number, busy in self._busy if number >= drift.began]
        before = [busy for number, busy in self._busy_first if number < self.drifts[0].began]
        base = self._out.absolute().with_name(
            f"{self._out.name.removesuffix('.jsonl').removesuffix('.steps')}.step{drift.step}"
        )
        try:
            self._job = ReplanJob(
                self._plan,
                self._problem,
                drift,
                plan_path=base.with_name(f"{base.name}.plan.json"),
                report_path=base.with_name(f"{base.name}.replan.json"),
                busy_s=_medians(since) if before or self._held else None,
                busy_before_s=None if self._held else _medians(before),
                **self._settings,  # type: ignore[arg-type]
            )
        except (OSError, InputError) as error:
            self._say(f"planning again could not be started ({error}); training goes on with the running plan")
            return
        self._say(f"planning again in process {self._job.process.pid}; the running job is left as it is")

    def _event(self, name: str, **told: Any) -> None:
        self._lines.append(json.dumps({"event": name, "step": self._detector.count - 1, "at": round(time.time(), 3), **told}))

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._flushed_s = time.monotonic()
        if self._writer is None or not lines:
            return
        try:
            self._writer.write(lines, self._detector.reference_s)
        except OSError as error:
            self._writer = None
            self._say(f"{self._out}: cannot be written any more ({error.strerror}); steps are watched, but not recorded")

    def _say(self, line: str) -> None:
        self._report(line)

    def _give_up(self, error: Exception) -> None:
        _print(f"the watch of the steps has ended ({type(error).__name__}: {' '.join(str(error).split())}); training goes on")
        if self._job is not None:
            self._job.end()
        self._pid = -1


class _Step:
    """Context of one step."""

    __slots__ = ("_begin_s", "_watch")

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch
        self._begin_s = 0.0

    def __enter__(self) -> _Step:
        watch = self._watch
        if watch._probe is not None:
            watch._probe.begin()
        if watch._pid > 0:
            self._begin_s = self._now()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        watch = self._watch
        if kind is not None:
            if watch._probe is not None:
                watch._probe.drop()
            return
        end_s = self._now() if watch._pid > 0 else 0.0
        busy_s = watch._probe.end() if watch._probe is not None else None
        if watch._pid > 0 and watch._pid == os.getpid():
            watch._take(end_s - self._begin_s, busy_s)

    def _now(self) -> float:
        synchronize = self._watch._synchronize
        if synchronize is not None:
            synchronize()
        return time.perf_counter()


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _medians(rows: Sequence[tuple[float, ...]]) -> list[float] | None:
    """Per device; None without rows of one length."""
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _passive() -> StepWatch:
    """What a watch is in another process."""
    watch = StepWatch.__new__(StepWatch)
    watch.drifts, watch.reports, watch._step, watch._probe, watch._pid = [], [], _Step(watch), None, -1
    watch._last_s = math.nan
    return watch
