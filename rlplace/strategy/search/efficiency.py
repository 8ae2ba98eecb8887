"""Statistical efficiency: epochs that a training run needs at a global batch, and the batch by time to the target.

Two plans that process equally many samples a second are not equally good when one of them needs a larger global batch: beyond
some batch a model needs more epochs to the same quality. A `BatchCurve` gives their number; time to quality is proportional to
epochs(batch) x step time / batch, each batch with its own best strategy.

Reference: Pal et al., "Optimizing multi-GPU parallelization strategies for deep learning training", IEEE Micro 39(5), 2019
(arXiv 1907.13257), where the epochs are measured per model by emulating large batches. Ours are the two laws that a curve may
follow, one law in two forms: the inverse law between batch and updates, updates(B) = a + b / B (Shallue et al., "Measuring the
effects of data parallelism on neural network training", JMLR 20, 2019), and the critical batch, E(B) = E_min (1 + B / B_crit),
with E_min = b / samples per epoch and B_crit = b / a.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from rlplace.errors import InputError, RlplaceError
from rlplace.files import read_record, write_json
from rlplace.plan.strategy import uniform_words
from rlplace.records import Record, build, plain
from rlplace.strategy.search.search import SearchResult, search
from rlplace.strategy.search.tries import Progress, SearchProblem

FORMAT = "rlplace.batch_curve"
VERSION = 1

_Positive = Annotated[float, Meta(ge=1e-12, le=1e18)]


@dataclass(frozen=True)
class BatchCurve:
    """Epochs to a fixed quality as a function of the global batch, by points or by a law.

    Between points, epochs and batch follow a straight line on logarithmic axes (a power law). Below the first point epochs are
    the first point's; above the last one the line of the last two points goes on, or stays level if it falls: epochs never
    shrink outside of the measured range. A single point is a constant.

    Attributes:
        points: (global batch in samples, epochs) by rising batch, or empty when the curve is a law.
        min_epochs: E_min of the law E(B) = E_min (1 + B / B_crit), epochs at the smallest batches; None with points.
        critical_batch: B_crit in samples, at which epochs have doubled; inf where epochs never rise; None with points.
        name: For people.

    Raises:
        InputError: Neither or both of points and law, or a number out of range.
    """

    points: tuple[tuple[float, float], ...] = ()
    min_epochs: float | None = None
    critical_batch: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        law = (self.min_epochs is not None, self.critical_batch is not None)
        if law == (False, False) and self.points:
            points = tuple(sorted((_positive(b, "batch"), _positive(e, "epochs")) for b, e in self.points))
            if any(low[0] == high[0] for low, high in pairwise(points)):
                raise InputError("batch curve: points: every batch may appear once")
            object.__setattr__(self, "points", points)
        elif law == (True, True) and not self.points:
            _positive(self.min_epochs, "min_epochs")
            if self.critical_batch != math.inf:
                _positive(self.critical_batch, "critical_batch")
        else:
            raise InputError("batch curve: give either points, or min_epochs and critical_batch")

    @staticmethod
    def from_updates(floor: float, samples: float, samples_per_epoch: float, *, name: str = "") -> BatchCurve:
        """Returns the curve of the inverse law updates(B) = floor + samples / B.

        Args:
            floor: Updates that even the largest batch needs (a); 0: epochs never rise.
            samples: Samples that even the smallest batch needs (b).
            samples_per_epoch: Size of the data set.
            name: For people.
        """
        if floor != 0:
            _positive(floor, "updates floor")
        critical = math.inf if floor == 0 else _positive(samples, "updates samples") / floor
        least = _positive(samples, "updates samples") / _positive(samples_per_epoch, "samples_per_epoch")
        return BatchCurve(min_epochs=least, critical_batch=critical, name=name)

    def epochs(self, batch: float) -> float:
        """Returns epochs that a global batch of `batch` samples needs."""
        _positive(batch, "batch")
        if self.min_epochs is not None and self.critical_batch is not None:
            return self.min_epochs * (1.0 + batch / self.critical_batch)
        first, last = self.points[0], self.points[-1]
        if batch <= first[0] or len(self.points) == 1:
            return first[1]
        low, high = next(((a, b) for a, b in pairwise(self.points) if batch <= b[0]), self.points[-2:])
        slope = math.log(high[1] / low[1]) / math.log(high[0] / low[0])
        if batch > last[0]:
            return last[1] * (batch / last[0]) ** max(slope, 0.0)
        return high[1] if batch == high[0] else low[1] * (batch / low[0]) ** slope

    def save(self, path: str | Path) -> None:
        """Writes the curve as JSON, atomically."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        if self.name:
            data["name"] = self.name
        if self.points:
            data["points"] = [list(point) for point in self.points]
        else:
            data["min_epochs"] = self.min_epochs
            data["critical_batch"] = None if self.critical_batch == math.inf else self.critical_batch
        write_json(path, data)

    @staticmethod
    def load(path: str | Path) -> BatchCurve:
        """Reads and checks a file (docs/formats.md, section Batch curve).

        Raises:
            InputError: The file is missing, malformed or newer than this code.
        """
        return read_record(path, FORMAT, VERSION, batch_curve_from_dict)


