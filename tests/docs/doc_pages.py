"""Runs what a page of the documentation says: its fenced blocks, in order, in one empty folder.

* ``python``: in one interpreter a page, so that later blocks see earlier names.
* ``bash``: by bash, with errors ending it.
  Setting up an environment (`python3 -m venv`) is what CI itself does, so such blocks are left out.
* ``console``: commands that need what a test does not have (a GPU, root, several hosts, hours); not run, but every line
  that starts `rlplace` is parsed by the real parser.
* What all pages take for granted (`model`, `example_inputs`, `loader`, `graph`, `problem`) is made by `GIVEN`; an HTML comment
  that starts with ``setup`` holds Python for more. Readers do not see either.

Anything else (``text``, ``toml``, ``json``) is shown only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "bash")
SHOWN = ("", "text", "toml", "json", "ini", "{toctree}", "{eval-rst}")
GIVEN = """
import os
import gymnasium
import torch
import rlplace
from rlplace.zoo import load_model

torch.set_num_threads(1)
loaded = load_model("hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=256", batch=8, seq=16, device="cpu")
model, example_inputs, loader = loaded.module, loaded.example_inputs, [loaded.example_inputs] * 2
graph = rlplace.capture(model, example_inputs)
problem = rlplace.price(graph, "a100-80g:2", groups=24)
problems, inputs = [problem], example_inputs
"""
"""A small model, its batches, and its problem on two devices."""

_SETUP = re.compile(r"<!--\s*setup\n(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language (``setup`` for hidden Python), text, and line in the page."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """All pages, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, those inside lists included."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        line = (token.map or [0])[0] + 1
        if token.type == "fence":
            found.append(Block(token.info.strip().partition(" ")[0], token.content, line))
        elif token.type == "html_block" and (match := _SETUP.match(token.content)):
            found.append(Block("setup", match[1], line))
    return found


def program(page: Path) -> str:
    """One Python program that runs all blocks of a page; errors name the page's own lines."""
    found = blocks(page)
    lines = ["import subprocess as _subprocess"]
    if any(block.language == "python" for block in found):
        lines.append(GIVEN)
    for block in found:
        name = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language in ("python", "setup"):
            padded = "\n" * block.line + block.text  # so that tracebacks have the line of the page
            lines.append(f"exec(compile({padded!r}, {str(page)!r}, 'exec'), globals())")
        elif block.language == "bash" and not block.text.startswith("python3 -m venv"):
            lines.append(f"print('+ {name}', flush=True)")
            lines.append(f"_subprocess.run(['bash', '-euo', 'pipefail', '-c', {block.text!r}], check=True)")
    return "\n".join(lines)


def run_page(page: Path, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a page in a folder that shows the repository's examples and benchmarks beside what the page makes."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(
        [sys.executable, "-c", program(page)], cwd=folder, env=environment, timeout=timeout_s, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


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
