"""What a user installs: the sdist, the wheel made of it, and the package without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rlplace

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "rlplace", "envs", "agents", "checkpoints", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md",
    "MANIFEST.in",
)  # fmt: skip
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


USERS_CODE = """
import torch

import rlplace

model = torch.nn.Linear(4, 2)
graph = rlplace.capture(model, (torch.empty(8, 4),), loss=torch.sum)
cluster = rlplace.Cluster.preset("a100-80g:2")
problem = rlplace.price(graph, cluster)
plan = rlplace.place(problem, time_limit_s=1.0)
reveal_type(graph)
reveal_type(plan)
reveal_type(rlplace.simulate(problem, plan).step_time_s)
reveal_type(rlplace.load_agent("default"))
reveal_type(rlplace.explain(problem, plan))
reveal_type(rlplace.apply(model, plan, ["cpu", "cpu"]))
wrong: str = rlplace.place(problem)
rlplace.place(problem, time_limit_s="soon")
"""


def python(*words, cwd, path="", rc=0, **environment):
    environment |= {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == rc, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds the wheel's content, made from the sdist."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    python("-c", BUILD, "build_sdist", str(folder), cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    python("-c", BUILD, "build_wheel", str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    shutil.rmtree(source)
    shutil.rmtree(folder / "unpacked")
    return folder / "site"


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_holds_every_module_and_its_data(installed):
    for top, package in (
        ("rlplace", "rlplace"),
        ("envs", "rlplace/envs"),
        ("agents", "rlplace/agents"),
        ("checkpoints", "rlplace/checkpoints"),
    ):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (installed / package / path.relative_to(ROOT / top)).is_file(), f"{path} is not in the wheel"
    assert not (installed / "envs").exists() and not (installed / "agents").exists()
    kernels = {
        path.name.partition(f".{sys.implementation.cache_tag}.")[0] for path in (installed / "rlplace/kernels").iterdir()
    }
    for needed in ("agents.search.attempt", "envs.construction.construct", "strategy.executor.kernel.evaluate_packed"):
        assert f"rlplace.{needed}" in kernels


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_works_without_the_repository(installed, tmp_path):
    where = python(
        "-c",
        "import rlplace, rlplace.agents.train as t; print(rlplace.__file__); print(t.__file__)",
        cwd=tmp_path,
        path=installed,
    )
    assert all(line.startswith(str(installed)) for line in where.split())
    # Nothing that simulates: a fresh copy would compile every kernel anew, for minutes. `.ci/release` does that.
    run = ("-m", "rlplace")
    assert "default" in python(*run, "info", cwd=tmp_path, path=installed)
    python(*run, "capture", "zoo:mlp", "--cluster", "a100-80g:2", "--out", "mlp.problem.json", cwd=tmp_path, path=installed)
    assert (tmp_path / "mlp.problem.json").is_file()
    python("-c", "import rlplace; rlplace.load_agent('default')", cwd=tmp_path, path=installed)


@pytest.mark.slow
def test_importing_everything_public_warns_of_nothing(tmp_path):
    python("-W", "error", "-c", "import rlplace", cwd=tmp_path)
    names = ", ".join(name for name in rlplace.__all__ if name != "__version__")
    python("-W", "error::DeprecationWarning:rlplace", "-c", f"from rlplace import {names}", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_a_users_code_is_type_checked(installed, tmp_path):
    """Names that load on first use have their types, and wrong uses are found."""
    (tmp_path / "mine.py").write_text(USERS_CODE)
    check = ("-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports", "mine.py")
    said = python(*check, cwd=tmp_path, rc=1, MYPYPATH=str(installed))
    types = re.findall(r'Revealed type is "([^"]*)"', said)
    found = [name.rpartition(".")[2] for name in types]
    assert found == ["OpGraph", "PlacementPlan", "float | None", "Agent", "Explanation", "Module"]
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert len(errors) == 2 and "[assignment]" in errors[0] and "[arg-type]" in errors[1], said


def test_the_version_is_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == rlplace.__version__
    assert f"\nversion: {rlplace.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    table = (ROOT / "docs" / "design.md").read_text().partition("## Dependencies")[2]
    for line in wanted:
        name = re.match(r"[\w-]+", line)[0]
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", table), f"docs/design.md does not say why {name} is needed"
