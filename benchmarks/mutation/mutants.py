"""Small wrong versions of a source file: one changed operator, number or missing statement each."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        number: Number of the change in its file.
        line: Where.
        what: The change in words.
    """

    number: int
    line: int
    what: str


class _Walk(ast.NodeTransformer):
    """Numbers the places that can be changed, and changes one of them."""

    def __init__(self, chosen: int | None = None) -> None:
        self.chosen = chosen
        self.found: list[Mutant] = []

    def _here(self, node: ast.AST, what: str) -> bool:
        number = len(self.found)
        self.found.append(Mutant(number, getattr(node, "lineno", 0), what))
        return number == self.chosen

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for place, operator in enumerate(node.ops):
            other = _COMPARE[type(operator)]
            if self._here(node, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[place] = other()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if (other := _ARITHMETIC.get(type(node.op))) and not _is_text(node):
            if self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
                node.op = other()
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if self._here(node, "statement left out"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._here(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, (ast.Not, ast.USub)) and self._here(node, f"{type(node.op).__name__} left out"):
            return self.visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._here(node, f"{node.value} -> {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, (int, float)) and self._here(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in _CALLS and self._here(node, f"{name} -> {_CALLS[name]}"):
            if isinstance(node.func, ast.Name):
                node.func.id = _CALLS[name]
            elif isinstance(node.func, ast.Attribute):
                node.func.attr = _CALLS[name]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._here(node, "statement left out"):
            return ast.copy_location(ast.Pass(), node)
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self._here(node, "continue left out") else node

    # What a change cannot show in: annotations, messages of errors, decorators.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.args = self.visit(node.args)
        node.body = [self.visit(line) for line in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(line) for line in node.body]
        return node


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
               for part in (node.left, node.right))  # fmt: skip


def mutants(source: str) -> list[Mutant]:
    """All changes of a file, in order."""
    walk = _Walk()
    walk.visit(ast.parse(source))
    return walk.found


def mutated(source: str, number: int) -> ast.Module:
    """The file with one of its changes made."""
    tree = _Walk(number).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)
