"""pytest plugin: loads one module in a changed version, named by the environment variable MUTANT (FILE:NUMBER)."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from benchmarks.mutation.mutants import mutated

_file, _, _number = os.environ["MUTANT"].rpartition(":")
FILE, NUMBER = str(Path(_file).resolve()), int(_number)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # never from a cache
        text = Path(FILE).read_text()
        return compile(mutated(text, NUMBER), FILE, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or str(Path(spec.origin).resolve()) != FILE:
            return None
        spec.loader = _Loader(name, FILE)
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
