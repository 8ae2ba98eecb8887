"""What the cost of PaSE says beside the speed-ups that its paper measured, on every row of its figure up to sixteen cards."""

from __future__ import annotations

import pytest

from benchmarks.papers.pase.headline import COUNTS, MACHINES, MEASURED, ratios
from rlplace.cost.timings import rank_correlation

SIZES = COUNTS[:3]


@pytest.fixture(scope="module")
def rows():
    return {(card, name, p): ratios(name, p, MACHINES[card]) for card, name in MEASURED for p in SIZES}


def test_no_row_is_slower_than_data_parallelism(rows):
    assert len(rows) == 8 * len(SIZES)
    assert all(whole >= 1 for whole, _ in rows.values())
    assert all(hidden <= whole for whole, hidden in rows.values())


def test_slower_links_make_every_gain_larger_and_so_do_more_cards(rows):
    for name in {name for _, name in MEASURED}:
        for p in SIZES:
            assert rows["RTX 2080 Ti", name, p][0] > rows["GTX 1080 Ti", name, p][0]
        for card in MACHINES:
            gains = [rows[card, name, p][0] for p in SIZES]
            assert gains == sorted(gains)


def test_networks_gain_in_the_order_that_was_measured(rows):
    said = [whole for whole, _ in rows.values()]
    seen = [MEASURED[card, name][COUNTS.index(p)] for card, name, p in rows]
    assert rank_correlation(said, seen) > 0.7
    for card in MACHINES:  # on four cards: which network gains most and which least
        order = sorted((name for other, name in MEASURED if other == card), key=lambda name: rows[card, name, 4][0])
        assert order[0] == "inception_v3" and order[-1] == "alexnet"


def test_the_headline_is_not_met_by_the_cost(rows):
    """The page says so: 1.85 and 4 were measured, the cost says more, since it sums work and traffic that cards overlap."""
    assert max(whole for (card, _, _), (whole, _) in rows.items() if card == "GTX 1080 Ti") > 1.85 * 2
    assert max(whole for (card, _, _), (whole, _) in rows.items() if card == "RTX 2080 Ti") > 4 * 2
