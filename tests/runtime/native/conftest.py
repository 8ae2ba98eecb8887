"""The launcher of tests/runtime/distributed, and this folder's own helpers."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "distributed")]
