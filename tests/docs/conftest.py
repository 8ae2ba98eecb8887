"""Puts this folder on the path, for `doc_pages`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
