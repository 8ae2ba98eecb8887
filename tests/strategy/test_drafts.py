"""A draft says what a pipeline says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import Draft, Place, draft_of


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Chains of 1 to 4 equal places over 1 to 8 blocks."""
    count = draw(st.integers(1, 4))
    blocks = draw(st.integers(count, 8))
    cuts = sorted(draw(st.sets(st.integers(1, blocks - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    replicate, shard, tensor = (draw(st.integers(1, 2)) for _ in range(3))
    width = replicate * shard * tensor
    level = 0 if shard == 1 else 1 if count > 1 else draw(st.integers(1, 3))
    places = tuple(
        Place(
            tuple(range(width * i, width * (i + 1))), replicate, shard, 1, tensor, 1, level, tensor > 1 and draw(st.booleans())
        )
        for i in range(count)
    )
    choices = st.lists(st.integers(0, 2), min_size=blocks, max_size=blocks).map(bytes)
    size = draw(st.integers(1, 3))
    return Draft(
        (0, *cuts, blocks), places, tuple(range(count)), draw(choices), draw(choices), (size,), (4,),
        draw(st.sampled_from(["1f1b", "gpipe"])) if count > 1 else None,
    )  # fmt: skip


@given(drafts())
def test_names_and_numbers_say_the_same(draft: Draft) -> None:
    names = [f"layers.{block}" for block in range(draft.bounds[-1])]
    strategy = draft.strategy(names)
    assert Strategy.from_dict(strategy.to_dict()) == strategy
    assert draft_of(strategy.pipelines[0], names) == draft
    assert strategy.batch == draft.batch
    assert strategy.devices == draft.devices
