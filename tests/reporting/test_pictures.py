"""Pictures for papers: files of each format, matplotlib only when it is asked for."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import make_plan
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.reporting.data import report_data
from rlplace.reporting.pictures import check_pictures, memory_figure, timeline_figure, write_pictures

MAGIC = {"pdf": b"%PDF-", "svg": b"<?xml", "png": b"\x89PNG"}


@pytest.fixture(scope="module")
def data():
    problem = random_problem(3, num_groups=16, num_devices=2, memory_factor=1.5)
    return report_data(problem, make_plan(problem, [0] * 8 + [1] * 8, planner="hand", microbatches=2))


def test_files_of_every_format(data, tmp_path):
    pytest.importorskip("matplotlib")
    written = write_pictures(data, tmp_path / "pictures")
    assert sorted(path.name for path in written) == sorted(f"{n}.{k}" for n in ("timeline", "memory") for k in MAGIC)
    for path in written:
        assert path.read_bytes().startswith(MAGIC[path.suffix[1:]])
    first = (tmp_path / "pictures" / "timeline.svg").read_bytes()
    write_pictures(data, tmp_path / "pictures")
    assert (tmp_path / "pictures" / "timeline.svg").read_bytes() == first, "equal data, equal bytes"


def test_figures_hold_the_timeline(data):
    pytest.importorskip("matplotlib")
    (boxes,) = timeline_figure(data).axes[0].collections
    assert len(boxes.get_paths()) == int((data.lanes.row < 2).sum())
    lines = memory_figure(data).axes[0].get_lines()
    peaks = [line.get_ydata().max() * 1e9 for line in lines[:2]]
    assert peaks == pytest.approx(data.timeline.peak_memory_bytes.tolist())
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_one_line_says_what_to_install(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"pip install 'rlplace\[plots\]'"):
        write_pictures(data, tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_folders_that_cannot_be_used(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        check_pictures(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        check_pictures(tmp_path / "none" / "pictures")


def test_a_step_that_does_not_complete_has_no_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    problem = build_problem("broken", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None])
    broken = report_data(problem, make_plan(problem, [1], planner="hand"))
    with pytest.raises(InputError, match="does not complete"):
        write_pictures(broken, tmp_path)
    assert list(Path(tmp_path).iterdir()) == []


def test_matplotlib_is_imported_late():
    code = "import sys, rlplace.reporting.report, rlplace.reporting.pictures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
