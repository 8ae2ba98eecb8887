"""One attempt of a planner: its plan or its error, its time and its simulator calls. All timing of planners is done here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlplace.errors import InfeasibleError, MissingError, RlplaceError
from rlplace.placement.common.evaluate import count_calls
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem

OK, INFEASIBLE, MISSING, FAILED = "ok", "infeasible", "missing", "failed"


@dataclass(frozen=True, eq=False)
class Attempt:
    """A plan or an error, with time and simulator calls.

    Attributes:
        answer: The plan; None where there is none.
        judged: Result of `judge` for the plan.
        error: The error of the planner, or of `judge`; None without one.
        seconds: Wall-clock time of the planner.
        simulator_calls: Simulations that it made.
    """

    answer: PlacementPlan | None
    judged: Any
    error: Exception | None
    seconds: float
    simulator_calls: int

    @property
    def plan(self) -> PlacementPlan:
        """The plan; where there is none, the error is raised."""
        if self.answer is None:
            assert self.error is not None
            raise self.error
        return self.answer

    @property
    def status(self) -> str:
        """One of `OK`, `INFEASIBLE`, `MISSING` (an extra) and `FAILED`."""
        if self.error is None:
            return OK
        kinds = {InfeasibleError: INFEASIBLE, MissingError: MISSING}
        return next((status for kind, status in kinds.items() if isinstance(self.error, kind)), FAILED)

    @property
    def reason(self) -> str | None:
        """The error in one line, of a bug with its type; None without one."""
        if self.error is None:
            return None
        text = " ".join(str(self.error).split()) or type(self.error).__name__
        return text if isinstance(self.error, RlplaceError) else f"{type(self.error).__name__}: {text}"


def attempt(
    planner: Callable[..., PlacementPlan],
    problem: Problem,
    *,
    seed: int = 0,
    judge: Callable[[PlacementPlan], Any] | None = None,
    catch: tuple[type[Exception], ...] = (InfeasibleError,),
    **options: Any,
) -> Attempt:
    """Runs a planner, and measures it.

    Args:
        planner: A planner, or a function that is called like one.
        problem: The problem to place.
        seed: Seed of all random choices.
        judge: Checks the plan after the clock has stopped; its errors count as the planner's.
        catch: Errors that are recorded; others are raised.
        **options: Budget (`calls`, `time_limit_s`), `start` and other options of the planner.
    """
    answer, judged, caught = None, None, None
    took_s, own_calls = None, 0
    begin_s = time.perf_counter()
    with count_calls() as counter:
        try:
            answer = planner(problem, seed=seed, **options)
            took_s = time.perf_counter() - begin_s
            own_calls = answer.predicted.search_calls or 0  # of a planner that simulates without an `Evaluator`
            judged = None if judge is None else judge(answer)
        except catch as error:
            caught = error
    took_s = time.perf_counter() - begin_s if took_s is None else took_s
    return Attempt(answer, judged, caught, took_s, max(own_calls, counter.calls))
