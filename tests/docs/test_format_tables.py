"""Tables of file formats: every key of every record has its meaning, and types and ranges are in words."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec.inspect
import pytest
from msgspec import Meta

from rlplace.records import Record

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/_ext"))
import format_tables


def test_every_key_has_a_row_and_a_meaning():
    pages = format_tables.pages()
    assert len(pages) == len(format_tables.FORMATS) and all(page.count("| `") >= 5 for page in pages.values())
    rows = pages["format_cluster.md"].splitlines()
    assert (
        "| `pcie_per_switch` | whole number from 1 to 64, default `1` | Devices that share the uplink of a PCIe switch. |"
        in rows
    )
    assert any(row.startswith("| `from` | text or list of text |") for row in rows)  # the key of the file, not of the record


def test_a_key_without_a_meaning_is_an_error(monkeypatch):
    class Silent(Record, frozen=True):
        """Nothing."""

        size: int

    monkeypatch.setattr(format_tables, "FORMATS", {"silent": {"": Silent}})
    with pytest.raises(ValueError, match="document the attribute size"):
        format_tables.pages()


@pytest.mark.parametrize(
    "kind, text",
    [
        (Annotated[float, Meta(gt=0, lt=1e18)], "number above 0"),
        (Annotated[int, Meta(ge=1, le=64)] | None, "whole number from 1 to 64 or null"),
        (Literal["b", "a"], "`a` or `b`"),
        (tuple[tuple[int, float], ...], "list of [whole number, number]"),
        (dict[str, list[bool]], "table of list of (true or false)"),
    ],
)
def test_types_in_words(kind, text):
    assert format_tables.words(msgspec.inspect.type_info(kind)) == text
