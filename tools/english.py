"""Checks the English of docstrings, messages and pages: verbs first, and none of the phrases that are read twice.

``python tools/english.py [PATH ...]`` prints one line a finding and exits with 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("rlplace", "envs", "agents", "checkpoints", "docs", "README.md", "CHANGELOG.md")

PHRASES = {
    r"\bnobody\b": "say what is missing, or None",
    r"\bwithout a word\b": "silently",
    r"\b(is|are|was|were|been) told\b|\btold (apart|of|by|about)\b": "given, specified, known",
    r"\bthe same of\b": "name the thing",
    r"\b(the|an)other ones?\b(?! (of|is|are|in))": "name the thing",
    r"\bfrom which everything\b": "the others have defaults built on it",
    r"\bgoes by\b|\bgo by\b": "passes, takes",
    r"\bhands? (it )?(on|over)\b|\bhanded (on|over)\b|\bhand-?overs?\b": "sends; stage transfer",
    r"\bgoes back\b|\bgoing back\b": "runs the backward",
    r"\bstands? for\b|\bstood for\b": "represents",
    r"\blook(s|ed|ing)? at again\b": "analysed again",
    r"\bin good order\b": "cleanly",
    r"\bdealt out\b|\bdeals? out\b": "split, sharded",
    r"\btells? each other\b": "exchange, communicate",
    r"\bthe most that\b": "peak, maximum",
    r"\ball else\b": "all other fields",
    r"\bis none of\b": "is not in",
    r"\bwhat else\b": "which other",
}
"""Phrases that are read twice, as patterns, and what to write instead."""

NOUNS = set(
    """
    actions always arguments arrays assignments axes bands bias buffers bytes candidates channels choices classes
    coefficients collectives constants cores curves devices digests dimensions drafts edges entries epochs episodes
    errors factors figures flops gradients heuristics hops ids indices inputs its kernels kinds lanes lines logits
    losses micro-batches milliseconds modules neighbours nets nodes numbers offsets ops options outputs parameters parts
    paths planners positions prefixes processes readers reasons representatives rows seconds sentences shapes sizes
    something stages storages successors temporaries tensors texts this ticks tokens torch's types units values versions
    waves ways weights
    """.split()
)
"""Words in -s that are no verbs, though a docstring of a function has begun with them."""

NOT_NOUNS = {"what", "whether", "why", "how", "where", "when", "says", "makes", "runs", "as", "those", "all"}
"""First words that do not begin the noun phrase of a class, a property or a module."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind and text of every docstring; kinds are "verb" and "noun"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            attribute = any("property" in name or name.endswith(".setter") for name in decorators)
            test = function and node.name.startswith(("test_", "__"))
            yield getattr(node, "lineno", 1), "any" if test else "verb" if function and not attribute else "noun", text
    for body in (node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)):
        for node in body[1:]:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.lineno, "any", node.value.value


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of every string that is no docstring."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
            and " " in node.value
        ):
            yield node.lineno, node.value


def phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yields offset in lines and complaint of every phrase of `PHRASES` in a text."""
    flat = text.replace("\n", " ")
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, flat, re.IGNORECASE):
            yield text.count("\n", 0, found.start()), f'"{found.group()}": {better}'


def first_word(kind: str, text: str) -> str | None:
    """Returns a complaint about the first word of a docstring, or None."""
    word = re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0]
    if kind == "verb" and (not re.fullmatch(r"[a-z-]+s", word.lower()) or word.lower() in NOUNS):
        return f'"{word}": the docstring of a function starts with a verb in the third person'
    if kind == "noun" and word.lower() in NOT_NOUNS:
        return f'"{word}": the docstring of a class, property or module starts with a noun phrase'
    return None


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and complaint of everything to mend in a file."""
    text = path.read_text()
    if path.suffix != ".py":
        prose = re.sub(r"```.*?```|`[^`\n]*`", lambda code: "\n" * code.group().count("\n"), text, flags=re.DOTALL)
        yield from ((line + 1, complaint) for line, complaint in phrases(prose))
        return
    tree = ast.parse(text)
    for line, kind, docstring in docstrings(tree):
        if complaint := first_word(kind, docstring):
            yield line, complaint
        yield from ((line + offset, complaint) for offset, complaint in phrases(docstring))
    for line, message in messages(tree):
        yield from ((line + offset, complaint) for offset, complaint in phrases(message))


def main(arguments: list[str]) -> int:
    """Prints the findings of files and folders; returns 1 if there is one."""
    roots = [Path(name) if Path(name).exists() else ROOT / name for name in arguments or PATHS]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    lines = [
        f"{file}:{line}: {complaint}" for file in files if file.suffix in (".py", ".md") for line, complaint in findings(file)
    ]
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
