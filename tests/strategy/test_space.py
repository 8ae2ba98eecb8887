"""A space is read as it is written, and forbids what it says."""

from __future__ import annotations

import dataclasses

import pytest

from rlplace.errors import InputError
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.search.space import Space

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
