"""The graph bank: static graph tensors of every problem, kept beside the policy.

Observations carry only the number of a graph; what does not change while a problem is solved never enters the rollout buffer.

G groups, E directed edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlplace.envs.instance import Instance
from rlplace.envs.observation import edge_features, node_features


@dataclass(frozen=True, eq=False)
class GraphTensors:
    """One problem's graph.

    Attributes:
        nodes: float32 [G, node features].
        edges: int64 [2, E], producer and consumer groups.
        edge_values: float32 [E, edge features].
    """

    nodes: Tensor
    edges: Tensor
    edge_values: Tensor

    def to(self, device: torch.device) -> GraphTensors:
        """The same tensors on another torch device."""
        return GraphTensors(self.nodes.to(device), self.edges.to(device), self.edge_values.to(device))


def graph_tensors(instance: Instance) -> GraphTensors:
    """The static tensors of one instance."""
    edges = torch.stack([torch.as_tensor(instance.graph.source.copy()), torch.as_tensor(instance.graph.target.copy())]).long()
    return GraphTensors(
        nodes=torch.from_numpy(node_features(instance)), edges=edges, edge_values=torch.from_numpy(edge_features(instance))
    )


class GraphBank:
    """Graphs by number, in the order of the environment's problems; tensors are made when they are asked for."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._instances = list(instances)
        self._on_device: dict[tuple[int, torch.device], GraphTensors] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, index: int, device: torch.device) -> GraphTensors:
        """Graph `index` on `device`."""
        key = (index, device)
        if key not in self._on_device:
            self._on_device[key] = graph_tensors(self._instances[index]).to(device)
        return self._on_device[key]
