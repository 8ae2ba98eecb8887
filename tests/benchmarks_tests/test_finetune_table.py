"""The tables of fine-tuning in the documentation are those of the rows in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_of_the_published_rows(capsys):
    from benchmarks.finetune.rank import read_rows
    from benchmarks.finetune.report import report

    rows = read_rows(ROOT / "benchmarks/finetune/measured")
    report(rows)
    page = (ROOT / "docs/results.md").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) > 25 and all(f"\n{line}\n" in page for line in lines)


def test_the_cells_are_what_the_page_says():
    from benchmarks.finetune.rank import read_rows

    rows = read_rows(ROOT / "benchmarks/finetune/measured")
    assert len({(row["cluster"], row["model"], row["seed"]) for row in rows}) == len(rows) == 36
    for row in rows:
        assert all(facts["plans"] <= 32 for facts in row["facts"].values())
        assert all(len(steps) >= 20 for steps in row["judged_s"].values())
