"""rlplace: a reinforcement-learning device placer for PyTorch.

Public names are loaded on first use, so that ``import rlplace`` stays quick; importing the package registers the gymnasium
environments ``rlplace/Placement-v0`` and ``rlplace/Refinement-v0``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# A plain checkout keeps envs/, agents/ and checkpoints/ beside this package; an installed wheel holds them inside it, and
# there this changes nothing.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "envs" / "__init__.py").is_file():
    __path__.append(str(_root))
