"""`CostTable`: the coefficients of op times, per device kind, op class, dtype and direction.

A curve is a launch floor and two saturating efficiencies; measured shapes override it, a bounded residual corrects it. Every
curve states its `basis` and the `source` of its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from msgspec import Meta

from rlplace.errors import InputError, unknown_name
from rlplace.files import fingerprint, write_json
from rlplace.records import Record, Whole

MAX_WEIGHTS = 10_000

Basis = Literal["measured", "fitted", "scaled", "calibrated", "extrapolated"]
"""Basis of a time: this very shape was timed (`measured`); a curve fitted on timings of that device (`fitted`: published
ones, `calibrated`: a user's own), beyond the sizes that were timed (`extrapolated`); or numbers carried over from a datasheet
or a related device (`scaled`)."""

Direction = Literal["forward", "backward", "update", "backward_weight"]
"""`backward` of products and convolutions is the gradient of the input; `backward_weight` that of the weight, priced by the
backward curve where it has none of its own. Other ops, and whole ops that were measured, have one backward."""

Precision = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
"""Dtypes of curves: what the arithmetic runs in. tf32 is what cuDNN runs float32 convolutions in."""

BASES: tuple[str, ...] = get_args(Basis)
DIRECTIONS: tuple[str, ...] = get_args(Direction)
HOST_MODES = ("eager", "compiled")

DIMS = ("batch", "m", "n", "k", "heads", "queries", "keys", "width", "causal", "rows", "columns", "image", "flops", "bytes")
"""Names that a measured shape may be told by. All but the last two are sizes in `OpGraph.op_dims`."""

EAGER_ISSUE_S = 25e-6
"""Host time to issue one kernel in eager mode, with what Python, autograd and the optimizer's loop do for it.

Transformers on one H200 take 25 to 35 us where they wait for the host (docs/cost-model.md, Host time); 5 to 10 us is the bare
dispatch of an op."""

EAGER_VIEW_S = 2e-6
"""Host time of an op that launches nothing, in eager mode."""

COMPILED_ISSUE_S = 1.5e-6
"""Host time to issue one kernel of a compiled graph or a graph replay; 1 to 2 us is usual."""

_Share = Annotated[float, Meta(ge=1e-6, le=1)]
_Work = Annotated[float, Meta(ge=0, le=1e18)]
KernelSeconds = Annotated[float, Meta(ge=0, le=1)]
_Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]


class Residual(Record, frozen=True):
    """A small network that corrects a curve by a bounded factor.

    The part of a time above the floor is multiplied by ``bound ** tanh(net(x))``, where x are the features, clamped to the
    range that the network was fitted on and standardised, and net has tanh layers and one linear output. A net with one layer
    is a linear model.

    Attributes:
        features: F names, see `rlplace.cost.curve.FEATURES`.
        mean: F means of the features.
        scale: F standard deviations of the features.
        low: F smallest values that were fitted; a shape beyond is corrected like one at the edge.
        high: F largest values that were fitted.
        weights: Per layer the matrix, rows are outputs.
        bias: Per layer the bias.
        bound: Largest factor, above 1; the smallest is its reciprocal.
        least_flops: Share of the counted FLOPs that the best algorithm does: a quarter in Winograd convolutions.
    """

    features: tuple[str, ...]
    mean: tuple[_Weight, ...]
    scale: tuple[Annotated[float, Meta(ge=1e-9, le=1e6)], ...]
    low: tuple[_Weight, ...]
    high: tuple[_Weight, ...]
    weights: tuple[tuple[tuple[_Weight, ...], ...], ...]
    bias: tuple[tuple[_Weight, ...], ...]
    bound: Annotated[float, Meta(ge=1, le=20)]
    least_flops: Annotated[float, Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        width = len(self.features)
        if not width or any(len(getattr(self, name)) != width for name in ("mean", "scale", "low", "high")):
            raise InputError("mean, scale, low and high need one number per feature")
        if not self.weights or len(self.weights) != len(self.bias):
            raise InputError("needs one bias per layer of weights")
        for layer, (matrix, bias) in enumerate(zip(self.weights, self.bias, strict=True)):
            if not matrix or any(len(row) != width for row in matrix) or len(bias) != len(matrix):
                raise InputError(f"layer {layer} does not fit the {width} values before it")
            width = len(matrix)
        if width != 1:
            raise InputError(f"the last layer must have one output, it has {width}")
        count = sum(len(row) + 1 for matrix in self.weights for row in matrix)
        if count > MAX_WEIGHTS:
            raise InputError(f"{count} weights, the limit is {MAX_WEIGHTS}")
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise InputError("a low is above its high")


class Curve(Record, frozen=True):
    """Time of one kernel against its work.

    ``t = floor + max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes)))`` with
    ``g(x) = (x / (x + half)) ** saturation``.

    Attributes:
        compute_efficiency: Largest fraction of the device's peak for that dtype, in (0, 1].
        compute_half_flops: FLOPs of a call at which x / (x + half) is one half.
        bandwidth_efficiency: Largest fraction of the device's memory bandwidth, in (0, 1].
        bandwidth_half_bytes: The same for bytes.
        floor_s: Time of the smallest kernel inside a step; None takes the device kind's `launch_s`.
        saturation: Exponent of g, in (0, 1].
        overhead_s: What the measuring method added to every time that the curve was fitted on (launch and synchronisation
            of a single call); not part of any prediction.
        basis: One of `BASES`.
        source: For display: data, software, method.
        residual: Optional correction.
        unaligned: Of products whose rows in memory are not all multiples of 8 elements: factors on the compute term for
            multiples of 4, of 2, and for odd ones; empty for none.
    """

    compute_efficiency: _Share
    compute_half_flops: _Work
    bandwidth_efficiency: _Share
    bandwidth_half_bytes: _Work
    floor_s: KernelSeconds | None = None
    saturation: _Share = 1.0
    overhead_s: KernelSeconds = 0.0
    basis: Basis = "scaled"
    source: str = ""
    residual: Residual | None = None
    unaligned: tuple[Annotated[float, Meta(ge=1, le=100)], ...] = ()

    def __post_init__(self) -> None:
        if len(self.unaligned) not in (0, 3):
            raise InputError(f"curve: unaligned has {len(self.unaligned)} factors; give three, for multiples of 4, 2 and 1")


class MeasuredShape(Record, frozen=True):
    """The time of one op of one shape; overrides the curve for ops of equal dims.

    Attributes:
        dims: Sizes by name, names from `DIMS`; an op matches when all of them are equal.
        seconds: Device time of the whole op (all its kernels), launch included, measuring overhead removed.
    """

    dims: Annotated[Mapping[str, Whole], Meta(min_length=1)]
    seconds: Annotated[float, Meta(ge=0, le=1e6)]

    def __post_init__(self) -> None:
        for name in self.dims:
            if name not in DIMS:
                raise unknown_name("dim", name, DIMS)


Key = tuple[str, str, str]
"""Op class (`rlplace.model.graph.opgraph.OP_KINDS`), dtype (`PRECISIONS`), direction (`DIRECTIONS`)."""


@dataclass(frozen=True)
class TargetCosts:
    """Costs of whole ops of one target on one device: all kernels of the op, launches included, as one curve.

    Attributes:
        curve: Time over the FLOPs and bytes that the op graph counts for the op.
        measured: Timed shapes, which override the curve.
    """

    curve: Curve
    measured: tuple[MeasuredShape, ...] = ()


@dataclass(frozen=True)
class KindCosts:
    """Costs of one device kind.

    Attributes:
        curves: Curves by key.
        measured: Timed shapes by key.
        targets: Whole ops by (target, dtype, direction), with targets as `rlplace.cost.targets.target_names` has them; an entry
            replaces curves and measured shapes of the op's class.
        eager_issue_s: Host time to issue one kernel in eager mode.
        eager_view_s: Host time of an op that launches nothing, in eager mode.
        compiled_issue_s: Host time to issue one kernel of a compiled graph.
        layer_issue_s: Host time to issue one layer's forward and backward, in place of its ops'; 0: those of its ops.
        step_factor: Multiplies every op time: measured over predicted time of whole steps.
    """

    curves: Mapping[Key, Curve] = field(default_factory=lambda: MappingProxyType({}))
    measured: Mapping[Key, tuple[MeasuredShape, ...]] = field(default_factory=lambda: MappingProxyType({}))
    targets: Mapping[Key, TargetCosts] = field(default_factory=lambda: MappingProxyType({}))
    eager_issue_s: float = EAGER_ISSUE_S
    eager_view_s: float = EAGER_VIEW_S
    compiled_issue_s: float = COMPILED_ISSUE_S
    layer_issue_s: float = 0.0
    step_factor: float = 1.0


@dataclass(frozen=True)
class CostTable:
    """Costs by device kind.

    Attributes:
        kinds: Costs by the name of a device kind.
        name: For people; not part of the fingerprint.
        source: For people: where the numbers come from; not part of the fingerprint.
    """

    kinds: Mapping[str, KindCosts]
    name: str = "costs"
    source: str = ""

    def __post_init__(self) -> None:
        from rlplace.cost.tablefile import check_table

        check_table(self)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON without `name` and `source`."""
        from rlplace.cost.tablefile import table_to_dict

        return fingerprint(table_to_dict(self))

    def over(self, base: CostTable) -> CostTable:
        """This table where it has an entry, `base` elsewhere; entries are single curves and lists of measured shapes.

        Issue times and the step factor of a kind come from this table as soon as it names the kind.
        """
        kinds = dict(base.kinds)
        for name, own in self.kinds.items():
            other = base.kinds.get(name, KindCosts())
            kinds[name] = replace(
                own,
                curves={**other.curves, **own.curves},
                measured={**other.measured, **own.measured},
                targets={**other.targets, **own.targets},
            )
        return CostTable(kinds, name=self.name, source=self.source)

    def save(self, path: str | Path) -> None:
        """Writes ``*.cost.json``, atomically."""
        from rlplace.cost.tablefile import table_to_dict

        write_json(path, table_to_dict(self))

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """Reads and checks a cost file; see docs/formats.md."""
        from rlplace.cost.tablefile import load_table

        return load_table(path)
