"""Drafts and strategies say the same; spaces are read as written, and forbid strategies outside."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import Draft, Mesh, draft_of, plain_draft
from rlplace.strategy.search.space import Space


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


ONE = Draft((0, 3), (Mesh((0,)),), (0,), bytes(3), bytes(3), (2,), (4,))
CHAIN = Draft(
    (0, 2, 3), (Mesh((0, 1), shard=2, sharding=1), Mesh((2, 3), tensor=2)), (0, 1), b"\0\2\0", b"\0\1\0", (2,), (4,), "1f1b"
)


def test_text_comes_back_as_it_was() -> None:
    text = "tensor=1,2,4 sharding=0,1 schedule=1f1b,gpipe recompute=none,full microbatch=2"
    assert Space.parse(text).text() == text
    assert Space.parse("") == Space()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tensor", "expected KEY=VALUE"),
        ("tensor=", "expected KEY=VALUE"),
        ("tensors=2", "unknown key of space 'tensors'; did you mean 'tensor'"),
        ("tensor=1 tensor=2", "tensor stands twice"),
        ("tensor=0", r"tensor\[0\]: expected a whole number from 1 up, found 0"),
        ("tensor=two", r"tensor\[0\]: expected a whole number"),
        ("tensor=1,,2", r"tensor\[1\]"),
        ("tensor=²", r"tensor\[0\]"),
        ("sharding=4", r"sharding\[0\]"),
        ("recompute=some", "unknown .*'some'"),
        ("schedule=2f2b", "unknown schedule '2f2b'"),
    ],
)
def test_what_is_no_space_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Space.parse(text)


@pytest.mark.parametrize(
    ("text", "one", "chain"),
    [
        ("", None, None),
        ("tensor=1", None, "tensor"),
        ("tensor=2", "tensor", "tensor"),
        ("shard=1", None, "shard"),
        ("sharding=0", None, "sharding"),
        ("sharding=1", None, None),
        ("pipeline=1", None, "pipeline"),
        ("pipeline=2", "pipeline", None),
        ("virtual=2", None, "virtual"),
        ("schedule=gpipe", None, "schedule"),
        ("schedule=1f1b", None, None),
        ("recompute=none", None, "recompute"),
        ("recompute=none,full", None, None),
        ("recompute=full", "recompute", "recompute"),
        ("offload=none", None, "offload"),
        ("microbatch=1", "microbatch", "microbatch"),
    ],
)
def test_a_key_binds_where_its_dimension_exists(text: str, one: str | None, chain: str | None) -> None:
    space = Space.parse(text)
    assert space.forbids(ONE) == one
    assert space.forbids(CHAIN) == chain


def test_replicas_of_unlike_micro_batches_all_count() -> None:
    draft = dataclasses.replace(ONE, places=(Mesh((0, 1), replicate=2),), microbatch=(2, 3), microbatches=(4, 4))
    assert Space(microbatch=(2,)).forbids(draft) == "microbatch"
    assert Space(microbatch=(2, 3)).forbids(draft) is None
