"""The documentation does what it says: every block runs, every command parses, every link leads somewhere."""

from __future__ import annotations

import re

import doc_pages as pages
import pytest

from rlplace.cli.main import build_parser

PAGES = {str(page.relative_to(pages.ROOT)): page for page in pages.pages()}
RUNNABLE = [name for name, page in PAGES.items() if any(block.language in pages.RUN for block in pages.blocks(page))]


@pytest.mark.parametrize("name", PAGES)
def test_blocks_have_a_known_language_and_commands_parse(name):
    for block in pages.blocks(PAGES[name]):
        where = f"{name}:{block.line}"
        assert block.language in (*pages.RUN, *pages.SHOWN, "console", "setup"), f"{where}: {block.language}"
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
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_page_runs(name, tmp_path):
    done = pages.run_page(PAGES[name], tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout[-3000:]
