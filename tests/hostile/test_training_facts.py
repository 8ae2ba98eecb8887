"""Facts and index of a training checkpoint that are of the wrong kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlplace.errors import InputError
from rlplace.runtime.distributed.state.training_facts import check_setting
from rlplace.runtime.distributed.state.training_index import check_storage


@pytest.mark.parametrize(
    ("saved", "present"),
    [(None, (0.9, 0.999)), (None, 0.001), ([0.9], (0.9, 0.999)), ("x", 0.1), (1, True), (None, "mean"), ([1], None)],
)
def test_settings_of_another_kind_are_refused(saved, present):
    with pytest.raises(InputError, match="the setting"):
        check_setting(saved, present, "the setting")


@pytest.mark.parametrize(
    ("saved", "present"), [([0.9, 0.99], (0.9, 0.999)), (None, True), (False, True), (True, None), (None, None), (2, 0.1)]
)
def test_settings_of_the_same_kind_are_taken(saved, present):
    check_setting(saved, present, "the setting")


@pytest.mark.parametrize("name", [{}, [], None, 5, "../x", "a/b", ""])
def test_an_index_that_names_no_file_beside_it_is_refused(name, tmp_path):
    with pytest.raises(InputError, match=r"outside of the checkpoint|is missing"):
        check_storage({"tensor": SimpleNamespace(relative_path=name)}, tmp_path)
