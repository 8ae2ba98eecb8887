"""Pages that are made from the code before Sphinx reads the sources: an environment each, the command line, file formats."""

import argparse
import inspect
from pathlib import Path

import format_tables

from rlplace.cli.main import build_parser
from rlplace.envs import PlacementEnv, RefinementEnv

_ENVIRONMENTS = {"refinement": ("rlplace/Refinement-v0", RefinementEnv), "placement": ("rlplace/Placement-v0", PlacementEnv)}


def write_pages(app):
    """Writes everything below `generated/`; what has not changed is left alone, so that it is not built again."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": _environment(*found) for name, found in _ENVIRONMENTS.items()}
    pages |= {"verbs.md": _verbs(), **format_tables.pages()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _environment(identifier, environment):
    """Writes the docstring of the class: its headings are the same for all environments, as in gymnasium's documentation."""
    return f'# {identifier}\n\n`gymnasium.make("{identifier}", problems=[...])`\n\n{inspect.getdoc(environment)}\n'


def _verbs():
    """Writes the output of `rlplace VERB --help`, a section a verb."""
    (verbs,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    sections = [f"## rlplace {name}\n\n```text\n{verb.format_help().rstrip()}\n```\n" for name, verb in verbs.choices.items()]
    return "\n".join(sections)


def setup(app):
    """Connects the writer to Sphinx, which calls this."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
