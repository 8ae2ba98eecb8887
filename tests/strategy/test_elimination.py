"""The dynamic program of tensor-parallel layouts against brute force."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.strategy.layouts.cut_moves import eliminate


def brute_force(own, ends, between):
    """Cheapest of all combinations, each of them added up."""
    axes = np.ix_(*(range(len(costs)) for costs in own))
    total = sum(costs[axis] for costs, axis in zip(own, axes, strict=True))
    for (one, other), costs in zip(ends, between, strict=True):
        total = total + costs[axes[one], axes[other]]
    return float(np.asarray(total).min())


@st.composite
def random_case(draw):
    """A random graph, and a random cost for everything: whole numbers up to 8 make ties frequent and sums exact."""
    count = draw(st.integers(1, 7))
    ends = [pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans())]
    ends += ends[: draw(st.integers(0, 2))]  # parallel edges
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = [int(k) for k in rng.integers(1, 6, count)]
    own = [rng.integers(0, 8, k).astype(float) for k in options]
    return own, ends, [rng.integers(0, 8, (options[u], options[v])).astype(float) for u, v in ends]


@given(random_case())
@settings(max_examples=120)
def test_elimination_equals_brute_force(case):
    own, ends, between = case
    chosen = eliminate(own, ends, between)
    total = sum(costs[option] for costs, option in zip(own, chosen, strict=True))
    total += sum(costs[chosen[one], chosen[other]] for (one, other), costs in zip(ends, between, strict=True))
    assert total == brute_force(own, ends, between)
