"""Sphinx configuration: `pip install -e ".[docs]"`, then `sphinx-build -W docs docs/_build`."""

import sys
from pathlib import Path

import rlplace

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "rlplace"
author = "The rlplace authors"
copyright = "The rlplace authors, Apache-2.0"
version = release = rlplace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "generated_pages"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext", "generated/verbs.md", "generated/format_*.md"]
default_role = "literal"  # docstrings write `name`
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages, such as examples

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "rlplace"
html_theme_options = {"source_repository": "", "footer_icons": []}
copybutton_prompt_text = "$ "
