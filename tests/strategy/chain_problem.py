"""A draft's chain of blocks as a problem for the op-level simulator, which knows nothing of blocks."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.cluster import Cluster
from rlplace.plan import PlacementPlan
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.schedule import SCHEDULES
from rlplace.strategy.costs import BlockCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.meshes import stage_actions


def chain_problem(costs: BlockCosts, cluster: Cluster, draft: Draft, pieces: int = 8) -> tuple[Problem, PlacementPlan]:
    """Every block as so many equal forward, backward and update ops, each piece a group of its own.

    Blocks keep the same bytes for their backward, working bytes come with the last forward and the first backward op, and what
    stages send has the size that the costs say. Only drafts without sharding, tensor groups, ties and offload, whose replicas
    are alike in micro-batches.
    """
    count, devices = len(costs.names), cluster.num_devices
    cut = draft.places[0].cut(draft.microbatch[0])
    kinds = [costs.kinds.index(str(device.kind)) for device in cluster.devices]
    passes = {kind: costs.passes(kind, cut) for kind in set(kinds)}
    one, held = passes[kinds[0]], costs.held()
    split = draft.schedule is not None and SCHEDULES[draft.schedule].splits_backward
    ops = count * pieces
    weight_op, update_op = 2 * ops, (3 if split else 2) * ops
    how = draft.recompute

    def seconds(block: int, phase: int) -> list[float]:
        found = []
        for kind in kinds:
            again = float(passes[kind].again_s[how[block], block])
            weight = float(passes[kind].weight_s[block]) if split else 0.0
            whole = {
                FORWARD: float(passes[kind].forward_s[block]),
                BACKWARD: float(passes[kind].backward_s[block]) + again - weight,
                BACKWARD_WEIGHT: weight + again,
                UPDATE: float(costs.update_s(kind)[block]),
            }
            found.append(whole[phase] / pieces)
        return found

    phases = [FORWARD, BACKWARD, *([BACKWARD_WEIGHT] if split else []), UPDATE]
    ends = set(draft.bounds[1:-1])
    tensors, temporary = [], np.zeros(len(phases) * ops, dtype=np.int64)
    for op in range(ops):
        block, piece = divmod(op, pieces)
        kept = int(one.kept_bytes[how[block], block])
        share = kept // pieces if piece else kept - kept // pieces * (pieces - 1)
        tensors.append(TensorSpec(op, share, [ops + op, *([weight_op + op] if split else [])]))
        border = piece == pieces - 1 and block + 1 in ends
        if op + 1 < ops:
            tensors.append(TensorSpec(op, int(one.sent_bytes[block]) if border else 0, [op + 1]))
            tensors.append(TensorSpec(ops + op + 1, int(one.returned_bytes[block]) if border else 0, [ops + op]))
        if split:
            tensors.append(TensorSpec(ops + op, 0, [weight_op + op]))
        tensors.append(TensorSpec((weight_op if split else ops) + op, 0, [update_op + op]))
        if piece == pieces - 1:
            temporary[op], temporary[ops + op] = one.working_bytes[:, how[block], block]
    sizes = [np.repeat(part // pieces, pieces) for part in (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes)]
    for part, whole in zip(sizes, (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes), strict=True):
        part[::pieces] += whole - pieces * (whole // pieces)
    problem = build_problem(
        "chain",
        time_s=[seconds(op // pieces, phase) for phase in phases for op in range(ops)],
        tensors=tensors,
        memory_bytes=[device.memory_bytes for device in cluster.devices],
        group=list(range(ops)) * len(phases),
        phase=[phase for phase in phases for _ in range(ops)],
        temporary_bytes=temporary.tolist(),
        links=cluster.links,
    )
    problem = dataclasses.replace(
        problem, devices=cluster.devices, resident_bytes=sum(sizes), weight_bytes=sizes[0], gradient_bytes=sizes[1],
        optimizer_bytes=sizes[2],
    )  # fmt: skip
    stage_of_block = np.repeat(np.arange(draft.stages), np.diff(draft.bounds))
    stage_of_group = np.repeat(stage_of_block, pieces).astype(np.int32)
    place_of_group = np.array(draft.place_of_stage, dtype=np.int32)[stage_of_group]
    order = None
    if draft.stages > 1 and draft.data_degree == 1:  # the simulator's own 1f1b is no list of actions
        first = {"F": [0], "B": [1, 2] if split else [1], "I": [1], "W": [2]}
        own: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
        for place, actions in enumerate(stage_actions(draft, draft.microbatches[0])):
            for stage, kind, microbatch in actions:
                inside = range(draft.bounds[stage] * pieces, draft.bounds[stage + 1] * pieces)
                for phase in first[kind]:
                    own[place] += [(phase * ops + op, microbatch) for op in (inside if kind == "F" else reversed(inside))]
            stages = [stage for stage, at in enumerate(draft.place_of_stage) if at == place]
            for stage in stages:
                updated = range(draft.bounds[stage] * pieces, draft.bounds[stage + 1] * pieces)
                own[place] += [(update_op + op, 0) for op in updated]
        order = own
    degree = draft.data_degree
    rows = [[place.devices[replica] for place in draft.places] for replica in range(degree)]
    plan = PlacementPlan(
        problem=problem.fingerprint, planner="test", seed=0, device_of_group=place_of_group, microbatches=draft.microbatches[0],
        schedule="list", order=order, stage_of_group=stage_of_group if draft.schedule else None,
        replicas=[row + [d for d in range(devices) if d not in row] for row in rows] if degree == 1 else rows,
    )  # fmt: skip
    return problem, plan
