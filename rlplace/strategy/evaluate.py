"""`Evaluator`: step time and memory of drafts on a cluster, as search asks for them by the thousand."""

from __future__ import annotations

from rlplace.cluster import Cluster
from rlplace.strategy.costs import BlockCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluation import Evaluation
from rlplace.strategy.reference import evaluate_reference
from rlplace.strategy.traffic import Traffic

__all__ = ["Evaluation", "Evaluator"]


class Evaluator:
    """The block executor for one model and cluster; it keeps what drafts have in common.

    Args:
        costs: What blocks cost on the kinds of the cluster's devices.
        cluster: Where drafts run.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster) -> None:
        self.costs, self.cluster, self.traffic = costs, cluster, Traffic(cluster)

    def evaluate(self, draft: Draft) -> Evaluation:
        """Step time and memory with everything that a search or a person asks about them.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        return evaluate_reference(draft, self.costs, self.cluster, self.traffic)

    def score(self, draft: Draft) -> tuple[float, float]:
        """Step time in seconds, and bytes over capacity; raises as `evaluate` does."""
        result = self.evaluate(draft)
        return result.step_time_s, result.over_bytes
