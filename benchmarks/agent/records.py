"""Records of what is measured: cases with their floor, methods, budgets, rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import field

from rlplace.errors import InputError, show
from rlplace.records import Record, Whole

RIVAL, AGENT, ABLATION = "rival", "agent", "ablation"


@dataclass(frozen=True, order=True)
class Budget:
    """The calls or seconds that a run may spend after the floor.

    Attributes:
        kind: ``"calls"`` (simulator calls) or ``"s"`` (wall seconds).
        value: How many.
    """

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} {self.kind}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a planner."""
        return {"calls": int(self.value)} if self.kind == "calls" else {"time_limit_s": self.value}

    @staticmethod
    def parse(text: str) -> Budget:
        """Reads ``"64 calls"``, ``"64"``, ``"5 s"`` or ``"5s"``."""
        number = text.strip()
        kind = "calls"
        for ending in ("calls", "s"):
            if number.endswith(ending):
                number, kind = number[: -len(ending)].strip(), ending
                break
        try:
            value = float(number)
        except ValueError:
            raise InputError(f"budget {show(text)} is not one like '64 calls' or '5 s'") from None
        if not 0 < value < 1e12 or (kind == "calls" and value != int(value)):
            raise InputError(f"budget {show(text)} is not a positive number of calls or seconds")
        return Budget(kind, value)


class CaseInfo(Record, frozen=True):
    """A case and the floor that every method starts from.

    Attributes:
        name, family: Of the case.
        fingerprint: Its problem's fingerprint.
        branchy: See `rlplace.agents.problems.cases.ProblemCase`.
        unseen: Its cluster has a size or topology that no training problem has.
        floor_s: Step time of `best`; None: it found no plan that fits, and every method makes its own start.
        floor: Its device of every group.
        floor_seconds: Wall time that it took.
    """

    name: str
    family: str
    fingerprint: str
    branchy: bool
    unseen: bool
    floor_s: float | None
    floor: list[int] | None
    floor_seconds: float


class Method(Record, frozen=True):
    """Something that places.

    Attributes:
        name: Unique label.
        role: `RIVAL` (a classical search), `AGENT` (a training seed) or `ABLATION` (an agent beside them).
        checkpoint: Name or folder of an agent; None of a classical search.
        fingerprint: Fingerprint of its weights.
        options: Further arguments of its planner; ``untrained``: with a network that was never trained.
    """

    name: str
    role: str
    checkpoint: str | None = None
    fingerprint: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class BenchmarkRow(Record, frozen=True):
    """One run.

    Attributes:
        case, method: Names.
        budget: Text of a `Budget`.
        seed: Seed of the run.
        status: "ok" (a plan came back), "infeasible" (the method says there is none) or "failed".
        step_time_s: Step time of the plan, simulated anew; None without a plan or when its step cannot complete.
        violation: What is wrong with the plan, in one line; None: nothing.
        calls: Simulator calls of the run.
        seconds: Wall time of the run.
        load: Load average of the machine over the last minute, at the end of the run.
    """

    case: str
    method: str
    budget: str
    seed: Whole
    status: str
    step_time_s: float | None
    violation: str | None
    calls: Whole
    seconds: float
    load: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The key of the row; no two rows share one."""
        return self.case, self.method, self.budget, self.seed

    @property
    def valid(self) -> bool:
        """True where the run gave a plan that is feasible and as stated."""
        return self.step_time_s is not None and self.violation is None
