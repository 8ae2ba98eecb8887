"""Prices of published steps by the block executor: time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import msgspec
import numpy as np

from benchmarks.published.models import captures
from benchmarks.published.rows import KIND_OF_GPU, Row, degrees
from rlplace.cluster import KINDS, Cluster
from rlplace.cost.foreign import shipped_costs, with_host
from rlplace.cost.scaled import find_curve
from rlplace.cost.table import CostTable, KindCosts
from rlplace.errors import InputError
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem

TITAN = msgspec.structs.replace(
    KINDS["h100"], memory_bandwidth_bytes_per_s=2.4e12, memory_bytes=96_000_000_000,
    gemm_efficiency={name: 0.8 * share for name, share in KINDS["h100"].gemm_efficiency.items()},
)  # fmt: skip
"""H100 with 96 GB of slower memory, capped at 500 W, as torchtitan's runs had it. Products then run at 0.8 of the rate at
700 W: the root of what is left above 150 W of idle power, since a chip's voltage falls with its clock."""


@dataclass(frozen=True)
class Said:
    """The prediction of a row.

    Attributes:
        row: The row.
        step_s: Seconds of a step, None where the row cannot be priced.
        over_bytes: Bytes over capacity.
        peak_bytes: By device, without what is reserved.
        parts: Seconds by what they go to.
        reason: Why the row cannot be priced.
    """

    row: Row
    step_s: float | None
    over_bytes: float = 0.0
    peak_bytes: tuple[float, ...] = ()
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        assert self.step_s is not None and self.row.taken_s is not None
        return self.step_s / self.row.taken_s - 1.0


@contextlib.contextmanager
def _own_kernels() -> Iterator[None]:
    """Prices context groups by the attention that a stack has without them (`Software.factors`), not by torch's kernels."""
    with patch("rlplace.strategy.blocks.price.kernel_times", lambda graph, *_: np.ones(graph.num_ops)):
        yield


@_own_kernels()
def say(row: Row, draft: Draft | None = None) -> Said:
    """Prices a row, or another strategy for its model, batch and devices."""
    scores = _evaluator(_asked(row), row.gpus)
    draft = draft or draft_of_row(row, scores.costs.names)
    try:
        cuts = {place.cut(draft.microbatch[0]) for place in draft.places}
        if reason := next((why for cut in cuts if (why := scores.costs.why_not(cut))), None):
            return Said(row, None, reason=reason)
        found = scores.evaluate(draft)
    except InputError as error:
        return Said(row, None, reason=str(error))
    hidden_s = found.parts.get("tensor", 0.0) if row.software.overlaps_tensor else 0.0
    return Said(row, found.step_time_s - hidden_s, found.over_bytes, found.peak_memory_bytes, found.parts)


@_own_kernels()
def plan(row: Row, limit_s: float) -> tuple[Said, str, int]:
    """Returns the search's own answer for a row's model, batch and devices: its price and words, and evaluations."""
    problem = SearchProblem(_evaluator(_asked(row), row.gpus), row.batch)
    found = search(problem, time_limit_s=limit_s)
    draft = found.ranked[0].draft
    return say(row, draft), uniform_words(problem.named(draft)), found.calls


@dataclass(frozen=True)
class _Asked:
    """The facts that rows share which are priced alike."""

    capture: tuple[str, int, str, bool, bool, bool, str]
    gpu: str
    host: str
    factors: tuple[tuple[str, float], ...]
    layer_host_us: float


def _asked(row: Row) -> _Asked:
    software, kind = row.software, cluster_of(row.gpu, 1).kinds[0].name
    dtype = {"tf32": "fp32", "fp8": "bf16"}.get(row.precision, row.precision)
    optimizer = "momentum" if row.model == "ResNet-50" else "adamw"
    capture = (row.model, row.seq, dtype, not row.pure, software.fused_loss, software.fused_norms, optimizer)
    host = "compiled" if software.compiled(row.words) else "eager"
    return _Asked(capture, row.gpu, host, software.factors_on(kind), software.layer_host_us.get(kind, 0.0))


@functools.lru_cache(maxsize=4)
def _evaluator(asked: _Asked, gpus: int) -> DraftEvaluator:
    cluster = cluster_of(asked.gpu, gpus)
    small, large = captures(*asked.capture)
    return DraftEvaluator(PricedBlocks(small, cluster, large, host=asked.host, costs=_costs(asked)), cluster)


