"""A session on a real cluster: propose a strategy, run it, update the belief about the cluster, propose the next.

Every run is a process of its own, started by a command whose timings file holds its times, so that a crash is a datum. A run is
written to a log before it begins; a session with the same log continues from its end, and runs of earlier sessions count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cost.timings import PlanTimings
from rlplace.errors import InfeasibleError, InputError, RlplaceError
from rlplace.measure.belief import RULES, Belief, Observation
from rlplace.measure.log import Ended, Run, RunLog
from rlplace.measure.pool import FEATURES, Pool, candidates, features, first_pool
from rlplace.measure.world import fullest, problem_in
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.planned import Planned
from rlplace.strategy.drafts import Draft, draft_of_strategy
from rlplace.strategy.executor.evaluate import StepEvaluation
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.tries import SearchProblem

AGAIN_CALLS, AGAIN_MOST = 200, 3
"""Evaluations of the search of the corrected model after every run, and strategies of its answer that join the candidates."""

FAR = 0.5
"""Standard deviations of an axis."""

PLAN, TIMINGS = "{plan}", "{timings}"
"""Words of a command for the file of the plan, and for the file that it must write (``rlplace measure --plans`` does)."""

_MEMORY = ("out of memory", "outofmemoryerror", "cannot allocate memory", "std::bad_alloc")
_TIMED_S, _END_S = 10, 40.0
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

Launch = Callable[[PlacementPlan], Ended]
"""Runs a plan."""


@dataclass(eq=False)
class Session:
    """A sequence of runs on one cluster for one model.

    Attributes:
        planned: The planner's answer and its priced model: its strategy runs among the first, and its source says what is run.
        launch: Runs a plan.
        log: Log of the runs.
        rule: Chooses the next run, a name of `rlplace.measure.belief.RULES`.
        seed: Seed of the worlds.
        site: Separates clusters that are planned for alike.
        elsewhere: Runs of others that inform about this cluster (`transferable`).
        belief: The posterior after all runs.
    """

    planned: Planned
    launch: Launch
    _: KW_ONLY
    log: RunLog = field(default_factory=RunLog)
    rule: str = "improvement"
    seed: int = 0
    site: str = ""
    elsewhere: tuple[Run, ...] = ()
    belief: Belief = field(init=False)

    def __post_init__(self) -> None:
        self.plan, self.problem = self.planned.plan, self.planned.search_problem
        if self.rule not in RULES:
            raise InputError(f"finetune: no rule {self.rule!r}; there are {', '.join(RULES)}")
        known = [run for run in self.log.runs if (run.question, run.site) == (self.plan.problem, self.site)]
        pool = first_pool(self.problem, seed=self.seed)
        names = self.problem.costs.names
        drafts = [draft_of_strategy(Strategy.from_dict(run.strategy), names) for run in known]
        pool = pool.with_drafts([draft_of_strategy(self.planned.strategy, names), *drafts], self.problem)
        self.belief = Belief(pool, elsewhere=self.elsewhere)
        for run, draft in zip(known, drafts, strict=True):
            if draft in pool.drafts:
                self._observe(run, pool.drafts.index(draft))

    def runs(self, count: int) -> Iterator[tuple[PlacementPlan, Run]]:
        """Runs so many strategies more, one after the other; ends earlier where nothing is worth a run."""
        for _ in range(count):
            chosen = RULES[self.rule](self.belief)
            if chosen is None:
                return
            plan, pool = self.plan_of(chosen), self.belief.pool
            begun = run_of(
                pool.drafts[chosen],
                pool.steps[chosen],
                self.problem.costs.names,
                self.problem.cluster,
                question=self.plan.problem,
                site=self.site,
                expected_s=math.exp(float(self.belief.mean[chosen])),
                fits=float(self.belief.fits[chosen]),
            )
            number = self.log.begin(begun)
            ended = self.launch(plan)
            run = self.log.end(number, ended)
            self._observe(run, chosen)
            self.belief = dataclasses.replace(self.belief, pool=replan(self.belief, self.problem))
            yield plan, run

    def plan_of(self, number: int) -> PlacementPlan:
        """Returns the plan of a candidate."""
        pool = self.belief.pool
        return dataclasses.replace(
            self.plan,
            strategy=self.problem.strategy(pool.drafts[number]),
            predicted=prediction(pool.steps[number], self.problem.batch, self.problem.cluster),
            planner="session",
        )

    def best(self) -> tuple[PlacementPlan, Observation]:
        """Returns the quickest run and its plan.

        Raises:
            InfeasibleError: None has worked.
        """
        if self.belief.best is None:
            raise InfeasibleError(f"finetune: none of {len(self.belief.observations)} strategies worked; the log says why")
        return self.plan_of(self.belief.best.candidate), self.belief.best

    def left_to_gain(self) -> tuple[PlacementPlan, float] | None:
        """Returns the most promising strategy that did not run, and its expected step time; None where all have run."""
        belief = self.belief
        likely = belief.untried & (belief.fits > 0.5)
        if not likely.any():
            return None
        number = int(np.argmin(np.where(likely, belief.mean, np.inf)))
        return self.plan_of(number), math.exp(float(belief.mean[number]))

    def _observe(self, run: Run, number: int) -> None:
        share = run.share if run.status == "done" else None
        stages = self.belief.pool.drafts[number].stages
        busy_s = run.stage_busy_s if len(run.stage_busy_s) == stages else ()
        short = run.status == "out_of_memory"
        self.belief = self.belief.update(Observation(number, run.median_s, share, short, run.pace_s, busy_s))


def run_of(draft: Draft, step: StepEvaluation, names: Sequence[str], cluster: Cluster, **more: Any) -> Run:
    """Returns a run that has not begun.

    Args:
        draft: The strategy.
        step: Its step by the cost model.
        names: Names of the blocks.
        cluster: Its devices.
        **more: Further fields of `rlplace.measure.log.Run`.
    """
    fields: dict[str, Any] = {"question": "", "site": "", "expected_s": step.step_time_s, "fits": 1.0, **more}
    return Run(
        strategy=draft.strategy(names).to_dict(),
        kinds=tuple(kind.name for kind in cluster.kinds),
        hosts=cluster.hosts,
        features=tuple(features(draft, step).tolist()),
        predicted_s=step.step_time_s,
        predicted_share=fullest(step, cluster),
        **fields,
    )


def transferable(runs: Iterable[Run], cluster: Cluster) -> tuple[Run, ...]:
    """Returns runs elsewhere that inform about a cluster: they took a time on devices of the same kinds.

    Raises:
        InputError: None does, or one was written by a version with other features.
    """
    kinds = {kind.name for kind in cluster.kinds}
    done = [run for run in runs if run.median_s is not None]
    found = tuple(run for run in done if set(run.kinds) == kinds)
    if not found:
        others = ", ".join(sorted({"+".join(sorted(set(run.kinds))) for run in done})) or "nothing that worked"
        raise InputError(
            f"runs elsewhere tell nothing of {'+'.join(sorted(kinds))}: they hold {others}; "
            "leave them out, or name files with runs on devices of these kinds"
        )
    for run in found:
        if len(run.features) != len(FEATURES):
            raise InputError(
                f"a run elsewhere has {len(run.features)} features of its strategy, this version {len(FEATURES)}; "
                "leave out its file, or export it with this version"
            )
    return found


def replan(belief: Belief, problem: SearchProblem) -> Pool:
    """Adds the candidates that a search of the corrected model proposes.

    Where the posterior is far from the world around which step times are linear, they are taken around it: a strategy that
    spares a slow host looks slow by its slopes around hosts that are alike.
    """
    pool = belief.pool
    if np.abs(belief.axes - pool.worlds.center).max() > FAR:
        pool = pool.around(belief.axes, problem)
        belief = dataclasses.replace(belief, pool=pool)
    try:
        found = candidates(problem_in(belief.world(), problem), AGAIN_CALLS, AGAIN_MOST)
    except InfeasibleError:  # in the cluster that is believed in, nothing fits; untried candidates remain
        return pool
    return pool.with_drafts(found, problem)


def local_command(cluster: Cluster, device: str | None = None, options: str = "") -> str:
    """Returns the command for a cluster of one host: this machine; by default on its GPUs where it has any."""
    if len(set(cluster.hosts)) > 1:
        raise InputError(
            "finetune: the cluster has several hosts; --launch says how a plan is run on them, for example "
            f'--launch "srun torchrun ... -m rlplace measure --plans {PLAN} --out {TIMINGS}"'
        )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cluster.num_devices}"]
    command = f"-m rlplace measure --plans {PLAN} --out {TIMINGS} --time-limit {_TIMED_S}"
    options = f"--device {device} {options}" if device else options
    return f"{shlex.join(words)} {command} {options}".strip()


def launcher(command: str, cluster: Cluster, *, timeout_s: float = 600.0) -> Launch:
    """Returns a function that runs plans.

    Args:
        command: As a shell reads it, with ``{plan}`` and ``{timings}``; every word is quoted once they are filled in.
        cluster: Measured peaks are shares of its memory.
        timeout_s: After which a run counts as crashed and is ended.

    Raises:
        InputError: The command names no file of the plan or of the timings.
    """
    for place in (PLAN, TIMINGS):
        if place not in command:
            raise InputError(f"finetune: --launch {command!r} does not say {place}, a file that it must be told")

    def run(plan: PlacementPlan) -> Ended:
        with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
            where = {PLAN: str(Path(folder, "run.plan.json")), TIMINGS: str(Path(folder, "run.timings.json"))}
            plan.save(where[PLAN])
            words = [where.get(word, word) for word in shlex.split(command)]
            status, lines = _run(words, timeout_s)
            if status is None:
                return Ended(status="crashed", reason=f"it took more than {timeout_s:g} s")
            if status == 0:
                return _read(where[TIMINGS], cluster)
            of_memory = [line.strip() for line in lines if any(word in line.lower() for word in _MEMORY)]
            last = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with {status}")
            reason = next(iter(of_memory), last)[:4000]
            return Ended(status="out_of_memory" if of_memory or status in _KILLED else "crashed", reason=reason)

    return run


def _run(words: list[str], timeout_s: float) -> tuple[int | None, list[str]]:
    """Returns the exit status, None where it was ended for its time, and the last lines of its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
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
        output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 16)))
        return status, output.read().splitlines()


def _read(path: str, cluster: Cluster) -> Ended:
    """Returns the outcome by the timings of one plan."""
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
