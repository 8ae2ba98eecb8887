"""The placer network: one scorer shared by all candidates, with a graph encoder beside it.

The score of a candidate is a linear function of its list-scheduling features, which starts as a plain heuristic, plus a
learned residual whose last layer starts at zero: an untrained network *is* the heuristic. Candidates are scored one by one, so
nothing depends on the number or the order of devices, groups or candidates. B observations, K candidates, F features, G groups.

The graph bank: static graph tensors of every problem, kept beside the policy.

Observations carry only the number of a graph; what does not change while a problem is solved never enters the rollout buffer.

G groups, E directed edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.envs.instance import Instance
from rlplace.envs.observation import NUM_CONTEXT, NUM_NODE_FEATURES, edge_features, node_features
from rlplace.errors import InputError


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


class MessageLayer(nn.Module):
    """One round of messages along and against the edges.

    Shapes:
        x: [G, H]. edges: [2, E]. edge_values: [E, V]. Result: [G, H].
    """

    def __init__(self, hidden: int, edge_size: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden + edge_size, hidden)
        self.up = nn.Linear(hidden + edge_size, hidden)
        self.update = nn.Linear(3 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, edges: Tensor, edge_values: Tensor) -> Tensor:
        """Returns the updated node embeddings."""
        source, target = edges
        from_producers = _mean_at(torch.relu(self.down(torch.cat([x[source], edge_values], dim=1))), target, len(x))
        from_consumers = _mean_at(torch.relu(self.up(torch.cat([x[target], edge_values], dim=1))), source, len(x))
        change = torch.relu(self.update(torch.cat([x, from_producers, from_consumers], dim=1)))
        return self.norm(x + change)


class GraphEncoder(nn.Module):
    """Embeds every group of a graph.

    Shapes:
        graph.nodes [G, N] to [G, H].
    """

    def __init__(self, node_size: int, edge_size: int, hidden: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.input = nn.Linear(node_size, hidden)
        self.layers = nn.ModuleList(MessageLayer(hidden, edge_size) for _ in range(layers))

    def forward(self, graph: GraphTensors) -> Tensor:
        """Returns float32 [G, H]."""
        x = torch.relu(self.input(graph.nodes))
        for layer in self.layers:
            x = layer(x, graph.edges, graph.edge_values)
        return x


def _mean_at(messages: Tensor, index: Tensor, count: int) -> Tensor:
    """Mean of the messages that arrive at each of `count` nodes; 0 where none does."""
    total = messages.new_zeros(count, messages.shape[1]).index_add_(0, index, messages)
    number = messages.new_zeros(count).index_add_(0, index, messages.new_ones(len(index)))
    return total / number.clamp(min=1.0).unsqueeze(1)


HEURISTIC = {
    # Refinement: shorter loads and transfers first.
    "busiest_change": -20.0,
    "congested_load": -20.0,
    "sent_change": -10.0,
    "congested_sent": -10.0,
    "delay_sum": -5.0,
    "saved": 0.5,
    # Construction: earliest finish.
    "finish_delay": -8.0,
}
"""Start of the linear part by name of the feature; other features start at 0."""

STOP_LOGIT = -2.0
"""Start of the logit of the candidate that is no move."""


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a `PlacerNetwork`; stored with every checkpoint.

    Attributes:
        hidden: Width of the first layer and of the graph encoder.
        second: Width of the second layer.
        layers: Rounds of message passing; 0 leaves the graph out.
    """

    hidden: int = 64
    second: int = 32
    layers: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint's config."""
        return asdict(self)


