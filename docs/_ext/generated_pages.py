"""Pages that are made from the code before Sphinx reads the sources: an environment each, the command line, file formats."""

import argparse
import inspect
from pathlib import Path

import format_tables

from rlplace.cli.main import build_parser
from rlplace.cluster.presets import KINDS, SOURCES
from rlplace.envs import PlacementEnv, RefinementEnv

_ENVIRONMENTS = {"refinement": ("rlplace/Refinement-v0", RefinementEnv), "placement": ("rlplace/Placement-v0", PlacementEnv)}


def write_pages(app):
    """Writes everything below `generated/`; what has not changed is left alone, so that it is not built again."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": _environment(*found) for name, found in _ENVIRONMENTS.items()}
    pages |= {"verbs.md": _verbs(), "presets.md": presets(), **format_tables.pages()}
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


def presets():
    """Writes the table of device kinds: numbers of the presets, and what they rest on."""
    lines = [
        "| preset | bf16, fp32 TFLOP/s | memory GB, GB/s | link GB/s | datasheet; products; links |",
        "|---|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        half = kind.peak_flops.get("bfloat16")
        peaks = f"{'-' if half is None else f'{half / 1e12:.4g}'}, {kind.peak_flops['float32'] / 1e12:.4g}"
        memory = f"{kind.memory_bytes / 1e9:.4g}, {kind.memory_bandwidth_bytes_per_s / 1e9:.4g}"
        copies = "" if kind.pcie_peer else " staged"
        pcie = "copies in memory" if kind.host_processor else f"PCIe {kind.pcie_generation}{copies}"
        link = f"{kind.nvlink} {kind.nvlink_bytes_per_s / 1e9:.4g}" if kind.nvlink else pcie
        source = SOURCES[name]
        lines.append(f"| `{name}` | {peaks} | {memory} | {link} | {source.datasheet}; {source.products}; {source.links} |")
    return "\n".join(lines) + "\n"


def setup(app):
    """Connects the writer to Sphinx, which calls this."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
