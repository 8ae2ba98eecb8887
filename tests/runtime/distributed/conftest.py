"""Lets the tests of this folder, and the processes they start, import the helpers beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
