"""The network of `rlplace.measured.residual`: a plan as a graph of blocks, devices and stages, and what reads it.

Blocks and devices tell their stage what they are, stages tell their neighbours, and what all of them say is read beside what
the cost model says of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlplace.cluster import KINDS
from rlplace.errors import InputError
from rlplace.measured.log import Run
from rlplace.measured.pool import FEATURES
from rlplace.plan.strategy import AXES, Strategy

_BLOCK, _DEVICE, _STAGE, _WHOLE = 4, 4, len(AXES) + 5, len(FEATURES) + 3


@dataclass(frozen=True, eq=False)
class PlanGraph:
    """A plan as the network reads it: S stages, B blocks, D devices by stage.

    Attributes:
        blocks: float32 [B, 4]; `block_stage` int64 [B] says whose.
        devices: float32 [D, 4]; `device_stage` int64 [D] says whose.
        stages: float32 [S, 10].
        edges: int64 [2, E], from stage and to stage.
        whole: float32 [F], what the cost model says of the step.
    """

    blocks: Tensor
    block_stage: Tensor
    devices: Tensor
    device_stage: Tensor
    stages: Tensor
    edges: Tensor
    whole: Tensor

    @staticmethod
    def of(run: Run) -> PlanGraph:
        """The graph of a run's plan.

        Raises:
            InputError: Its strategy, or its features, are not what this version writes.
        """
        if len(run.features) != len(FEATURES):
            raise InputError(f"a run has {len(run.features)} features of its strategy, this version {len(FEATURES)}")
        strategy = Strategy.from_dict(run.strategy)
        blocks: list[list[float]] = []
        devices: list[list[float]] = []
        stages: list[list[float]] = []
        owner: tuple[list[int], list[int]] = ([], [])
        edges: list[tuple[int, int]] = []
        for pipeline in strategy.pipelines:
            for number, stage in enumerate(pipeline.stages):
                at = len(stages)
                if number:
                    edges += [(at - 1, at), (at, at - 1)]
                for block in stage.blocks:
                    again, out = stage.recompute.get(block), stage.offload.get(block)
                    blocks.append(
                        [float(again == "selective"), float(again == "full"), float(out is not None), float(out == "all")]
                    )
                    owner[0].append(at)
                for device in stage.devices:
                    if device >= len(run.kinds):
                        raise InputError(f"a run's strategy names device {device} of {len(run.kinds)}")
                    devices.append(_kind(run.kinds[device]))
                    owner[1].append(at)
                hosts = len({run.hosts[device] for device in stage.devices if device < len(run.hosts)})
                stages.append(
                    [
                        *(math.log2(stage.axis(axis)) for axis in AXES), stage.sharding / 3.0, float(stage.sequence_parallel),
                        math.log2(stage.expert), math.log2(1 + len(stage.blocks)), math.log2(max(1, hosts)),
                    ]
                )  # fmt: skip
        whole = [*run.features, math.log10(run.predicted_s), math.log2(len(run.kinds)), math.log2(1 + len(set(run.hosts)))]
        return PlanGraph(
            torch.tensor(blocks).reshape(-1, _BLOCK), torch.tensor(owner[0], dtype=torch.int64),
            torch.tensor(devices).reshape(-1, _DEVICE), torch.tensor(owner[1], dtype=torch.int64),
            torch.tensor(stages), torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, torch.tensor(whole),
        )  # fmt: skip


def _kind(name: str) -> list[float]:
    """What is known of a kind of device: float [4], zeros of an unknown one."""
    kind = KINDS.get(name)
    if kind is None:
        return [0.0] * _DEVICE
    flops = max(kind.peak_flops.values())
    return [
        1.0,
        math.log10(flops) - 14.0,
        math.log10(kind.memory_bandwidth_bytes_per_s) - 12.0,
        math.log10(kind.memory_bytes) - 10.5,
    ]


def together(graphs: Sequence[PlanGraph]) -> tuple[PlanGraph, Tensor]:
    """Many graphs as one, and int64 [S], which graph a stage belongs to."""
    counts = [len(graph.stages) for graph in graphs]
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    return PlanGraph(
        torch.cat([graph.blocks for graph in graphs]),
        torch.cat([graph.block_stage + start for graph, start in zip(graphs, starts, strict=True)]),
        torch.cat([graph.devices for graph in graphs]),
        torch.cat([graph.device_stage + start for graph, start in zip(graphs, starts, strict=True)]),
        torch.cat([graph.stages for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], dim=1),
        torch.stack([graph.whole for graph in graphs]),
    ), torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(counts))


class ResidualNetwork(nn.Module):
    """One member: mean and log of the standard deviation of log(measured / predicted)."""

    def __init__(self, stacks: int, hidden: int = 32) -> None:
        """A member that knows so many stacks of software by name."""
        super().__init__()
        self.block, self.device = nn.Linear(_BLOCK, hidden), nn.Linear(_DEVICE, hidden)
        self.stage, self.told = nn.Linear(_STAGE + 2 * hidden, hidden), nn.Linear(2 * hidden, hidden)
        self.read = nn.Linear(2 * hidden + _WHOLE + stacks, hidden)
        self.out = nn.Linear(hidden, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("shift", torch.zeros(_WHOLE))
        self.register_buffer("scale", torch.ones(_WHOLE))

    shift: Tensor
    scale: Tensor

    def forward(self, graph: PlanGraph, of_stage: Tensor, stacks: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation, float32 [N] each.

        Args:
            graph: N graphs together.
            of_stage: int64 [S], which graph a stage belongs to.
            stacks: float32 [N, K], which software each ran on; a row of zeros is unknown.
        """
        count = len(graph.stages)
        blocks = _mean(torch.relu(self.block(graph.blocks)), graph.block_stage, count)
        devices = _mean(torch.relu(self.device(graph.devices)), graph.device_stage, count)
        state = torch.relu(self.stage(torch.cat([graph.stages, blocks, devices], dim=1)))
        for _ in range(2):
            heard = _mean(state[graph.edges[0]], graph.edges[1], count)
            state = state + torch.relu(self.told(torch.cat([state, heard], dim=1)))
        number = len(graph.whole)
        most = torch.zeros(number, state.shape[1]).scatter_reduce(0, of_stage[:, None].expand_as(state), state, "amax")
        whole = ((graph.whole - self.shift) / self.scale).clamp(-5.0, 5.0)
        read = torch.relu(self.read(torch.cat([_mean(state, of_stage, number), most, whole, stacks], dim=1)))
        mean, spread = self.out(read).unbind(dim=1)
        return mean, (spread - 2.0).clamp(-5.0, 1.0)


def _mean(rows: Tensor, owner: Tensor, count: int) -> Tensor:
    """Means of the rows of every owner, zeros where it has none."""
    found = torch.zeros(count, rows.shape[1]).index_add(0, owner, rows)
    return found / torch.bincount(owner, minlength=count).clamp(min=1)[:, None]


def stack_rows(runs: Sequence[Run], stacks: Sequence[str]) -> Tensor:
    """float32 [N, K], 1 where a run's software is that of a name."""
    return torch.tensor([[float(name in run.stack) for name in stacks] for run in runs]).reshape(len(runs), len(stacks))
