"""Fits a cost table to measurements of one device kind, and states its errors on held-out ops.

* A curve for each target, dtype and direction that was timed (`rlplace.cost.compute`), with its timed shapes beside it.
* A curve for each op class, dtype and direction, for targets that were not timed.
* `step_factor`: measured over summed time of whole steps, from the steps of the models that were fitted on and no others.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from rlplace.cluster.presets import DeviceKind
from rlplace.cost.compute import shape_dims
from rlplace.cost.curve import Curve, MeasuredShape
from rlplace.cost.scaled import CLASSES, peak_of, precision_of, seconds_on
from rlplace.cost.table import CostTable, Key, KindCosts, TargetCosts
from rlplace.cost.timings import MeasuredOp, Measurement
from rlplace.errors import InputError
from rlplace.measure.fit import OpTiming, fit_op_curve

_LEAST_S = 1e-8  # times below are clock noise
_MOST_FACTOR = 2.0
_HEADROOM = 1.05

Ops = Sequence[MeasuredOp]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class FitError:
    """Errors of predictions on ops that were not fitted on.

    Attributes:
        label: Op class and direction, or the name of a model.
        ops: Distinct ops.
        mean: Mean absolute relative error, every distinct op counting alike.
        weighted: Mean absolute relative error, every op counting by its measured time in a step.
        measured_s: Sum of measured seconds over all ops, each as often as it occurs.
        predicted_s: Sum of predicted seconds, counted alike.
        loaned: Share of the predicted time from curves of the op class, because the target was not among the fitted ones.
    """

    label: str
    ops: int
    mean: float
    weighted: float
    measured_s: float
    predicted_s: float
    loaned: float = 0.0

    @property
    def total(self) -> float:
        """Relative error of the sum."""
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s > 0 else 0.0


@dataclass(frozen=True)
class Calibration:
    """A fitted table and its errors.

    Attributes:
        table: Costs of one device kind, which override the shipped ones.
        device_kind: The kind.
        ops: Distinct ops that were fitted on.
        by_shape: Errors on held-out shapes, per op class and direction.
        by_model: Errors on each model by a fit on the others.
    """

    table: CostTable
    device_kind: str
    ops: int
    by_shape: tuple[FitError, ...]
    by_model: tuple[FitError, ...]


def calibrate(
    measurements: Sequence[Measurement],
    kind: DeviceKind,
    *,
    holdout: float = 0.25,
    by_model: bool = True,
    seed: int = 0,
) -> Calibration:
    """Fits a cost table.

    Args:
        measurements: Measurements with ops, all of one device and number of threads; dtypes may differ.
        kind: That device kind, as `rlplace.Cluster.detect()` has it: curves are fractions of its peak and bandwidth.
        holdout: Share of the distinct shapes of a target that are held out to state the error by shape; 0 leaves that out.
            The table that is returned is fitted on everything.
        by_model: Whether to state the error on each model by a fit on the others; needs two models.
        seed: Seed of the choice of held-out shapes.

    Returns:
        Table and errors.

    Raises:
        InputError: No ops, or measurements that do not belong together.
    """
    _check(measurements, kind, holdout)
    rows = pool(measurements)
    scale = _time_scale(rows, kind)
    fitted = fit(rows, kind, _source(measurements), scale)
    costs = KindCosts(
        curves=fitted.classes,
        targets={key: TargetCosts(curve, _shapes(rows, key, scale, fitted)) for key, curve in fitted.targets.items()},
        eager_issue_s=_issue(measurements),
        step_factor=step_factor(measurements) / scale,
    )
    shapes = _shape_errors(rows, kind, scale, holdout, seed) if holdout > 0 else ()
    models = _model_errors(measurements, kind, scale) if by_model and len(measurements) > 1 else ()
    return Calibration(
        CostTable({kind.name: costs}, name="calibrated", source=_source(measurements)), kind.name, len(rows), shapes, models
    )


@dataclass(frozen=True)
class Fitted:
    """Curves by target key and by class key; `passed_on` is the host time of a view's backward, by forward key."""

    targets: Mapping[Key, Curve]
    classes: Mapping[Key, Curve]
    passed_on: Mapping[Key, float]


def pool(measurements: Iterable[Measurement]) -> list[MeasuredOp]:
    """Returns the distinct ops of several measurements, with their mean seconds, weighted by count."""
    every = [op for measurement in measurements for op in measurement.ops]
    alike = _grouped(every, lambda op: (_key(op), op.kind, op.flops, op.size_bytes, tuple(sorted(op.dims.items()))))
    rows = []
    for ops in alike.values():
        count = sum(op.count for op in ops)
        seconds = max(sum(op.seconds * op.count for op in ops) / count, _LEAST_S)
        rows.append(msgspec.structs.replace(ops[0], seconds=seconds, count=count))
    return rows