class PlacerNetwork(nn.Module):
    """Scores candidates and values states.

    Attributes:
        mean, scale: float32 [F], what features are standardised with before the first layer; see `standardise`.

    Shapes:
        graph numbers [B], candidates [B, K, F], candidate_group [B, K], context [B, C] to logits [B, K] and values [B, 1].
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, config: NetworkConfig | None = None, *, features: Sequence[str]) -> None:
        """A network that is the heuristic.

        Args:
            config: Sizes.
            features: Names of the columns of the candidates.
        """
        super().__init__()
        self.config = NetworkConfig() if config is None else config
        self.features = tuple(features)
        hidden, second = self.config.hidden, self.config.second
        self.linear = nn.Linear(len(self.features), 1, bias=False)
        self.first = nn.Linear(len(self.features), hidden)
        self.second = nn.Linear(hidden, second)
        self.residual = nn.Linear(second, 1, bias=False)
        if self.config.layers:
            self.encoder = GraphEncoder(NUM_NODE_FEATURES, 2, hidden, self.config.layers)
            self.embed = nn.Linear(hidden, hidden, bias=False)
        self.stop = nn.Linear(second + NUM_CONTEXT, 1)
        self.value = nn.Sequential(nn.Linear(second + NUM_CONTEXT, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.register_buffer("mean", torch.zeros(len(self.features)))
        self.register_buffer("scale", torch.ones(len(self.features)))
        with torch.no_grad():
            self.linear.weight.zero_()
            for name, weight in HEURISTIC.items():
                if name in self.features:
                    self.linear.weight[0, self.features.index(name)] = weight
            self.residual.weight.zero_()
            self.stop.weight.zero_()
            self.stop.bias.fill_(STOP_LOGIT)

    def standardise(self, mean: Tensor, scale: Tensor) -> None:
        """Sets what features are standardised with: float32 [F] each."""
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def encode(self, graph: GraphTensors) -> Tensor:
        """What the graph adds to the first layer for each group: [G, H], or [0, H] without message passing."""
        if not self.config.layers:
            return self.mean.new_zeros(0, self.config.hidden)
        return self.embed(self.encoder(graph))

    def scores(self, candidates: Tensor, of_group: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [..., K] and second-layer activations [..., K, S] of candidates [..., K, F].

        Args:
            candidates: Features.
            of_group: [..., K, H], rows of `encode`; None without message passing.
        """
        before = self.first((candidates - self.mean) / self.scale)
        if of_group is not None:
            before = before + of_group
        after = torch.relu(self.second(torch.relu(before)))
        return (self.linear(candidates) + self.residual(after)).squeeze(-1), after

    def forward(
        self, embeddings: list[Tensor], which: Tensor, candidates: Tensor, candidate_group: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores candidates.

        Args:
            embeddings: Results of `encode` for the distinct graphs in the batch.
            which: int64 [B], the graph of each row.
            candidates: float32 [B, K, F].
            candidate_group: int64 [B, K], -1 for stop and padding.
            context: float32 [B, C].
        """
        named = candidate_group >= 0
        of_group = None
        if self.config.layers:
            offsets = torch.tensor([0, *(len(e) for e in embeddings)], device=which.device).cumsum(0)[:-1]
            rows = torch.where(named, candidate_group + offsets[which].unsqueeze(1), 0)
            of_group = torch.cat(embeddings)[rows] * named.unsqueeze(2)
        logits, after = self.scores(candidates, of_group)
        weight = named.unsqueeze(2).float()
        pooled = (after * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        summary = torch.cat([pooled, context], dim=1)
        return torch.where(named, logits, self.stop(summary).expand_as(logits)), self.value(summary)

    def compiled(self) -> tuple[NDArray[np.float32], ...]:
        """The scorer for `rlplace.agents.guided`: linear [F], first [F, H] and bias [H], second [H, S] and bias [S], last [S].

        The standardisation is folded into the first layer.

        Raises:
            InputError: The network passes messages, which the search does not.
        """
        if self.config.layers:
            raise InputError("the search knows no message passing; train the network with layers 0")
        with torch.no_grad():
            first = self.first.weight / self.scale
            bias = self.first.bias - first @ self.mean
            parts = (self.linear.weight[0], first.T, bias, self.second.weight.T, self.second.bias, self.residual.weight[0])
            return tuple(np.ascontiguousarray(part.cpu().numpy(), dtype=np.float32) for part in parts)
