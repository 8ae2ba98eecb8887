"""Questions of `rlplace/Strategy-v0` by split, of models and clusters of the splits of placements; scenarios of Cluster-v0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import cycle

import numpy as np

from rlplace.agents.problems import graphs
from rlplace.agents.problems.splits import GROUPS, TEST, VALIDATION
from rlplace.cluster.parse import parse
from rlplace.envs.cluster import Scenario, default_questions
from rlplace.errors import unknown_name
from rlplace.measure.pool import first_pool
from rlplace.measure.world import Truth
from rlplace.runtime.strategy.why_not import judge
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.tries import SearchProblem

BATCH, CAPTURED = 64, (2, 4)
"""Samples a step, and samples of the two captures that give all sizes."""

_ZOO = [name for name in graphs.FAMILIES if name.startswith("zoo:")]
DEALT: dict[str, tuple[Mapping[str, Sequence[graphs.Recipe | str]], Sequence[str]]] = {
    "train": ({name: [graphs.variant((name,), 0, slot)[1] for slot in range(2)] for name in _ZOO}, graphs.SEEN_CLUSTERS),
    "val": (VALIDATION, graphs.VALIDATION_CLUSTERS),
    "test": (TEST, graphs.TEST_CLUSTERS),
    "branchy": ({name: TEST[name] for name in GROUPS}, graphs.TEST_CLUSTERS),
}
"""By split, models by family, of which synthetic graphs are left out, and clusters; train and branchy need no transformers."""


@cache
def strategy_questions(split: str) -> tuple[SearchProblem, ...]:
    """Returns the questions of a split about strategies that the runtime can run; models are captured on first use, within a
    minute.

    Raises:
        InputError: `DEALT` has no such split.
        MissingError: Captures need the transformers extra.
    """
    if split not in DEALT:
        raise unknown_name("split", split, (SMALL, *DEALT))
    families, clusters = DEALT[split]
    recipes = [model for some in families.values() for model in some if not isinstance(model, str)]
    why_not, asked = judge(None)[0], []
    for (model, _, seq), cluster in zip(recipes, cycle(clusters), strict=False):
        first, other = (graphs.captured((model, samples, seq)) for samples in CAPTURED)
        asked.append(ask(first, parse(cluster), BATCH, other=other, why_not=why_not))
    return tuple(asked)


SMALL = "small"
"""Name of the three small questions of `default_questions`, which need no split."""


def questions_of(name: str) -> tuple[SearchProblem, ...]:
    """Returns the questions of `SMALL` or of a split."""
    return default_questions() if name == SMALL else strategy_questions(name)


_pool = lru_cache(32)(lambda question: first_pool(question, calls=100))


def scenario(question: SearchProblem, seed: int, number: int) -> Scenario:
    """Returns a scenario on a question, whose truth follows from the seed and the number."""
    draw = int(np.random.default_rng([seed, number]).integers(1 << 62))
    return Scenario.of(_pool(question), Truth.drawn(question, draw))
