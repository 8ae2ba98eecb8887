"""A draft says what a pipeline says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import Draft, Mesh, draft_of, plain_draft


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
        Mesh(
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


def test_samples_of_replicas_that_are_unlike() -> None:
    """Two replicas of two places: 3 passes of 2 samples and 1 of 2, or as many of 2 and 3, or all alike, or one of each."""
    places = [Mesh((0, 1), shard=2, sharding=1), Mesh((2,))]
    sizes = {((2,), (3, 1)): 8, ((2, 3), (2,)): 10, ((2,), (3,)): 12, ((2, 3), (3, 1)): 9}
    for (microbatch, microbatches), samples in sizes.items():
        draft = plain_draft((0, 1, 2), places, microbatch=microbatch, microbatches=microbatches, schedule="gpipe")
        assert draft.data_degree == 2 and draft.batch == samples
    pair = plain_draft((0, 2, 3, 5, 6), places, [0, 1, 0, 1])
    assert (pair.blocks_of(0), pair.blocks_of(1), pair.stage_of_block) == ([0, 1, 3, 4], [2, 5], [0, 0, 1, 2, 2, 3])
    assert plain_draft((0, 1, 2), places[::-1]).data_degree == 2