class _CurveFile(Record, frozen=True):
    """A curve in one of its `_FORMS`.

    Attributes:
        name: For people.
        points: Pairs of batch and epochs, every batch once; straight lines on logarithmic axes between them, the first point's
            epochs below, the last two points' line above (level if it falls).
        min_epochs: E(B) = min_epochs (1 + B / critical_batch).
        critical_batch: Its batch; None: epochs never rise.
        updates_floor: Updates(B) = updates_floor + updates_samples / B.
        updates_samples: Its samples.
        samples_per_epoch: Epochs are updates times B over this.
    """

    name: str = ""
    points: Annotated[tuple[tuple[_Positive, _Positive], ...], Meta(min_length=1)] = ()
    min_epochs: _Positive = 0.0
    critical_batch: _Positive | None = None
    updates_floor: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    updates_samples: _Positive = 0.0
    samples_per_epoch: _Positive = 0.0


_FORMS: tuple[set[str], ...] = (
    {"points"},
    {"min_epochs", "critical_batch"},
    {"updates_floor", "updates_samples", "samples_per_epoch"},
)


def batch_curve_from_dict(data: Mapping[str, Any]) -> BatchCurve:
    """Builds a curve from the data of a file without its header.

    Raises:
        InputError: Names the key that is wrong.
    """
    file, given = build(_CurveFile, data, "batch curve"), set(data) - {"name"}
    if given not in _FORMS:
        forms = "; or ".join(", ".join(sorted(form)) for form in _FORMS)
        raise InputError(f"batch curve: give one form and all of its keys: {forms}")
    if file.points:
        return BatchCurve(points=file.points, name=file.name)
    if file.min_epochs:
        critical = math.inf if file.critical_batch is None else file.critical_batch
        return BatchCurve(min_epochs=file.min_epochs, critical_batch=critical, name=file.name)
    return BatchCurve.from_updates(file.updates_floor, file.updates_samples, file.samples_per_epoch, name=file.name)


def _positive(value: Any, what: str) -> float:
    number: float = build(_Positive, plain(value), f"batch curve: {what}")
    return number


def batches(smallest: int, devices: int) -> list[int]:
    """Returns the batches to try: the smallest, and it times 2, 4, 8, ... up to the number of devices, and that."""
    return sorted({smallest * factor for factor in (*(1 << power for power in range(devices.bit_length())), devices)})


def search_batches(
    problem: SearchProblem,
    curve: BatchCurve,
    *,
    calls: int | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> tuple[SearchProblem, SearchResult, tuple[Mapping[str, Any], ...]]:
    """Searches at several batches.

    Args:
        problem: Its batch is the smallest.
        curve: Epochs by batch.
        calls: Evaluations at most, for all batches together.
        time_limit_s: Seconds at most, likewise.
        progress: Called as the search at each batch proceeds.

    Returns:
        The problem with the shortest time to the target, its strategies, and an entry for every batch, whose ``target_s`` is
        proportional to the time to the target.

    Raises:
        InputError: Nothing is left to choose from, at any batch.
        InfeasibleError: Nothing fits.
    """
    sizes = batches(problem.batch, problem.cluster.num_devices)
    share = None if calls is None else max(1, calls // len(sizes))
    limit_s = None if time_limit_s is None else time_limit_s / len(sizes)
    found: list[tuple[float, SearchProblem, SearchResult | RlplaceError]] = []
    entries = []
    for size in sizes:
        asked = dataclasses.replace(problem, batch=size)
        entry: dict[str, Any] = {"batch": size, "epochs": curve.epochs(size), "target_s": None}
        try:
            result = search(asked, calls=share, time_limit_s=limit_s, progress=progress)
        except RlplaceError as error:
            found.append((math.inf, asked, error))
            entries.append({**entry, "step_time_s": None, "words": "", "reason": str(error)})
        else:
            best = result.ranked[0]
            target_s = curve.epochs(size) * best.step_s / size
            found.append((target_s, asked, result))
            words = uniform_words(best.draft.strategy(asked.costs.names))
            entries.append({**entry, "target_s": target_s, "step_time_s": best.step_s, "words": words, "reason": None})
    _, asked, chosen = min(found, key=lambda item: item[0])
    if isinstance(chosen, RlplaceError):
        raise chosen
    return asked, chosen, tuple(entries)
