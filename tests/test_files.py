"""Garbage collection around code that makes many objects."""

from __future__ import annotations

import gc

from rlplace.files import frozen_heap


def test_a_frozen_heap_thaws_unless_somebody_else_froze_it() -> None:
    assert not gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count()
        with frozen_heap():
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
