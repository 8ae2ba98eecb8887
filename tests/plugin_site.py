"""Installs packages with entry points into a folder, without pip: what an installer leaves there is a module and metadata."""

import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def install(folder, name, module, text, entry_points, version="1.0"):
    """Writes a module and the metadata of its distribution; `entry_points` is {group: {name: value}}."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_example(folder, name="plugin"):
    """A package of examples/."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    text = (EXAMPLES / name / f"{module}.py").read_text()
    install(folder, project["name"], module, text, project["entry-points"], project["version"])
