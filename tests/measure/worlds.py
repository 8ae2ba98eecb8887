"""Questions about made-up models, for tests of what is learned from runs."""

from __future__ import annotations

from functools import cache

import numpy as np

from rlplace.cluster.parse import parse
from rlplace.measure.pool import Pool, first_pool
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs

CLUSTERS = ("a100-80g:4", "h100:2x4,ib=400g", "a100-80g:2+t4:2")


@cache
def question(seed: int = 0, cluster: str = CLUSTERS[0], batch: int = 16) -> SearchProblem:
    machine = parse(cluster)
    return SearchProblem(DraftEvaluator(random_costs(np.random.default_rng(seed), machine, 12), machine), batch)


@cache
def pool(seed: int = 0, cluster: str = CLUSTERS[0]) -> Pool:
    return first_pool(question(seed, cluster), calls=120)
