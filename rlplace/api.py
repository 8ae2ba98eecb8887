"""`rlplace.place`: from a model, a graph or a problem to a plan. Which question is asked, and which planner answers it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rlplace.captured import CapturedModel
from rlplace.errors import InputError, unknown_name, whole_number
from rlplace.model.capture.inputs import at_batch, resize_batch
from rlplace.placement import OF_STRATEGIES, get_planner, planner_options
from rlplace.placement.ask import Placed, Priced, place_priced
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.records import plain

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.runtime.strategy.fact_records import ModelFacts
    from rlplace.strategy.search.efficiency import BatchCurve
    from rlplace.strategy.search.space import Space

CLASSICAL = "strategy"
"""Name of the planner of whole strategies."""

STRATEGY_PLANNERS = ("agent", "best", CLASSICAL, *OF_STRATEGIES)
"""Names that answer whole strategies: the first two by the classical search, until a learned one comes."""

PLACEMENT, AUTO = "placement", "auto"
"""Spaces by name: placements; what the runtime can execute for this model."""

FIXED = ("microbatch", "microbatches", "schedule")
"""Options of `place` that restrict the space of whole strategies."""

WHOLE_LOSS = "and a placement computes the loss of the whole batch in one pass"
"""Why placements refuse ``couple="gather"``."""

PER_DEVICE = 8
"""Default number of samples a step for each device."""

MOST_SAMPLES = 1 << 24
"""Samples that a step may have."""


def place(
    target: Problem | OpGraph | nn.Module,
    cluster: Cluster | str | None = None,
    *,
    batch: int | None = None,
    space: Space | str | None = None,
    planner: str = "agent",
    time_limit_s: float | None = 5.0,
    calls: int | None = None,
    seed: int = 0,
    example_inputs: Any = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str = "adam",
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    master_weights: bool = False,
    batch_curve: BatchCurve | None = None,
    groups: int = 200,
    costs: Any = None,
    host: str = "eager",
    couple: str = "replica",
    buffers: str = "whole",
    statistics: str = "replica",
    release_gradients: bool = False,
    **options: Any,
) -> PlacementPlan:
    """Plans how a training step runs: the whole strategy, or, as the older question, where the groups of one pass run.

    Replicas, sharding, tensor and pipeline parallelism, micro-batches, schedule, recomputation and offload are chosen together
    (docs/strategy.md). A problem, a planner that can only place groups, and options of placements ask for placements. Where
    the choice is not restricted, and a model has branches that run quicker side by side than with any strategy, the
    answer is that placement, of the whole batch as one micro-batch: ``plan.strategy`` is then None.

    Args:
        target: A module; a captured graph, at its own micro-batch size; or a problem.
        cluster: A `Cluster`, or its text such as ``"a100-80g:4"``; not with a problem, which has its devices.
        batch: Samples a step, everything together; None: 8 a device (of a graph: its own samples a device; of a placement: as
            captured).
        space: What may be chosen: a `Space` or its text such as ``"tensor=1,2 sharding=0,1"``; None or ``"auto"``: all that the
            runtime can execute for this model; ``"placement"`` asks for placements.
        planner: Name of a planner; ``plan.planner`` names the one that answered.
        time_limit_s: Wall time from the end of the first capture; covers the other captures, pricing, search and the check op
            by op. For placements: of the planner alone, so that branches may take as long again.
        calls: Largest number of evaluations; with it and without a time limit the answer is deterministic.
        seed: Seed of all random choices.
        example_inputs: For a module: its arguments as a tuple, or a dict of keyword arguments.
        loss: For a module: maps its output to the scalar loss; default ``output.loss``.
        optimizer: For a module: decides the optimizer state.
        dtype: For a module: parameters and inputs are planned in it, ``"bf16"`` for example; None leaves them.
        autocast: For a module: planned under `torch.autocast` in this dtype, ``"bf16"`` or ``"fp16"``.
        master_weights: For a module: the optimizer keeps float32 copies of the weights, and its state in float32.
        batch_curve: Epochs to the target by batch; the batch is then chosen too (`rlplace.strategy.search.efficiency`), from
            `batch` (8) up.
        groups: Target number of groups of a placement.
        costs: A cost table, file, or name of a cost model, laid over the coefficients that come with rlplace.
        host: How ops are issued: "eager", or "compiled" for a compiled graph.
        couple: What a loss that couples samples is computed over: ``"replica"`` or ``"gather"`` (`rlplace.plan.strategy`).
        buffers: ``"replica"`` lets replicas and micro-batches write buffers by their own samples, ``"whole"`` does not.
        statistics: What BatchNorm normalizes by: the samples of a ``"replica"``, as DDP does, or of all replicas, ``"batch"``.
        release_gradients: Update every parameter in the backward, as soon as its gradient is there, and free that.
        **options: ``microbatch``, ``microbatches`` and ``schedule`` fix what they name in whole strategies; others are options
            of the planner of placements.

    Returns:
        A feasible plan. For a placement with a known graph, ``predicted.op_level`` holds the plan simulated op by op.

    Raises:
        InfeasibleError: No plan fits.
        InputError: Nothing is left to choose from; the message says what to relax.
    """
    _check_options(options, planner)
    how = {"optimizer": optimizer, "dtype": dtype, "autocast": autocast, "master_weights": master_weights}
    if batch is not None:
        whole_number(batch, "place: batch", 1, MOST_SAMPLES)
    if isinstance(target, Problem):
        if cluster is not None:
            raise InputError("a problem has its own devices; leave cluster out, or place the model")
        if batch is not None or batch_curve is not None or space not in (None, PLACEMENT):
            raise InputError("place: a problem's groups are placed one by one; leave batch and space out, or place the model")
        _one_pass(options, couple, "a problem's groups are placed one by one", release_gradients)
        _refuse_capture(how, "a problem was captured and priced as it is")
        return _place_groups(Priced(target), planner, calls, options, seed=seed, time_limit_s=time_limit_s)
    from rlplace.cluster.parse import as_cluster

    reason = why_placement(planner, space, [name for name in options if name not in FIXED])
    if cluster is None:
        raise InputError("place needs a cluster for a model, for example cluster='a100-80g:4'")
    machine, pricing = as_cluster(cluster), {"groups": groups, "costs": costs, "host": host}
    if reason is None:
        allowed_space(space, options, planner)  # contradictions are refused before the capture
        captured = _captured(target, example_inputs, loss, how)
        strategy, placed = plan_model(
            captured, machine, space=space, fixed=options, planner=planner, batch=batch, curve=batch_curve, calls=calls,
            time_limit_s=time_limit_s, seed=seed, couple=couple, buffers=buffers,
            statistics=statistics, release_gradients=release_gradients, **pricing,
        )  # fmt: skip
        return strategy if placed is None else placed.plan
    if batch_curve is not None:
        raise InputError(f"place: a batch curve chooses among whole strategies, these are placements: {reason}; leave it out")
    _one_pass(options, couple, reason, release_gradients)
    captured = _captured(target, example_inputs, loss, how)
    captured.check_placed()
    graph = at_batch(captured.graph, captured.capture_at, batch, options.pop("microbatch", None))
    priced = Priced.of(graph, machine, **pricing)
    return _place_groups(priced, planner, calls, options, seed=seed, time_limit_s=time_limit_s)


def _place_groups(priced: Priced, planner: str, calls: int | None, options: dict[str, Any], **limits: Any) -> PlacementPlan:
    """Runs a planner of placements, with a budget of `calls` where it is a search."""
    if calls is not None:
        own = planner_options(planner)
        if own is not None and "calls" not in own:
            raise InputError(f"place: planner {planner} is no search, and simulates what it needs; leave calls out")
        options["calls"] = calls
    return place_priced(priced, planner=planner, **limits, **options).plan


def _check_options(options: Collection[str], planner: str) -> None:
    """Refuses options that neither `place` nor the planner knows, with the nearest one that they do."""
    others = [name for name in options if name not in FIXED]
    if not others:
        return
    own = planner_options("agent" if planner in STRATEGY_PLANNERS and planner != "best" else planner)
    strange = next((name for name in others if own is not None and name not in own), None)
    if strange is not None:
        known = [name for name in inspect.signature(place).parameters if name not in ("target", "options")]
        raise unknown_name("option of place", strange, {*known, *FIXED, *(own or ())})


def _refuse_capture(how: Mapping[str, Any], why: str) -> None:
    for name in ("dtype", "autocast", "master_weights"):
        if how[name]:
            raise InputError(f"place: {name} decides how a module is captured, {why}; leave it out, or place the module")


def _one_pass(options: Collection[str], couple: str, reason: str, release_gradients: bool) -> None:
    for name in ("microbatches", "schedule"):
        if name in options:
            raise InputError(f"place: {name} is for whole strategies, these are placements ({reason}); leave it out")
    if couple == "gather":
        raise InputError(f"place: couple='gather' is for replicas, {WHOLE_LOSS} ({reason}); leave couple out")
    if release_gradients:
        raise InputError(f"place: release_gradients is for whole strategies, these are placements ({reason}); leave it out")


def why_placement(planner: str, space: Space | str | None, only: Collection[str] = ()) -> str | None:
    """Explains why placements are asked for; None where whole strategies are.

    Args:
        planner: Name of the planner.
        space: The space, as `place` takes it.
        only: Further options that belong to placements alone.

    Raises:
        InputError: An unknown planner, or one that cannot answer what the space asks.
    """
    first = next(iter(only), None)
    if planner not in STRATEGY_PLANNERS:
        get_planner(planner)
        if space not in (None, PLACEMENT):
            raise InputError(
                f"planner {planner} places groups one by one and knows no strategies; leave the space out, or leave the "
                f"planner to {', '.join(STRATEGY_PLANNERS)}"
            )
        return f"planner {planner} answers no other"
    if planner in (CLASSICAL, *OF_STRATEGIES) and (space == PLACEMENT or first):
        raise InputError(f"planner {planner} places no groups; leave out {'the space' if space == PLACEMENT else first}")
    if space == PLACEMENT:
        return "the space says so"
    if first and space is not None:
        raise InputError(f"{first} belongs to placements; leave it out, or the space, or give the space {PLACEMENT!r}")
    return f"{first} belongs to it" if first else None


def plan_model(
    captured: CapturedModel,
    cluster: Cluster,
    *,
    space: Space | str | None,
    fixed: Mapping[str, Any],
    planner: str,
    batch: int | None = None,
    curve: BatchCurve | None = None,
    groups: int = 200,
    calls: int | None = None,
    couple: str = "replica",
    buffers: str = "whole",
    statistics: str = "replica",
    release_gradients: bool = False,
    progress: Callable[[int, float], None] | None = None,
    memory: bool = False,
    **limits: Any,
) -> tuple[PlacementPlan, Placed | None]:
    """Plans the whole strategy of a captured model; where nothing restricts the choice, a quicker placement, too.

    Args:
        captured: The model.
        cluster: The devices.
        space: See `place`; so are `planner`, `batch`, `curve`, `groups`, `calls`, `couple`, `buffers`,
            `statistics` and `release_gradients`.
        fixed: Options of `place` that fix a part of the space.
        planner: Name of a planner of whole strategies.
        batch: Samples a step; None: the default.
        curve: Epochs by batch.
        groups: Target number of groups of a placement.
        calls: Largest number of evaluations of the search.
        couple: Scope of a loss that couples samples.
        buffers: Scope of buffers that the forward writes.
        statistics: Scope of BatchNorm's statistics.
        release_gradients: Whether updates run in the backward.
        progress: Called with the evaluations of the search so far and the seconds of the best.
        memory: Whether the strategy's prediction says what fills the devices.
        **limits: Seed, time limit, costs and host, for both the strategy and the placement. The time counts from when the
            model was examined and the kernels were loaded.

    Returns:
        The strategy; and a placement of the whole batch as one micro-batch, None where none is quicker.
    """
    from rlplace.strategy.executor.evaluate import warm_up
    from rlplace.strategy.search.branches import quicker_placement
    from rlplace.strategy.search.plan import plan_strategy

    facts = captured.facts
    warm_up()
    began_s = time.monotonic()
    alone = None if captured.capture_at is not None else captured.graph
    if batch is None:
        batch = default_batch(cluster, alone) if curve is None else PER_DEVICE if alone is None else alone.samples
    strategy = plan_strategy(
        cluster=cluster, batch=batch, curve=curve, calls=calls, began_s=began_s, planner=answers(planner), progress=progress,
        memory=memory, **limits,
        **what_may_be(
            captured, space=space, fixed=fixed, planner=planner, couple=couple, buffers=buffers, statistics=statistics,
            release_gradients=release_gradients,
        ),
    )  # fmt: skip
    strategy = _noted(strategy, facts)
    restricted = release_gradients or space not in (None, AUTO) or any(value is not None for value in fixed.values())
    if restricted or curve is not None or answers(planner) == planner or captured.why_no_placement() is not None:
        return strategy, None
    graph, capture_at = captured.graph, captured.capture_at
    return strategy, quicker_placement(strategy, graph, capture_at, cluster, groups=groups, calls=calls, **limits)


def _noted(plan: PlacementPlan, facts: ModelFacts | None) -> PlacementPlan:
    """Returns the plan with notes on how it treats the loss and the buffers of the model."""
    from rlplace.runtime.strategy.notes import notes_of

    assert plan.strategy is not None
    notes = [] if facts is None else [*notes_of(plan.strategy, facts)]
    if not notes:
        return plan
    extra = {**plan.predicted.extra, "notes": [*plan.predicted.extra.get("notes", ()), *notes]}
    return plan.with_predicted(plan.predicted.replace(extra=extra))


def what_may_be(
    captured: CapturedModel,
    *,
    space: Space | str | None,
    fixed: Mapping[str, Any],
    planner: str,
    couple: str | None = None,
    buffers: str | None = None,
    statistics: str = "replica",
    release_gradients: bool = False,
) -> dict[str, Any]:
    """Returns arguments of `rlplace.strategy.search.plan.ask` that the model and the space give; those of `plan_model`."""
    from rlplace.model.graph.rescale import two_captures
    from rlplace.runtime.strategy.fact_records import Conduct
    from rlplace.runtime.strategy.why_not import judge

    facts = captured.facts
    optimizer = captured.graph.capture.get("optimizer")
    why_not, only = judge(facts, couple, buffers, optimizer=optimizer, release=release_gradients)
    conduct = (facts.conduct if facts is not None else None) or Conduct()
    more = {"statistics": statistics, "release_gradients": release_gradients}
    settings = conduct.settings(couple or "replica", buffers or "whole", **more)
    graph, capture_at = captured.graph, captured.capture_at
    first, other = (graph, None) if capture_at is None else two_captures(graph, capture_at)
    allowed = allowed_space(space, fixed, planner)
    return {"graph": first, "other": other, "space": allowed, "why_not": why_not, "only": only, "settings": settings}


def default_batch(cluster: Cluster, graph: OpGraph | None = None) -> int:
    """Returns default samples a step: `PER_DEVICE` a device, or those of a graph that has one size only."""
    return (PER_DEVICE if graph is None else graph.samples) * cluster.num_devices


def answers(planner: str) -> str:
    """Returns the planner that answers where one of `STRATEGY_PLANNERS` is asked for."""
    return planner if planner in OF_STRATEGIES else CLASSICAL


def allowed_space(space: Space | str | None, fixed: Mapping[str, Any], planner: str = CLASSICAL) -> Space:
    """Returns the space of `place`, restricted by fixed options and by the space of the planner.

    Raises:
        InputError: The arguments cannot be read, or contradict each other.
    """
    from rlplace.strategy.search.space import Space

    text = space.text() if isinstance(space, Space) else "" if space in (None, AUTO) else space
    assert isinstance(text, str)
    asked = Space.parse(" ".join([text, *(f"{key}={value}" for key, value in fixed.items() if value is not None)]))
    own = Space.parse(OF_STRATEGIES.get(planner, ""))
    for key, values in plain(own).items():
        if any(not own.allows(key, value) for value in getattr(asked, key) or ()):
            raise InputError(f"planner {planner} has {key}={values[0]} only; leave {key} out, or the planner to {CLASSICAL}")
    return replace(asked, **{key: getattr(own, key) for key in plain(own)})


def _captured(
    target: OpGraph | nn.Module, inputs: Any, loss: Callable[[Any], Any] | None, how: Mapping[str, Any]
) -> CapturedModel:
    """Returns a module or graph for `place`; `how` holds arguments of `rlplace.capture`."""
    from rlplace.model.capture.capture import capture
    from rlplace.model.graph.opgraph import OpGraph

    if isinstance(target, OpGraph):
        _refuse_capture(how, "a graph was captured as it is")
        return CapturedModel(target)
    if inputs is None:
        raise InputError("place needs example_inputs for a module: a tuple of arguments or a dict of keyword arguments")
    whole = capture(target, inputs, loss=loss, **how)

    def capture_at(samples: int, method: str | None = None) -> OpGraph:
        by = {**how, "like": whole} if method is None else {**how, "method": method}
        return capture(target, resize_batch(inputs, whole.samples, samples), loss=loss, **by)

    return CapturedModel.of(whole, capture_at, lambda weights: (target, inputs, loss))
