"""Ten cells of the matrix (benchmarks/EQUALITY.md), of ten kinds of models, in one launch of eight processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.equality import FEW, holds
from rlplace.runtime.strategy.why_not import minor_version

ROOT = Path(__file__).parents[2]

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.skipif(minor_version(torch.__version__) < (2, 13), reason="refuses stages in a v before torch 2.13")
def test_cells_equal_the_plain_model():
    words = [sys.executable, "-m", "benchmarks.equality", "--few"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(row["kind"], row["cell"]) for row in rows] == list(FEW)
    assert all(holds(row) for row in rows)
