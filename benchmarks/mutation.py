"""Mutation testing of the simulator and of everything that counts memory.

    python -m benchmarks.mutation --out mutants.jsonl --each 4        goes on where it stopped
    python -m benchmarks.mutation --out mutants.jsonl --report        only the table and the survivors

A mutant is a file with one operator, number or statement changed. The quick tests of its room run against it, as those of
`benchmarks.faults` do; a mutant that they do not notice has survived, and is a hole in the tests unless it means the same as
the original. Some mutants a file are drawn by seed: one takes seconds, one of a compiled file some minutes.
"""

from __future__ import annotations

import ast
import random
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.faults import ROOT, SURVIVED, copy_of, run_tests
from benchmarks.harness import add_row, arguments, markdown, read_rows, timed

_SIMULATOR = ["tests/simulator", "tests/test_actions.py"]
_MEMORY = [f"tests/cost/test_{name}.py" for name in ("memory_real", "memory_allocator", "memory_footprint")]
_REPAIR = ["tests/placement/test_repair.py", "tests/placement/test_shortage.py"]
TARGETS = {
    "rlplace/plan/actions.py": _SIMULATOR,
    **{str(path.relative_to(ROOT)): _SIMULATOR for path in sorted((ROOT / "rlplace/simulator").glob("[!_]*.py"))},
    **{f"rlplace/cost/{name}.py": _MEMORY for name in ("lifetimes", "footprint", "allocator", "allocator_heap")},
    "envs/instance.py": ["tests/envs"],
    "rlplace/placement/common/repair.py": _REPAIR,
    "rlplace/placement/common/shortage.py": _REPAIR[1:],
}
"""Files and the tests that should notice."""

_COMPARE = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
_ARITHMETIC = [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.And, ast.Or)]
_OTHER = {a: b for pair in (*_COMPARE, *_ARITHMETIC) for a, b in (pair, pair[::-1])}
_OTHER |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


class Mutator(ast.NodeTransformer):
    """Numbers the places that can be changed, (line, words) each, and makes the chosen change."""

    def __init__(self, chosen: int | None = None) -> None:
        self.chosen = chosen
        self.found: list[tuple[int, str]] = []

    def visit(self, node: ast.AST) -> ast.AST:
        # What a change cannot show in: messages of errors, annotations, decorators.
        if isinstance(node, (ast.Raise, ast.arg, ast.JoinedStr)):
            return node
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.value = self.visit(node.value)
            return node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            node.body = [self.visit(line) for line in node.body]
            return node
        for at, operator in enumerate(getattr(node, "ops", [])):
            if self._here(node, f"{type(operator).__name__} -> {_OTHER[type(operator)].__name__}"):
                node.ops[at] = _OTHER[type(operator)]()
        if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _OTHER and not _is_text(node):
            if self._here(node, f"{type(node.op).__name__} -> {_OTHER[type(node.op)].__name__}"):
                node.op = _OTHER[type(node.op)]()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            if self._here(node, f"{type(node.op).__name__} left out"):
                return self.visit(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            return ast.Constant(other) if self._here(node, f"{node.value} -> {other}") else node
        called = getattr(node, "func", None)
        name = getattr(called, "id", getattr(called, "attr", ""))
        if name in _CALLS and self._here(node, f"{name} -> {_CALLS[name]}"):
            setattr(called, "id" if isinstance(called, ast.Name) else "attr", _CALLS[name])
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if called or isinstance(node, (ast.AugAssign, ast.Continue)):
            if self._here(node, "statement left out"):
                return ast.Pass()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            return node
        return self.generic_visit(node)

    def _here(self, node: ast.AST, words: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), words))
        return len(self.found) - 1 == self.chosen


def _is_text(node: ast.BinOp | ast.BoolOp) -> bool:
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def places(source: str) -> list[tuple[int, str]]:
    """Lists all changes of a file in order: line and words."""
    walk = Mutator()
    walk.visit(ast.parse(source))
    return walk.found


def mutated(source: str, number: int) -> str:
    """Makes one of the changes of a file."""
    return ast.unparse(ast.fix_missing_locations(Mutator(number).visit(ast.parse(source))))


def try_mutant(file: str, number: int) -> tuple[str, str]:
    """Runs the tests of a file in a copy of the checkout that has one of its changes."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_of(folder)
        (copy / file).write_text(mutated((ROOT / file).read_text(), number))
        return run_tests(copy, TARGETS[file])


def main() -> None:
    """Tries mutants that have no row, and prints the table and the survivors."""
    options = arguments(
        __doc__,
        out=(Path("mutants.jsonl"), "a line of JSON a mutant (mutants.jsonl)"),
        each=(12, "mutants of a file (12)"),
        seed=(0, "of the draw (0)"),
        files=(tuple(TARGETS), "files to change", TARGETS),
        report="only the table",
    )
    known = {(row["file"], row["number"]) for row in read_rows(options.out)}
    for file in () if options.report else options.files:
        found = places((ROOT / file).read_text())
        for number in random.Random(f"{options.seed} {file}").sample(range(len(found)), min(options.each, len(found))):
            if (file, number) not in known:
                (result, by), seconds = timed(lambda file=file, number=number: try_mutant(file, number))
                line, words = found[number]
                row = {"file": file, "number": number, "line": line, "what": words, "of": len(found)}
                add_row(options.out, {**row, "result": result, "by": by[:160], "seconds": round(seconds, 1)})
    rows = read_rows(options.out)
    files = defaultdict(list)
    for row in rows:
        files[row["file"]].append(row["result"] == SURVIVED)
    of = {row["file"]: row["of"] for row in rows}
    table = [[f"`{file}`", of[file], len(lost), len(lost) - sum(lost), sum(lost)] for file, lost in files.items()]
    print(markdown(["file", "places", "tried", "noticed", "survived"], table))
    for row in rows:
        if row["result"] == SURVIVED:
            print(f"- {row['file']}:{row['line']} {row['what']}")


if __name__ == "__main__":
    main()
