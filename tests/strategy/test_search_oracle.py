"""On small problems the search finds what trying every strategy finds."""

from __future__ import annotations

import pytest
from brute_force import quicker, small_question

from rlplace.strategy.search import search


# The first seven need exchanges of three blocks' choices, choices kept over a move, chunks where places merge, wider tensor
# groups, a kind of device between two halves of another.
@pytest.mark.parametrize("seed", [2, 4, 97, 100, 143, 152, 197, *range(5, 13)])
def test_no_strategy_is_quicker_than_the_answer(seed: int) -> None:
    asked = small_question(seed)
    found_s = search(asked).ranked[0].step_s
    assert quicker(asked, found_s * (1 - 1e-9)) is None
