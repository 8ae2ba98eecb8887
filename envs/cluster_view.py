"""What a policy sees in `rlplace/Cluster-v0`: candidates as the nodes of a graph, and each one's plan as a graph of stages.

C candidates, with room for K and one more row for the action to stop; S stages.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.envs.guide.features import CLIP
from rlplace.measure import pool as pools
from rlplace.measure.belief import Belief
from rlplace.measure.choose import gain_of
from rlplace.measure.pool import Pool
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluation import Evaluation

FEATURES = (
    "expected_gain", "expected", "spread", "fits", "full", "by_the_model", "tells", "ran", "took",
    *(f"of {name}" for name in pools.FEATURES),
)  # fmt: skip
"""Of a candidate: `rlplace.measure.choose.gain_of`; expected log step time over the best that ran; its standard deviation; the
chance that it fits; log of its share of memory; log step time by the cost model over the least; how much it tells of others;
whether it has run, and the log of what it took over what the cost model says; its strategy."""

STAGE_FEATURES = ("busy", "blocks", "replicas", "shared", "tensor", "level", "recomputed", "full")
"""Of a stage: its passes over the step by the cost model; share of the blocks; degrees, as logarithms to base 2; sharding level
over 3; share of its blocks that are recomputed; share of the memory of its fullest device."""


def stages_of(draft: Draft, said: Evaluation, cluster: Cluster) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """A plan as a graph: float32 [S, `STAGE_FEATURES`], and int32 [S], the place that holds each stage."""
    rows: list[list[float]] = []
    held: list[int] = []
    blocks, first = len(draft.recompute), 0
    for one in draft.pipelines:
        for stage, place_number in enumerate(one.place_of_stage):
            place, own = one.places[place_number], slice(one.bounds[stage], one.bounds[stage + 1])
            again = one.recompute[own]
            full = max(said.peak_memory_bytes[d] / (cluster.devices[d].memory_bytes or math.inf) for d in place.devices)
            rows.append(
                [
                    said.stage_busy_s[len(rows)] / said.step_time_s, len(again) / blocks, math.log2(place.replicate),
                    math.log2(place.shard), math.log2(place.tensor), place.sharding / 3.0,
                    sum(map(bool, again)) / max(1, len(again)), full,
                ]
            )  # fmt: skip
            held.append(first + place_number)
        first += len(one.places)
    return np.array(rows, dtype=np.float32), np.array(held, dtype=np.int32)


def plan_graphs(pool: Pool, candidates: int, stages: int) -> dict[str, NDArray[Any]]:
    """The part of an observation that stays: float32 ``stages`` [(K + 1) S F], and int32 ``place`` [(K + 1) S] (-1: none)."""
    table = np.zeros((candidates + 1, stages, len(STAGE_FEATURES)), dtype=np.float32)
    place = np.full((candidates + 1, stages), -1, dtype=np.int32)
    for number in range(len(pool.drafts)):
        rows, held = stages_of(pool.drafts[number], pool.said[number], pool.worlds.cluster)
        table[number, : len(rows)], place[number, : len(rows)] = rows[:stages], held[:stages]
    return {"stages": np.clip(table, -CLIP, CLIP).ravel(), "place": place.ravel()}


def observe(belief: Belief, runs: int, candidates: int) -> dict[str, NDArray[Any]]:
    """What a policy sees of a belief.

    Args:
        belief: After all runs so far.
        runs: Most runs of the session.
        candidates: K, for which there is room.

    Returns:
        float32 ``candidates`` [(K + 1) F], int32 ``candidate_group`` [K + 1] (-1: has run, or to stop), float32 ``alike``
        [(K + 1)^2], correlations of log step times, and ``context`` [C].
    """
    pool, count = belief.pool, len(belief.pool.drafts)
    mean, spread, fits = belief.mean, belief.spread, belief.fits
    likely = fits >= 0.5
    base = math.log(float(belief.best.step_s or 0.0)) if belief.best else float(mean[likely].min(initial=mean.max()))
    correlation = belief.cover / np.outer(spread, spread)
    others = np.abs(correlation)
    alike = np.zeros((candidates + 1, candidates + 1), dtype=np.float32)
    alike[:count, :count] = np.clip(correlation, -1.0, 1.0)
    ran, took, by_model = np.zeros(count), np.zeros(count), np.log(pool.by_model_s)
    for one in belief.ran:
        ran[one.candidate] = 1.0
        took[one.candidate] = 0.0 if one.step_s is None else math.log(one.step_s) - by_model[one.candidate]
    columns = [
        gain_of(belief), mean - base, spread, fits, np.log(np.maximum(pool.share, 1e-3)),
        by_model - by_model.min(), others.mean(axis=1), ran, took, *pool.features.T,
    ]  # fmt: skip
    table = np.zeros((candidates + 1, len(FEATURES)), dtype=np.float32)
    table[:count] = np.clip(np.stack(columns, axis=1), -CLIP, CLIP)
    group = np.full(candidates + 1, -1, dtype=np.int32)
    group[:count] = np.where(belief.left, np.arange(count), -1)
    lost = sum(ran.step_s is None for ran in belief.ran)
    context = [
        len(belief.ran) / runs, lost / runs, float(belief.best is not None), float(spread.mean()), float(spread.min()),
        float(mean[likely].min(initial=base) - base), float(fits.mean()), math.log2(count) / 8.0,
    ]  # fmt: skip
    found = np.clip(np.array(context, dtype=np.float32), -CLIP, CLIP)
    return {"candidates": table.ravel(), "candidate_group": group, "alike": alike.ravel(), "context": found}
