"""The launcher of tests/runtime/distributed and the strategies of tests/runtime/native."""

import sys
from pathlib import Path

runtime = Path(__file__).parent.parent / "runtime"
sys.path[:0] = [str(Path(__file__).parent), str(runtime / "native"), str(runtime / "distributed")]
