"""The documentation does what it says: every block runs, every command parses, every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from rlplace.cli.main import build_parser
from tests.docs import doc_pages as pages

PAGES = {str(page.relative_to(pages.ROOT)): page for page in pages.pages()}
RUNNABLE = [name for name, page in PAGES.items() if any(block.language in pages.RUN for block in pages.blocks(page))]
FIRST = ("README.md", "docs/quickstart.md")
"""What people try first: run in CI; all others before a release."""
PARTS = 6


def started(name):
    """Counts how many programs a page starts: what it costs."""
    return sum(len(block.text.splitlines()) for block in pages.blocks(PAGES[name]) if block.language == "bash")


@pytest.mark.parametrize("name", PAGES)
def test_blocks_have_a_known_language_and_commands_parse(name):
    for block in pages.blocks(PAGES[name]):
        where = f"{name}:{block.line}"
        assert block.language in (*pages.RUN, *pages.SHOWN, "console", "setup", "in tests"), f"{where}: {block.language}"
        for words in pages.commands(block) if block.language in ("bash", "console") else ():
            try:
                build_parser().parse_args([word for word in words if word != "..."])
            except SystemExit as end:
                assert end.code == 0, f"{where}: rlplace {' '.join(words)}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name):
    page = PAGES[name]
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name}: {target}"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["first", *(pytest.param(part, marks=pytest.mark.long) for part in range(PARTS))])
def test_pages_run(part, tmp_path):
    """A process for several pages, as importing torch takes longer than most of them."""
    others = sorted((name for name in RUNNABLE if name not in FIRST), key=started)
    names, words = [name for name in RUNNABLE if name in FIRST] if part == "first" else others[part::PARTS], []
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        folder.mkdir()
        words += [str(PAGES[name]), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, pages.__file__, *words]
    done = subprocess.run(command, env=environment, timeout=1800, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    codes = [json.loads(line)["code"] for line in done.stdout.splitlines() if line.startswith('{"page"')]
    failed = [
        f"{name} ({code}):\n{(tmp_path / str(number) / 'output.txt').read_text()[-6000:]}"
        for number, (name, code) in enumerate(zip(names, codes, strict=True))
        if code
    ]
    assert not failed, "\n".join(failed)
