"""The house: imports point one way, heavy packages load late, the folders never become top-level imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import rooms of a lower number and itself. Rooms of equal number do not know each other.
LEVEL = {
    "errors": 0,
    "limits": 0,
    "text": 0,
    "files": 1,
    "records": 1,
    "means": 1,
    "interrupts": 1,
    "schedule": 1,
    "actions": 2,
    "extensions": 1,
    "tensors": 2,
    "compiled": 2,
    "problem": 2,
    "graph": 3,
    "cluster": 3,
    "zoo": 4,
    "plan": 4,
    "simulator": 5,
    "cost": 6,
    "planners": 6,
    "strategy": 7,
    "reporting": 7,
    "recipe": 7,
    "measured": 8,
    "placements": 9,
    "envs": 9,
    "runtime": 9,
    "evaluating": 10,
    "timing": 10,
    "branches": 10,
    "agents": 10,
    "checkpoints": 10,
    "placing": 11,
    "comparing": 11,
    "explaining": 11,
    "exporting": 11,
    "integrations": 11,
    "cli": 12,
    "__main__": 13,
}
# Conveniences on records that reach up or aside at call time only, inside a function or for type checkers.
LATE = {("problem", "cluster"), ("reporting", "measured")}


def sources():
    for folder in ("rlplace", "envs", "agents", "checkpoints"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT if folder != "rlplace" else ROOT / "rlplace")
            room = relative.parts[0].removesuffix(".py")
            if room != "__init__":
                yield room, path


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize(("room", "path"), [pytest.param(r, p, id=str(p.relative_to(ROOT))) for r, p in sources()])
def test_imports_point_one_way(room, path):
    for name in imported_modules(path):
        parts = name.split(".")
        assert parts[0] not in ("envs", "agents", "checkpoints"), f"{path} imports {name}: write rlplace.{name}"
        if parts[0] != "rlplace" or len(parts) == 1:
            continue
        target = parts[1]
        if target == room or (room, target) in LATE:
            continue
        assert LEVEL[target] < LEVEL[room], f"{path.relative_to(ROOT)} ({room}) imports {name}: it may only look down"


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import rlplace", "import rlplace.simulator", "from rlplace.cli.main import build_parser; build_parser()"]
)
def test_start_up_loads_nothing_heavy(statement):
    heavy = {"torch", "numba", "scipy", "networkx", "transformers", "stable_baselines3", "pymetis", "pandas", "matplotlib"}
    assert not heavy & loaded_by(statement)


def test_environments_load_what_they_simulate_with():
    numba_alone = "sys.modules['coverage'] = None"  # numba looks for it, and it loads SQLite
    loaded = loaded_by(f"{numba_alone}\nimport rlplace.envs.placement, rlplace.envs.refinement")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("rlplace.")}
    assert "sqlite3" not in loaded
    assert not rooms & {"cost", "graph", "cluster", "measured", "reporting", "runtime", "agents", "zoo"}


def test_folders_are_not_top_level_packages():
    code = "import importlib.util as u; print([n for n in ('envs', 'agents', 'checkpoints') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_public_names_resolve():
    import rlplace

    for name in rlplace.__all__:
        assert getattr(rlplace, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlplace.nothing