def _costs(asked: _Asked) -> CostTable | None:
    """Returns the shipped table with classes of ops multiplied and the stack's host; None: as shipped."""
    if not asked.factors and not asked.layer_host_us:
        return None
    kind, shipped = cluster_of(asked.gpu, 1).kinds[0], shipped_costs()
    precision = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[asked.capture[2]]
    curves = {}
    for op, factor in asked.factors:
        for direction in ("forward", "backward", "backward_weight"):
            curve = find_curve(kind, shipped, op, precision, direction)
            efficiency = curve.compute_efficiency / factor
            curves[op, precision, direction] = msgspec.structs.replace(curve, compute_efficiency=efficiency)
    own = shipped.kinds.get(kind.name, KindCosts())
    table = CostTable({**shipped.kinds, kind.name: msgspec.structs.replace(own, curves={**own.curves, **curves})})
    return with_host(table, [kind.name], layer_s=1e-6 * asked.layer_host_us)


@functools.cache
def cluster_of(gpu: str, gpus: int) -> Cluster:
    """Hosts of eight devices, of four for GH200."""
    kind, host = KIND_OF_GPU.get(gpu, "h100"), 8
    if gpu.startswith("gh200"):
        host = 4
    network = ",ib=4x200g" if gpu.startswith("gh200") else ""
    text = f"{kind}:{gpus}" if gpus <= host else f"{kind}:{gpus // host}x{host}{network}"
    cluster = Cluster.preset(text)
    if gpu.startswith("H100 96GB"):
        devices = tuple(dataclasses.replace(d, memory_bytes=TITAN.memory_bytes) for d in cluster.devices)
        return dataclasses.replace(cluster, kinds=(TITAN,) * gpus, devices=devices)
    return cluster


def schedule_of(words: str, virtual: int) -> str:
    """Returns the pipeline schedule that a strategy's words name."""
    if "zero bubble V" in words or "DualPipeV" in words:
        return "zbv" if "zero bubble V" in words else "dualpipev"
    if "zero bubble" in words:
        return "interleaved_zero_bubble"
    return "interleaved_1f1b" if virtual > 1 or "interleaved" in words else "1f1b"


def even_bounds(names: Sequence[str], stages: int) -> tuple[int, ...]:
    """Returns equal numbers of layers a stage, what comes before and after them at the ends: as configuration files cut.

    Where two layers are missing, the first and the last stage have none (Llama 3, section 3.3.2).
    """
    layers = [index for index, name in enumerate(names) if re.search(r"\.\d+$", name)]
    if stages == len(layers) + 2:
        return (0, *layers, layers[-1] + 1, len(names))
    cuts = [layers[len(layers) * stage // stages] for stage in range(1, stages)]
    return (0, *cuts, len(names))


def draft_of_row(row: Row, names: Sequence[str]) -> Draft:
    """Returns the strategy of a row."""
    said = degrees(row.words, row.gpus)
    v_shaped = schedule_of(row.words, 1) in ("zbv", "dualpipev")
    virtual = 2 if v_shaped else 3 if row.words.endswith("PP8 interleaved") else said["virtual"]
    places, data, level = said["pipeline"], said["data"], said["level"]
    schedule = schedule_of(row.words, virtual) if places > 1 else None
    width, tensor = row.gpus // places, said["tensor"]
    meshes = tuple(
        Mesh(
            tuple(range(index * width, (index + 1) * width)), 1 if level else data, data if level else 1, said["context"],
            tensor, said["expert"], sharding=level, sequence_parallel=tensor > 1 and "whole activations" not in row.words,
        )
        for index in range(places)
    )  # fmt: skip
    loop = tuple(range(places))
    order = (*loop, *reversed(loop)) if v_shaped else loop * virtual
    again = bytearray(len(names))
    for index, name in enumerate(names):
        if "full" in row.recompute or ("every 2nd" in row.recompute and re.search(r"[02468]$", name)):
            again[index] = 2
        elif "selective" in row.recompute and "every" not in row.recompute:
            again[index] = 1
    passes = row.batch // (data * row.microbatch)
    moved_out = bytes([1 if "optimizer offload" in row.words else 0]) * len(names)
    return Draft(even_bounds(names, len(order)), meshes, order, bytes(again), moved_out, (row.microbatch,), (passes,), schedule)
