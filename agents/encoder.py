"""Message passing over the group graph.

Two directed mean aggregations per layer (from producers and from consumers), with edge values, residual connections and
layer norm, in plain torch. Weight shapes depend neither on the number of groups nor on the number of devices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlplace.agents.bank import GraphTensors


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
        result: Tensor = self.norm(x + change)
        return result


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
