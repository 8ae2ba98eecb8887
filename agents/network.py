"""The placer network: one scorer shared by all candidates.

The score of a candidate is a linear function of its list-scheduling features, which starts as a plain heuristic, plus a
learned residual whose last layer starts at zero: an untrained network *is* the heuristic. Candidates are scored one by one, so
nothing depends on the number or the order of devices, groups or candidates. B observations, K candidates, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlplace.agents.policies import AnalysedPlan, Policy
from rlplace.envs.base import ENVIRONMENTS
from rlplace.envs.observation import NUM_CONTEXT

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
    # The next run: the largest expected improvement.
    "expected_gain": 20.0,
}
"""Start of the linear part by name of the feature; other features start at 0."""

STOP_LOGIT = -2.0
"""Start of the logit of the candidate that is no move."""


class PlacerNetwork(Policy):
    """Scores candidates and values states.

    Attributes:
        mean, scale: float32 [F], by which features are standardised before the first layer; see `standardise`.

    Shapes:
        candidates [B, K, F], candidate_group [B, K], context [B, C] to logits [B, K] and values [B, 1].
    """

    environments: ClassVar[tuple[str, ...]] = ENVIRONMENTS
    mean: Tensor
    scale: Tensor

    def __init__(self, *, features: Sequence[str], hidden: int = 64, second: int = 32) -> None:
        """A network that is the heuristic.

        Args:
            features: Names of the columns of the candidates.
            hidden: Width of the first layer.
            second: Width of the second layer.
        """
        super().__init__()
        self.features = tuple(features)
        self._sizes = {"hidden": hidden, "second": second}
        self.linear = nn.Linear(len(self.features), 1, bias=False)
        self.first = nn.Linear(len(self.features), hidden)
        self.second = nn.Linear(hidden, second)
        self.residual = nn.Linear(second, 1, bias=False)
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
        """Sets mean and scale by which features are standardised: float32 [F] each."""
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def settings(self) -> dict[str, Any]:
        """Returns its sizes."""
        return dict(self._sizes)

    def described(self, candidates: Tensor) -> Tensor:
        """Returns the second-layer activations [..., K, S] of candidates [..., K, F]."""
        before = self.first((candidates - self.mean) / self.scale)
        return torch.relu(self.second(torch.relu(before)))

    def scores(self, state: AnalysedPlan | None, moves: Tensor) -> Tensor:
        """Returns logits [..., K] of moves [..., K, F]; the plan does not matter."""
        return self._logits(moves, self.described(moves))

    def _logits(self, candidates: Tensor, described: Tensor) -> Tensor:
        return (self.linear(candidates) + self.residual(described)).squeeze(-1)

    def forward(self, candidates: Tensor, candidate_group: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Scores candidates.

        Args:
            candidates: float32 [B, K, F].
            candidate_group: int64 [B, K], -1 for stop and padding.
            context: float32 [B, C].
        """
        named = candidate_group >= 0
        after = self.described(candidates)
        logits = self._logits(candidates, after)
        weight = named.unsqueeze(2).float()
        pooled = (after * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        summary = torch.cat([pooled, context], dim=1)
        return torch.where(named, logits, self.stop(summary).expand_as(logits)), self.value(summary)

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Scores the candidates of observations of an environment; see `forward`."""
        groups = observation["candidate_group"].long()
        candidates = observation["candidates"].reshape(*groups.shape, len(self.features))
        return self(candidates, groups, observation["context"])
