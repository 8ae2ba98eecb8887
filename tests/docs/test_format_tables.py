"""The page of file formats: every key of every record has its meaning, types are in words, and examples are read."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec.inspect
import pytest
from msgspec import Meta

import rlplace
from rlplace.cluster import KINDS
from rlplace.cost import CostTable
from rlplace.records import Record
from rlplace.strategy.search.efficiency import BatchCurve
from tests.docs import doc_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/_ext"))
import format_tables
from generated_pages import presets


def test_every_preset_has_a_row_that_says_what_it_rests_on():
    rows = presets().splitlines()
    assert len(rows) == 2 + len(KINDS)
    assert any(row.startswith("| `a6000` | 154.8, 38.7 | 48, 768 | PCIe 4 | ") and "; measured: " in row for row in rows)
    assert any(row.startswith("| `rtx2080ti` | -, 14.2 | 11, 616 | PCIe 3 staged | ") for row in rows)


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


READERS = {
    "rlplace.problem": rlplace.Problem.load,
    "rlplace.graph": rlplace.OpGraph.load,
    "rlplace.cost": CostTable.load,
    "rlplace.batch_curve": BatchCurve.load,
}


def test_the_examples_of_the_page_are_read(tmp_path):
    blocks = doc_pages.blocks(doc_pages.ROOT / "docs/formats.md")
    shortest, largest, *tables = [block.text for block in blocks if block.language == "toml"]
    devices = "".join(f'[[device]]\nname = "gpu{number}"\nkind = "a100-80g"\n' for number in range(4))
    whole = "".join(('format = "rlplace.cluster"\nversion = 1\n', devices, *tables))
    for text, count in ((shortest, 2), (largest, 4096), (whole, 4)):
        (tmp_path / "cluster.toml").write_text(text)
        assert rlplace.Cluster.load(tmp_path / "cluster.toml").num_devices == count
    seen = set()
    for text in (block.text for block in blocks if block.language == "json"):
        for example in [text] if text.count('"format"') == 1 else text.splitlines():
            kind = json.loads(example)["format"]
            (tmp_path / "example.json").write_text(example)
            READERS[kind](tmp_path / "example.json")
            seen.add(kind)
    assert seen == set(READERS)
