"""Tables of the docs are those of the rows that stand beside their benchmarks."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import runs, types_table

ROOT = Path(__file__).resolve().parents[2]


def test_types_of_transformers():
    lines = (ROOT / "benchmarks/types.rows.jsonl").read_text().splitlines()
    rows = {row["type"]: row for row in map(json.loads, lines)}
    page = (ROOT / "docs/model-types.md").read_text()
    known, version = re.search(r"tries the (\d+) types of transformers (\S+):", page).groups()
    assert page == types_table.page(rows, int(known), version)
    changed = {**rows, "bert": {**rows["bert"], "runs": {"shares": "no", "stages": "no"}}}
    assert page != types_table.page(changed, int(known), version)


@pytest.mark.parametrize("made", [runs.table, runs.ratios])
def test_rules_for_the_next_run(made):
    page = (ROOT / "docs/results.md").read_text()
    assert made(runs.ROWS, "test") in page
