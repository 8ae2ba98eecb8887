"""The placer network: one graph encoder and one scorer shared by all candidates.

The score of a candidate is a linear function of its list-scheduling features, which starts as a plain heuristic, plus a
learned residual that starts at zero: an untrained network *is* the heuristic. B observations, K candidates, G groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.agents.bank import GraphTensors
from rlplace.agents.encoder import GraphEncoder
from rlplace.envs.features import FEATURES, NUM_FEATURES
from rlplace.envs.observation import NUM_CONTEXT, NUM_NODE_FEATURES

_HEURISTIC = {
    "finish_delay": -8.0,
    "imbalance_change": -4.0,
    "communication_change": -4.0,
    "memory_after": -0.5,
    "expected_saving": 20.0,
}
"""Start of the linear part: earliest finish while constructing, less imbalance and less communication while refining."""


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a `PlacerNetwork`; stored with every checkpoint.

    Attributes:
        hidden: Width of all layers.
        layers: Rounds of message passing; 0 leaves the graph out.
    """

    hidden: int = 48
    layers: int = 3

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint's config."""
        return asdict(self)


class PlacerNetwork(nn.Module):
    """Scores candidates and values states.

    Shapes:
        graph numbers [B], candidates [B, K, F], candidate_group [B, K], context [B, C] to logits [B, K] and values [B, 1].
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = NetworkConfig() if config is None else config
        hidden = self.config.hidden
        self.encoder = GraphEncoder(NUM_NODE_FEATURES, 2, hidden, self.config.layers)
        self.linear = nn.Linear(NUM_FEATURES, 1, bias=False)
        self.candidate = nn.Sequential(nn.Linear(hidden + NUM_FEATURES + NUM_CONTEXT, hidden), nn.ReLU())
        self.mix = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU())
        self.residual = nn.Linear(hidden, 1)
        self.stop = nn.Sequential(nn.Linear(hidden + NUM_CONTEXT, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.value = nn.Sequential(nn.Linear(hidden + NUM_CONTEXT, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self._reset_scores()

    def _reset_scores(self) -> None:
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)
        final = self.stop[-1]
        assert isinstance(final, nn.Linear)
        nn.init.zeros_(final.weight)
        nn.init.zeros_(final.bias)
        with torch.no_grad():
            self.linear.weight.zero_()
            for name, weight in _HEURISTIC.items():
                self.linear.weight[0, FEATURES.index(name)] = weight

    def encode(self, graph: GraphTensors) -> Tensor:
        """Group embeddings [G, H] of one graph."""
        result: Tensor = self.encoder(graph)
        return result

    def forward(
        self, embeddings: list[Tensor], which: Tensor, candidates: Tensor, candidate_group: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores candidates.

        Args:
            embeddings: Embeddings [G, H] of the distinct graphs in the batch.
            which: int64 [B], the graph of each row.
            candidates: float32 [B, K, F].
            candidate_group: int64 [B, K], -1 for stop and padding.
            context: float32 [B, C].
        """
        offsets = torch.tensor([0, *(len(e) for e in embeddings)], device=which.device).cumsum(0)[:-1]
        table = torch.cat(embeddings)
        named = candidate_group >= 0
        rows = torch.where(named, candidate_group + offsets[which].unsqueeze(1), 0)
        group = table[rows] * named.unsqueeze(2)
        wide = context.unsqueeze(1).expand(-1, candidates.shape[1], -1)
        each = self.candidate(torch.cat([group, candidates, wide], dim=2))
        weight = named.unsqueeze(2).float()
        pooled = (each * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        mixed = self.mix(torch.cat([each, pooled.unsqueeze(1).expand_as(each)], dim=2))
        logits = (self.linear(candidates) + self.residual(mixed)).squeeze(2)
        summary = torch.cat([pooled, context], dim=1)
        logits = torch.where(named, logits, self.stop(summary).expand_as(logits))
        return logits, self.value(summary)

    def score_one(
        self,
        embedding: Tensor,
        candidates: NDArray[np.float32],
        candidate_group: NDArray[np.int32],
        context: NDArray[np.float32],
    ) -> NDArray[np.float64]:
        """Logits float64 [K] of one state, without gradient.

        Args:
            embedding: [G, H], see `encode`.
            candidates: float32 [K, F].
            candidate_group: int32 [K].
            context: float32 [C].
        """
        with torch.no_grad():
            logits, _ = self(
                [embedding],
                torch.zeros(1, dtype=torch.long),
                torch.from_numpy(candidates).unsqueeze(0),
                torch.from_numpy(candidate_group.astype(np.int64)).unsqueeze(0),
                torch.from_numpy(context).unsqueeze(0),
            )
        result: NDArray[np.float64] = logits[0].double().numpy()
        return result
