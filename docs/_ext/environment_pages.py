"""A page for each environment, from the docstring of its class: the headings are the same for all, as in gymnasium's own docs."""

import inspect
from pathlib import Path

from rlplace.envs import PlacementEnv, RefinementEnv

_PAGES = {"refinement": ("rlplace/Refinement-v0", RefinementEnv), "placement": ("rlplace/Placement-v0", PlacementEnv)}


def write_pages(app):
    """Writes the pages below `environments/` before Sphinx reads the sources."""
    folder = Path(app.srcdir) / "environments"
    folder.mkdir(exist_ok=True)
    for name, (identifier, environment) in _PAGES.items():
        text = f"# {identifier}\n\n`gymnasium.make(\"{identifier}\", problems=[...])`\n\n{inspect.getdoc(environment)}\n"
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)


def setup(app):
    """Sphinx calls this."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
