"""Examples that are one process: they run as they stand, from anywhere, and say what they promise."""

import json
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


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    cells = json.loads((EXAMPLES / "environments.ipynb").read_text())["cells"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    out = run(script, cwd=tmp_path)
    trained, chance = (float(out.partition(word)[2].split()[0].rstrip(",")) for word in ("trained", "chance"))
    assert 1.0 <= trained < chance
    assert all(not cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_ppo_with_a_graph_network_runs(tmp_path):
    words = ["--total-steps", "2048", "--problems", "8", "--num-envs", "16", "--copies", "4"]
    out = run("ppo_graph_toy.py", *words, cwd=tmp_path)
    assert "the policy:" in out and "64 of 64 fit" in out
    assert len((EXAMPLES / "ppo_graph_toy.py").read_text().splitlines()) <= 250


def test_the_table_of_examples_names_every_script():
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in text or any(
            path.name.startswith(start) for start in ("train_plain", "train_trainer", "train_accelerate")
        )
