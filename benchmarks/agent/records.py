"""Records of what is measured: cases with their floor, methods, budgets, rows; and the file that holds them.

The file is JSON lines, a header and then what was found out, each on disk as soon as it is there. A last line that was cut off
is dropped. Rows of other settings, other problems, other weights or options under the same name are refused; rows that failed
are run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import asdict

from rlplace.errors import InputError, show
from rlplace.files import check_output
from rlplace.lines import LineFile
from rlplace.placement.ask import INFEASIBLE, OK
from rlplace.records import Record, Whole, build

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


FORMAT, VERSION = "rlplace.agent_benchmark", 2
KINDS = {"case": CaseInfo, "method": Method, "row": BenchmarkRow}


class Store:
    """Everything so far; the only writer of its file.

    Attributes:
        settings: What all rows have in common: the set of cases and the versions.
        cases, methods, rows: By name, and by key.
    """

    def __init__(self, settings: Mapping[str, Any], path: str | Path | None = None, *, report: bool = False) -> None:
        """Opens a file and goes on with it, or begins it.

        Args:
            settings: See the attribute.
            path: ``*.jsonl``; None keeps everything in memory.
            report: Take the file as it is, whatever its settings, to make tables of it; nothing is written.

        Raises:
            InputError: The file is damaged, or was made under other settings.
        """
        self.settings = dict(settings)
        self.cases: dict[str, CaseInfo] = {}
        self.methods: dict[str, Method] = {}
        self.rows: dict[tuple[str, str, str, int], BenchmarkRow] = {}
        self._file = None if path is None else LineFile(path, FORMAT, VERSION)
        if self._file is not None:
            check_output(self._file.path)
        if self._file is not None and (report or self._file.path.exists()):
            self._take(self._file, check=not report)
        elif self._file is not None:
            self._file.begin(settings=self.settings)

    def add(self, record: CaseInfo | Method | BenchmarkRow) -> None:
        """Adds a finished row (one that failed before gives way), a method or a case.

        Raises:
            InputError: A case of this name is another problem, or a method of this name has other weights or options.
        """
        if isinstance(record, BenchmarkRow):
            self.rows[record.key] = record
        else:
            known = self.cases if isinstance(record, CaseInfo) else self.methods
            before = known.setdefault(record.name, record)  # type: ignore[attr-defined]
            if before is not record:
                self._check(before, record)
                return
        if self._file is not None:
            self._file.append({next(kind for kind, own in KINDS.items() if type(record) is own): asdict(record)})

    def done(self, key: tuple[str, str, str, int]) -> bool:
        """Says whether a row is there and did not fail."""
        return key in self.rows and self.rows[key].status in (OK, INFEASIBLE)

    def _check(self, before: Any, now: Any) -> None:
        for key in ("fingerprint", "options", "role"):
            if getattr(before, key, None) != getattr(now, key, None):
                raise InputError(
                    f"{self._file and self._file.path}: rows of {now.name} were made with {key} "
                    f"{str(getattr(before, key))[:40]}, now {str(getattr(now, key))[:40]}; use another --out"
                )

    def _take(self, file: LineFile, *, check: bool) -> None:
        settings, entries = file.records(tuple(KINDS), repair=check)
        known = settings if isinstance(settings, dict) else {}
        if check and known != self.settings:
            keys = [key for key in {**known, **self.settings} if known.get(key) != self.settings.get(key)]
            changes = ", ".join(f"{key} {show(known.get(key))}, now {show(self.settings.get(key))}" for key in keys)
            raise InputError(f"{file.path}: made with {changes}; rows under other settings do not compare: use another --out")
        self.settings = known
        for kind, data, where in entries:
            record = build(KINDS[kind], data, where)
            if isinstance(record, BenchmarkRow):
                if record.case not in self.cases or record.method not in self.methods:
                    raise InputError(f"{where}: its case {record.case!r} or method {record.method!r} is not in the file")
                self.rows[record.key] = record
            else:
                (self.cases if isinstance(record, CaseInfo) else self.methods)[record.name] = record  # type: ignore[index]
