"""`RunLog`: step times of strategies on real clusters, one JSON line a run (docs/formats.md).

A run is written before it begins and again when it has ended, each line at once: a job that is killed loses nothing but the
current run, which is known. Files of others can be read together; `shared` leaves out names of machines and modules.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rlplace.errors import InputError
from rlplace.limits import DEVICES
from rlplace.lines import LineFile
from rlplace.records import Record, build, plain

FORMAT, VERSION = "rlplace.runs", 1

Status = Literal["running", "done", "out_of_memory", "crashed", "refused"]
"""How a run ended. `refused`: the runtime cannot run it. `running`: it has not ended, or its session ended with it."""

_Seconds = Annotated[float, Meta(gt=0.0, lt=1e18)]
_Share = Annotated[float, Meta(ge=0.0, lt=1e6)]
_Name = Annotated[str, Meta(max_length=1000)]


class Ended(Record, frozen=True):
    """The outcome of a run.

    Attributes:
        status: How it ended.
        step_s: Seconds of every timed step.
        share: Measured share of the fullest device's memory beyond its reserved bytes; None where it was not measured.
        pace_s: By process, seconds of a product that is the same on all; empty where it was not timed.
        stage_busy_s: By stage of a pipeline, seconds of its passes, on the slowest process; empty where they were not timed.
        reason: Why it failed, one line; empty in shared files.
        stack: Software by name: versions.
    """

    status: Status
    step_s: Annotated[tuple[_Seconds, ...], Meta(max_length=1 << 16)] = ()
    share: _Share | None = None
    pace_s: Annotated[tuple[_Seconds, ...], Meta(max_length=DEVICES)] = ()
    stage_busy_s: Annotated[tuple[_Seconds, ...], Meta(max_length=1 << 16)] = ()
    reason: Annotated[str, Meta(max_length=4000)] = ""
    stack: Mapping[str, _Name] = {}


class Run(Ended, frozen=True, kw_only=True):
    """One strategy on one cluster, and its outcome.

    Attributes:
        question: Hash of graph, cluster, costs and batch, as plans have it; empty in shared files.
        site: Separates clusters that are planned for alike; empty in shared files.
        strategy: As plans hold it; in shared files blocks are numbers.
        kinds: Kind of every device.
        hosts: Host number of every device.
        features: `rlplace.measure.pool.FEATURES` of the strategy.
        predicted_s: Step time by the cost model.
        predicted_share: Share of the fullest device's memory beyond its reserved bytes, by the cost model.
        expected_s: Expected step time before the run.
        fits: Chance before the run that it fits.
    """

    question: _Name
    site: _Name
    strategy: Mapping[str, Any]
    kinds: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=DEVICES)]
    hosts: Annotated[tuple[Annotated[int, Meta(ge=0, lt=DEVICES)], ...], Meta(min_length=1, max_length=DEVICES)]
    features: Annotated[tuple[Annotated[float, Meta(ge=-1e6, le=1e6)], ...], Meta(max_length=1000)]
    predicted_s: _Seconds
    predicted_share: _Share
    expected_s: _Seconds
    fits: Annotated[float, Meta(ge=0.0, le=1.0)]
    status: Status = "running"

    @property
    def median_s(self) -> float | None:
        """Median step time; None where it failed."""
        return statistics.median(self.step_s) if self.status == "done" else None


class RunLog:
    """A log of runs, in memory or in a file.

    Attributes:
        runs: All that have ended; those that were running when their session ended count as crashed.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens a log.

        Args:
            path: File, made by the first run; None keeps runs in memory.

        Raises:
            InputError: The file is no log.
        """
        self._file = None if path is None else LineFile(path, FORMAT, VERSION)
        self._begun = False
        self.runs: list[Run] = []
        if self._file is not None and self._file.path.exists():
            cut = Ended(status="crashed", reason="the session ended while it ran")
            self._begun, runs = _read(self._file, repair=True)
            self.runs = [_after(run, cut) if run.status == "running" else run for run in runs]

    def begin(self, run: Run) -> int:
        """Writes a run that begins, and returns its number."""
        self.runs.append(run)
        self._write({"begin": len(self.runs) - 1, "run": plain(run)})
        return len(self.runs) - 1

    def end(self, number: int, ended: Ended) -> Run:
        """Writes the outcome of a run."""
        self.runs[number] = _after(self.runs[number], ended)
        self._write({"end": number, "ended": plain(ended)})
        return self.runs[number]

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        if not self._begun:
            self._file.begin()
            self._begun = True
        self._file.append(entry)


def read_runs(path: str | Path) -> list[Run]:
    """Reads and checks a log.

    Raises:
        InputError: Says which line is wrong, and how.
    """
    return _read(LineFile(path, FORMAT, VERSION), repair=False)[1]


def _read(file: LineFile, *, repair: bool) -> tuple[bool, list[Run]]:
    """Returns whether a log has its header, and its runs."""
    header, entries = file.read(repair=repair)
    runs: list[Run] = []
    for entry, where in entries:
        if isinstance(entry, dict) and entry.keys() == {"begin", "run"}:
            runs.append(build(Run, entry["run"], where, whole_floats=True))
        elif isinstance(entry, dict) and entry.keys() == {"end", "ended"} and entry["end"] in range(len(runs)):
            ended = build(Ended, entry["ended"], where, whole_floats=True)
            runs[entry["end"]] = _after(runs[entry["end"]], ended)
        else:
            raise InputError(f"{where} is neither the begin nor the end of a run")
    return header is not None, runs


def _after(run: Run, ended: Ended) -> Run:
    """Returns a run with its outcome."""
    return msgspec.structs.replace(run, **msgspec.structs.asdict(ended))


def shared(runs: Iterable[Run]) -> list[Run]:
    """Returns runs without names of machines or of the model's modules, for a file for others."""
    done = (run for run in runs if run.status != "running")
    return [msgspec.structs.replace(run, question="", site="", reason="", strategy=_numbered(run.strategy, {})) for run in done]


def write_shared(path: str | Path, runs: Sequence[Run]) -> None:
    """Writes a file for others."""
    log = RunLog(path)
    if log.runs:
        raise InputError(f"{path} exists; give the exported runs another name")
    for run in shared(runs):
        number = log.begin(run)
        log.end(number, Ended(**{key: getattr(run, key) for key in Ended.__struct_fields__}))


def _numbered(data: Any, numbers: dict[str, str]) -> Any:
    """Returns a strategy whose blocks are numbers in the order of their first mention."""
    if isinstance(data, Mapping):
        return {
            key: [numbers.setdefault(block, str(len(numbers))) for block in value]
            if key == "blocks"
            else {numbers.setdefault(block, str(len(numbers))): how for block, how in value.items()}
            if key in ("recompute", "offload", "tensor") and isinstance(value, Mapping)
            else _numbered(value, numbers)
            for key, value in data.items()
        }
    return [_numbered(part, numbers) for part in data] if isinstance(data, list) else data
