"""What users write: public names with their signatures, verbs with their options. A change of one is a change of its file."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import rlplace
from rlplace.cli.main import build_parser

FILE = Path(__file__).parent / "golden" / "public.json"


def signature(value: Any) -> str:
    try:
        return re.sub(r"rlplace\.[\w.]+\.", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__


def options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted("/".join(action.option_strings) or action.dest for action in parser._actions)


def public() -> dict[str, Any]:
    verbs = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        "names": {name: signature(getattr(rlplace, name)) for name in sorted(rlplace.__all__) if name != "__version__"},
        "verbs": {name: options(parser) for name, parser in sorted(verbs.choices.items())},
    }


@pytest.mark.parametrize("part", ["names", "verbs"])
def test_public_surface(part):
    found = public()
    if os.environ.get("RLPLACE_WRITE_PUBLIC"):
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    assert found[part] == json.loads(FILE.read_text())[part], f"write {FILE.name} anew with RLPLACE_WRITE_PUBLIC=1 if meant"
