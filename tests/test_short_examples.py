"""Examples that are one process: they run as they stand, from anywhere, and say what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(name, *words, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_hugging_face_model_is_placed_and_trains(tmp_path):
    losses = [float(line.rpartition(" ")[2]) for line in run("place_gpt2.py", cwd=tmp_path).splitlines() if "loss" in line]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.slow
def test_a_placer_learns_from_graphs_of_ones_own(tmp_path):
    out = run("own_graphs.py", str(tmp_path), cwd=tmp_path)
    assert "graphs that it has not seen" in out and (tmp_path / "agent" / "policy.safetensors").is_file()


def test_the_table_of_examples_names_every_script():
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in text or any(
            path.name.startswith(start) for start in ("train_plain", "train_trainer", "train_accelerate")
        )