def fit(rows: Ops, kind: DeviceKind, source: str, scale: float = 1.0, wanted: Ops | None = None) -> Fitted:
    """Returns curves by target and by op class.

    Args:
        rows: Distinct ops.
        kind: Device kind of the ops.
        source: Source to record in the curves.
        scale: Factor on all times, see `_time_scale`.
        wanted: Fit only the curves that predict these ops; None: all curves.
    """
    own: list[MeasuredOp] = []
    of_views: list[MeasuredOp] = []
    for op in rows:
        (of_views if op.kind == "view" and op.direction == "backward" and not op.size_bytes else own).append(op)
    by_target, views = _grouped(own, _key), _grouped(of_views, lambda op: (op.target, op.dtype, "forward"))
    by_class = _grouped([op for op in own if op.size_bytes], lambda op: _class_key(op, kind))
    if wanted is not None:
        keys = {_key(row) for row in wanted}
        loans = {_class_key(row, kind) for row in wanted if _key(row) not in by_target}
        by_target = {key: items for key, items in by_target.items() if key in keys}
        by_class = {key: items for key, items in by_class.items() if key in loans}
    passed_on = {key: _mean(items) * scale for key, items in views.items()}
    targets = {key: _fit_rows(items, kind, source, scale, passed_on.get(key, 0.0)) for key, items in by_target.items()}
    classes = {key: _fit_rows(items, kind, source, scale, calls=_kernels(items[0])) for key, items in by_class.items()}
    return Fitted(targets, classes, passed_on)


def predict(op: MeasuredOp, fitted: Fitted, kind: DeviceKind) -> tuple[float, bool]:
    """Returns seconds of an op by a fit, without its scale, and whether the curve is that of its class."""
    curve = fitted.targets.get(_key(op))
    if curve is not None:
        return _seconds(curve, op, kind, 1.0), False
    if op.kind == "view" and not op.size_bytes:
        return 0.0, True  # unknown views and their autograd
    curve = fitted.classes.get(_class_key(op, kind))
    return (0.0 if curve is None else _seconds(curve, op, kind, _kernels(op))), True


def step_factor(measurements: Sequence[Measurement]) -> float:
    """Returns median of measured over summed time of whole steps; 1 where no measurement has both.

    A step that is bound by the host takes what issuing its kernels takes, which pricing adds by itself.
    """
    issue_s = _issue(measurements)
    timed = [(m, m.step.quiet_s) for m in measurements if m.step is not None and m.ops_s > 0]
    ratios = [step_s / max(m.ops_s, issue_s * m.launches) for m, step_s in timed]
    return float(np.clip(statistics.median(ratios), 1 / _MOST_FACTOR, _MOST_FACTOR)) if ratios else 1.0


