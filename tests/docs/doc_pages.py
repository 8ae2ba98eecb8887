"""A run of a page of the documentation: its fenced blocks, in order, in one empty folder.

* ``python``: in one process a page, so that later blocks see earlier names. ``python root``: only where root runs the tests.
* ``bash``: by bash, with errors ending it; a block of nothing but verbs of `rlplace`, also under ``torchrun --nproc-per-node N
  -m``, in forks of this process, where all is imported already. Setting up an environment (`python3 -m venv`) is what CI
  itself does, so such blocks are left out.
* ``console``: commands that need what a test does not have (a GPU, root, several hosts, hours); not run, but every line
  that starts `rlplace` is parsed by the real parser.
* What all pages take for granted (`model`, `example_inputs`, `loader`, `graph`, `problem`) is made by `GIVEN`; an HTML comment
  that starts with ``setup`` holds Python for more, one that starts with ``in tests`` replaces words (``A -> B``, a line each)
  by others that take less time. Readers do not see either.

Anything else (``text``, ``toml``, ``json``) is shown only.

As a program, `python doc_pages.py PAGE FOLDER ...` imports and makes what is given once and forks a process for each page; it
prints a line of JSON a page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "bash")
SHOWN = ("", "text", "toml", "json", "sql", "diff", "{toctree}", "{eval-rst}", "{include}")
GIVEN = """
import os
import gymnasium
import torch
import rlplace
from rlplace.model.zoo import load_model

torch.set_num_threads(1)
loaded = load_model("hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=256", batch=8, seq=16, device="cpu")
model, example_inputs, loader = loaded.module, loaded.example_inputs, [loaded.example_inputs] * 2
graph = rlplace.capture(model, example_inputs)
problem = rlplace.price(graph, "a100-80g:2", groups=24)
problems, inputs = [problem], example_inputs
"""
"""A small model, its batches, and its problem on two devices."""

_HIDDEN = re.compile(r"<!--\s*(setup|in tests)\n(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block or a hidden comment: its language (``setup``, ``in tests`` for comments), text, and line in the page."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Returns all pages, the README first; those that are generated from the code have their own tests."""
    found = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parts[-2] not in ("generated", "_build"))
    return [ROOT / "README.md", *found]


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page in order, those inside lists included."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        line = (token.map or [0])[0] + 1
        if token.type == "fence":
            language, _, needs = token.info.strip().partition(" ")
            if needs != "root" or os.geteuid() == 0:
                found.append(Block(language, token.content, line))
        elif token.type == "html_block" and (match := _HIDDEN.match(token.content)):
            found.append(Block(match[1], match[2], line))
    return found


def commands(block: Block) -> list[list[str]]:
    """Words of the `rlplace` commands of a block, behind launchers such as torchrun too."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for start in range(len(words)):
            if words[start] == "rlplace" and (start == 0 or words[start - 1] in ("-m", "&&", "sudo")):
                rest = words[start + 1 :]
                found.append(rest[: rest.index("&&")] if "&&" in rest else rest)
    return found


def run(page: Path, names: dict[str, object]) -> None:
    """Runs the blocks of a page in this process and folder.

    Raises:
        Exception: Whatever a Python block raises, or `CalledProcessError` of a bash block.
    """
    found = blocks(page)
    hidden = "\n".join(block.text for block in found if block.language == "in tests")
    shorter = [line.split(" -> ") for line in hidden.splitlines() if line]
    for block in found:
        text = block.text
        for old, new in shorter:
            text = text.replace(old, new)
        if block.language in ("python", "setup"):
            padding = "\n" * block.line  # so that tracebacks have the line of the page
            exec(compile(padding + text, str(page), "exec"), names)
        elif block.language == "bash" and not text.startswith("python3 -m venv"):
            print(f"+ {page.relative_to(ROOT)}:{block.line}", flush=True)
            lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
            verbs = [verb_of(words) for words in lines]
            if None not in verbs and not in_a_job():
                for processes, words in verbs:
                    run_verb(processes, words)
            else:
                subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)


def in_a_job() -> bool:
    """Says whether the page has made this process a job of its own, which forks would inherit."""
    return "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()


def verb_of(words: list[str]) -> tuple[int, list[str]] | None:
    """Counts how many processes run a verb of `rlplace`, and its words; None of another command."""
    if {"&&", "|", ">"} & {*words}:
        return None
    if words[:2] == ["torchrun", "--nproc-per-node"] and words[3:5] == ["-m", "rlplace"]:
        return int(words[2]), words[5:]
    return (1, words[1:]) if words[:1] == ["rlplace"] else None


def run_verb(processes: int, words: list[str]) -> None:
    """Runs `rlplace` with these words in forks of this process.

    Raises:
        CalledProcessError: One did not end with 0.
    """
    from rlplace.cli.main import main as rlplace_main
    from tests.runtime.job.launch import become_rank, own_store

    store, children = own_store() if processes > 1 else None, []
    for rank in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                if store is not None:
                    become_rank(rank, processes, store.port)
                code = rlplace_main(words)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise subprocess.CalledProcessError(next(filter(None, codes)), ["rlplace", *words])


def main(arguments: list[str]) -> None:
    """Forks a process for every PAGE FOLDER pair and says how it ended."""
    names: dict[str, object] = {"__name__": "__page__"}
    sys.path.append(str(ROOT))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    exec(compile(GIVEN, "given", "exec"), names)
    for page, folder in zip(map(Path, arguments[::2]), map(Path, arguments[1::2]), strict=True):
        for name in ("examples", "benchmarks", "tools"):
            (folder / name).symlink_to(ROOT / name)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.chdir(folder)
                sys.path.insert(0, str(folder))
                output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                try:
                    run(page, names)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"page": str(page), "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
