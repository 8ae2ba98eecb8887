"""The page: a template with style, scripts and data, as one text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from rlplace.reporting import sections
from rlplace.reporting.data import ReportData

SCRIPTS = ("base.js", "timeline.js", "memory.js", "tree.js", "graph.js", "main.js")
_SECTIONS = {
    "timeline": "Timeline", "devices": "Devices", "graph": "Graph", "planners": "Planners", "measured": "Measured",
    "about": "About",
}  # fmt: skip


def render(data: ReportData) -> str:
    """The page as one HTML text that loads nothing: a policy in its head forbids every request and all other scripts."""
    from rlplace import __version__

    style = _text("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_text(name) for name in SCRIPTS) + "\n})();\n"
    parts = {
        "summary": sections.summary(data),
        "devices": sections.devices(data),
        "planners": sections.planners(data),
        "measured": sections.measured(data),
        "about": sections.about(data, __version__),
        "title": sections.escape(f"{data.problem.name or 'Plan'} by {data.plan.planner}"),
        "style": style,
        "script": script,
        "data": json_text(data.to_dict()),
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
        ),
    }
    shown = {name: title for name, title in _SECTIONS.items() if parts.get(name, "-")}
    parts["links"] = "".join(f'<a href="#{name}">{title}</a>' for name, title in shown.items())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("page.html"))


def json_text(data: Any) -> str:
    """JSON that is safe inside a script element: no tag can begin or end in it, whatever the names are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return resources.files("rlplace.reporting.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
