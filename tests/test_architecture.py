"""The house: imports point one way, heavy packages load late, the folders never become top-level imports."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Rooms from the bottom up, on the way of the data. A room may import rooms of a lower line and itself; rooms of one line do not
# know each other. Rooms with a dot are parts of a larger one.
ORDER = """
errors limits text memoized stats interrupts budget arrays
files records plugins
lines
compiled
cluster
problem
plan
model.torch_adapter model.aten
model.graph
model.axes
model.capture model
model.zoo
simulator
cost
placement.common
placement
strategy
strategy.layouts strategy.executor
strategy.blocks
strategy.op_level
strategy.search
runtime.torch_adapter
runtime.base
runtime.state
runtime.strategy runtime.placement
captured
planned
runtime.job runtime
measure
explanation.report
explanation.timeline
envs
agents checkpoints
api
explanation runtime.export integrations
explanation.compare
cli
__main__
"""
LEVEL = {room: level for level, rooms in enumerate(ORDER.split("\n")) for room in rooms.split()}

# Modules inside of a room, from the bottom up.
INSIDE = {
    "runtime.base": "environment ranks activity batches steps faults model turns optimizers",
    "runtime.placement": "forward_graph joint_graph assign wire emit placed_model apply",
}


def room_of(module):
    """Room of a module below `rlplace`, by the longest name in `ORDER`."""
    parts = module.split(".")
    return next(".".join(parts[:count]) for count in (2, 1) if ".".join(parts[:count]) in LEVEL)


def sources():
    for folder in ("rlplace", "envs", "agents", "checkpoints"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT if folder != "rlplace" else ROOT / "rlplace").with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            if name != "__init__":
                yield room_of(name), path


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.slow
@pytest.mark.parametrize(("room", "path"), [pytest.param(r, p, id=str(p.relative_to(ROOT))) for r, p in sources()])
def test_imports_point_one_way(room, path):
    for name in imported_modules(path):
        parts = name.split(".")
        assert parts[0] not in ("envs", "agents", "checkpoints"), f"{path} imports {name}: write rlplace.{name}"
        if parts[0] != "rlplace" or len(parts) == 1:
            continue
        target = room_of(name.removeprefix("rlplace."))
        if target != room:
            assert LEVEL[target] < LEVEL[room], f"{path.relative_to(ROOT)} ({room}) imports {name}: it may only look down"


@pytest.mark.parametrize("room", INSIDE)
def test_modules_of_a_room_import_one_way(room):
    order = INSIDE[room].split()
    folder = ROOT / "rlplace" / room.replace(".", "/")
    assert sorted(path.stem for path in folder.glob("*.py")) == sorted(["__init__", *order])
    for name in order:
        text = (folder / f"{name}.py").read_text()
        later = order[order.index(name) :]
        assert not [other for other in later if re.search(rf"{room}(\.| import (\w+, )*){other}\b", text)], name


@functools.cache
def nodes():
    return [(path, node) for _, path in sources() for node in ast.walk(ast.parse(path.read_text()))]


def definitions(kind):
    return [(path, node) for path, node in nodes() if isinstance(node, kind)]


@pytest.mark.slow
def test_no_two_classes_have_one_name():
    places = {}
    for path, node in definitions(ast.ClassDef):
        places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_functions_take_at_most_eight_arguments_by_position():
    """Kernels take named tuples of arrays, other functions a record.

    Torch's schema of an operator lists the arguments of the selective scan; the simulator's innermost loop would lose time.
    """
    bound = {"selective_scan", "selective_scan_backward", "scan", "_scan", "_", "join_queues"}
    for path, node in definitions(ast.FunctionDef):
        named = [item.arg for item in [*node.args.posonlyargs, *node.args.args] if item.arg not in ("self", "cls")]
        assert len(named) <= 8 or node.name in bound, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {len(named)}"


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


def test_notes_of_an_answer_load_no_runtime():
    """The last thing that an answer waits for: importing torch's parallelism takes a second or two."""
    assert "torch" not in loaded_by("import rlplace.runtime.strategy.notes")


def test_environments_load_what_they_simulate_with():
    numba_alone = "sys.modules['coverage'] = None"  # numba looks for it, and it loads SQLite
    loaded = loaded_by(f"{numba_alone}\nimport rlplace.envs.placement, rlplace.envs.refinement")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("rlplace.")}
    assert "sqlite3" not in loaded
    assert not rooms & {"cost", "model", "measure", "explanation", "runtime", "agents"}


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