def _grouped(rows: Iterable[MeasuredOp], key: Callable[[MeasuredOp], K]) -> dict[K, list[MeasuredOp]]:
    groups: dict[K, list[MeasuredOp]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _key(op: MeasuredOp) -> Key:
    return op.target, op.dtype, op.direction


def _class_key(op: MeasuredOp, kind: DeviceKind) -> Key:
    return op.kind, precision_of(kind, op.kind, op.dtype), op.direction


def _check(measurements: Sequence[Measurement], kind: DeviceKind, holdout: float) -> None:
    if not any(m.ops for m in measurements):
        raise InputError("calibrate: no timed ops; measure some with: rlplace measure MODEL --ops --out m.measure.json")
    if not 0 <= holdout < 1:
        raise InputError(f"calibrate: the held-out share must be from 0 to below 1, found {holdout:g}")
    for m in measurements:
        if m.environment.device_kind != kind.name:
            raise InputError(
                f"calibrate: {m.name[:80]} was measured on {m.environment.device_kind[:80]}, expected {kind.name}; "
                "one table a kind"
            )
    first = measurements[0]
    for m, name in itertools.product(measurements[1:], ("device", "threads")):
        here, there = getattr(first.environment, name), getattr(m.environment, name)
        if here != there:
            raise InputError(f"calibrate: {first.name} has {name} {here}, {m.name} has {there}; calibrate them apart")


def _time_scale(rows: Ops, kind: DeviceKind) -> float:
    """Returns factor that makes every time long enough for the peaks of the kind, which presets may state too low.

    Efficiencies may not exceed 1; times are fitted larger by this factor and `step_factor` takes it back.
    """
    factors = [1.0]
    for op in rows:
        if op.seconds * op.count >= 1e-5 and op.kind != "view":
            peak = peak_of(kind, precision_of(kind, op.kind, op.dtype))
            least = max(op.flops / peak, op.size_bytes / kind.memory_bandwidth_bytes_per_s)
            factors.append(_HEADROOM * least / op.seconds)
    return min(max(factors), 50.0)


def _fit_rows(rows: Ops, kind: DeviceKind, source: str, scale: float, more_s: float = 0.0, calls: float = 1.0) -> Curve:
    """Returns the curve of one target or class. Ops without work cost the host's time alone."""
    op = rows[0]
    if all(row.size_bytes == 0 and row.flops == 0 for row in rows):
        return Curve(1.0, 0.0, 1.0, 0.0, floor_s=min(1.0, _mean(rows) * scale + more_s), basis="calibrated", source=source)
    return fit_op_curve(
        [OpTiming(row.flops, row.size_bytes, row.seconds * scale + more_s, calls, row.dims) for row in rows],
        peak_flops=peak_of(kind, precision_of(kind, op.kind, op.dtype)),
        bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s,
        basis="calibrated",
        source=source,
    )


def _kernels(op: MeasuredOp) -> float:
    item = CLASSES[op.kind]
    return max(1.0, item.backward_kernels if op.direction == "backward" else item.kernels)


def _seconds(curve: Curve, op: MeasuredOp, kind: DeviceKind, calls: float) -> float:
    precision = precision_of(kind, op.kind, op.dtype)
    work = seconds_on(kind, precision, curve, [op.flops / calls], [op.size_bytes / calls], {})
    return calls * ((curve.floor_s or 0.0) + float(work[0]))


def _mean(rows: Ops) -> float:
    return sum(row.seconds * row.count for row in rows) / sum(row.count for row in rows)


def _shapes(rows: Ops, key: Key, scale: float, fitted: Fitted) -> tuple[MeasuredShape, ...]:
    """Returns timed shapes of a target; rows with equal dims become one shape with their mean."""
    own = [row for row in rows if _key(row) == key and (row.size_bytes or row.flops)]
    rows_by_dims = _grouped(own, lambda row: frozenset(shape_dims(row.dims, row.flops, row.size_bytes).items()))
    more = fitted.passed_on.get(key, 0.0)
    return tuple(MeasuredShape(dict(sorted(dims)), _mean(alike) * scale + more) for dims, alike in rows_by_dims.items())


def _issue(measurements: Sequence[Measurement]) -> float:
    """Returns host seconds to issue a kernel, where host and device run side by side; 0 where the host does the work.

    Times between marks include setting the marks and walking through the graph. A plain step bounds the time to issue its
    kernels, closely where it is bound by the host.
    """
    seconds = kernels = 0.0
    for op in itertools.chain.from_iterable(m.ops for m in measurements):
        if op.issue_s is not None and op.kind != "view" and op.direction != "update":
            seconds += op.issue_s * op.count
            kernels += _kernels(op) * op.count
    steps = [m.step.quiet_s / m.launches for m in measurements if m.step is not None and m.launches > 0]
    return min(1.0, seconds / kernels, *steps) if kernels else 0.0


def _source(measurements: Sequence[Measurement]) -> str:
    environment = measurements[0].environment
    models = ", ".join(str(m.model.model).partition(",")[0] for m in measurements)
    return f"measured on {environment.device}, torch {environment.torch}, {environment.threads} threads: {models}"[:500]


def _shape_errors(rows: Ops, kind: DeviceKind, scale: float, holdout: float, seed: int) -> tuple[FitError, ...]:
    """Returns errors on a share of the shapes of each target with at least four, predicted from its other shapes."""
    rng = np.random.default_rng(seed)
    kept: list[MeasuredOp] = [row for row in rows if not row.size_bytes]
    out: list[MeasuredOp] = []
    for items in _grouped([row for row in rows if row.size_bytes], _key).values():
        number = round(holdout * len(items)) if len(items) >= 4 else 0
        chosen = set(rng.permutation(len(items))[:number].tolist())
        for index, row in enumerate(items):
            (out if index in chosen else kept).append(row)
    fitted = fit(kept, kind, "", scale, wanted=out)
    groups = _grouped(out, lambda row: f"{row.kind} {row.direction}")
    return tuple(_error(label, groups[label], fitted, kind, scale) for label in sorted(groups))


def _model_errors(measurements: Sequence[Measurement], kind: DeviceKind, scale: float) -> tuple[FitError, ...]:
    """Returns errors on each model by a fit on all other models; the same model at another batch size is not another."""
    errors = []
    for left_out in measurements:
        others = [m for m in measurements if m.model.model != left_out.model.model]
        if left_out.ops and any(m.ops for m in others):
            wanted = pool([left_out])
            fitted = fit(pool(others), kind, "", scale, wanted=wanted)
            errors.append(_error(str(left_out.model.model), wanted, fitted, kind, scale))
    return tuple(errors)


def _error(label: str, rows: Ops, fitted: Fitted, kind: DeviceKind, scale: float) -> FitError:
    measured = np.array([row.seconds for row in rows])
    predictions = [predict(row, fitted, kind) for row in rows]
    predicted = np.array([seconds for seconds, _ in predictions]) / scale
    count = np.array([row.count for row in rows])
    loaned = np.array([loan for _, loan in predictions])
    total = float((predicted * count).sum())
    return FitError(
        label=label,
        ops=len(rows),
        mean=float(np.abs(predicted / measured - 1.0).mean()),
        weighted=float((np.abs(predicted - measured) * count).sum() / (measured * count).sum()),
        measured_s=float((measured * count).sum()),
        predicted_s=total,
        loaned=float((predicted * count)[loaned].sum()) / total if total > 0 else 0.0,
    )
