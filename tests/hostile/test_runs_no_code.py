"""Code of others runs in one place alone, `module:function`, which says so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rlplace.errors import InputError
from rlplace.model.zoo import load_model
from rlplace.model.zoo.functions import runs_code

ROOT = Path(__file__).parents[2]

# What may run code or make any object, by name, and the files that may name it, with the reason why that is safe.
ALLOWED = {
    "pickle": {
        "rlplace/runtime/state/untrusted.py",  # lets named classes through, and nothing else
        "rlplace/cli/capture_cache.py",  # files that this user alone can write, on this machine
    },
    "importlib": {
        "rlplace/model/zoo/functions.py",  # module:function
        "rlplace/__init__.py",  # names of a literal table
        "rlplace/plugins.py",  # entry points of installed packages
        "rlplace/explanation/report/report.py",  # importlib.resources
        "rlplace/cli/capture_cache.py",  # versions
        "rlplace/placement/__init__.py",  # names of a literal table
        "rlplace/placement/search.py",
        "rlplace/model/capture/whole_ops.py",  # names of a literal table
        "rlplace/runtime/strategy/why_not.py",  # importlib.metadata
        "agents/checkpoint.py",  # importlib.resources
        "agents/config.py",
        "agents/compile_ahead.py",  # names of a literal table
        "agents/problems/sources.py",  # importlib.metadata
        "agents/problems/splits.py",
    },
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
    "cloudpickle": set(),
    "joblib": set(),
    "yaml": set(),
    "runpy": set(),
    "code": set(),
    "codeop": set(),
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
_MODULES, _CALLS = "|".join(ALLOWED), "|".join(CALLS)
WORDS = re.compile(
    rf"import[^\n]*\b({_MODULES})\b|from ({_MODULES})\b|(?<![\w.])({_CALLS})\(|builtins|\b(torch|np|numpy|hub|jit)\.load\b|"
    r"allow_pickle|shell=|os\.(system|popen)|import_module|spec_from"
)


@cache
def sources():
    """Returns name and tree of each file that has one of the words at all: to parse all would take seconds."""
    files = [path for folder in ("rlplace", "agents", "envs", "checkpoints") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    return [(name, ast.parse(text)) for name, text in texts.items() if WORDS.search(text)]


def dotted(node):
    """Returns ``a.b.c`` of nested attributes; what is no name stands as a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(name, tree):
    """Says what in a file may run code of others: (line, what)."""
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            root = module.partition(".")[0]
            if root in ALLOWED and name not in ALLOWED[root]:
                yield node.lineno, f"import {module}"
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        given = {k.arg: str(k.value.value) for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called in CALLS or called.startswith("builtins."):
            yield node.lineno, called
        if called in ("torch.load", "np.load", "numpy.load", "hub.load", "torch.hub.load", "torch.jit.load"):
            safe = given.get("weights_only") == "True" or (called.endswith("np.load") and given.get("allow_pickle") == "False")
            if not safe:
                yield node.lineno, called
        if given.get("allow_pickle") == "True" or given.get("shell") == "True" or called in ("os.system", "os.popen"):
            yield node.lineno, called


def test_the_sources_run_no_code_of_others():
    found = [f"{name}:{line}: {what}" for name, tree in sources() for line, what in findings(name, tree)]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "eval(x)", "exec(x)", "torch.load(p)", "torch.load(p, weights_only=False)",
        "np.load(p)", "np.load(p, allow_pickle=True)", "import yaml", "import importlib", "from importlib import import_module",
        "__import__(x)", "subprocess.run(x, shell=True)", "os.system(x)",
    ],
)  # fmt: skip
def test_what_is_looked_for_is_found(text):
    assert WORDS.search(text)
    assert list(findings("rlplace/other.py", ast.parse(text)))


def test_names_of_modules_come_from_tables_but_in_one_place():
    """`import_module` takes a text that is not written beside it only where the text is a MODEL or from a literal table."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "spec_from_file_location")):
                assert name in ALLOWED["importlib"], f"{name}:{node.lineno}"


def test_a_model_text_says_whether_it_runs_code():
    for text, runs in {
        "hf:gpt2": False,
        "zoo:mlp,width=8": False,
        "a.b:f": True,
        "a.py:f,x=1": True,
        "zoo": False,
        "": False,
    }.items():
        assert runs_code(text) is runs
    assert "runs code" in load_model.__doc__


@pytest.mark.parametrize(
    "text", ["os:system,command=exit", "builtins:exec", "subprocess:run", "torch.hub:load,repo_or_dir=x", "numpy:load,file=x"]
)
def test_functions_that_build_no_model_are_not_called(text):
    """Options of a plan that somebody sent are no arguments for functions that may do anything."""
    with pytest.raises(InputError, match="holds no function that returns a model"):
        load_model(text)


def test_a_plan_that_names_code_is_announced(tmp_path, monkeypatch, capsys, seeds):
    from rlplace.plan import PlacementPlan
    from rlplace.planned import Planned

    (tmp_path / "theirs.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    text = (seeds / "sourced.plan.json").read_text().replace("zoo:mlp", "theirs.py:make")
    (tmp_path / "x.plan.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    Planned(PlacementPlan.load("x.plan.json")).recipe.build("cpu", 0)
    assert capsys.readouterr().err == "running code of this machine that the plan names: 'theirs.py:make'\n"


@pytest.mark.parametrize("verb", ["place", "capture", "measure"])
def test_the_help_says_so(verb, capsys):
    from rlplace.cli.main import main

    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "runs that code" in " ".join(capsys.readouterr().out.split())
