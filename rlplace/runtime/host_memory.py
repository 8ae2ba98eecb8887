"""How the C library keeps freed memory, and what it costs when it does not.

glibc hands the top of its heap back to the system when more than a threshold is free there, and takes large blocks from the
system each time. Both are paid for page by page, when the memory is touched again. The thresholds move with the blocks that a
program frees, so the same training step may take either way, depending on the history of the process.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1 << 28


def keep_freed_memory() -> str:
    """Tells glibc to keep what is freed, for the rest of the process.

    Returns:
        "keep", or "default" where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return "default"
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return "default"
    done = [mallopt(_M_TRIM_THRESHOLD, -1), mallopt(_M_TOP_PAD, _TOP_PAD_BYTES), mallopt(_M_MMAP_MAX, 0)]
    return "keep" if all(done) else "default"


def page_faults() -> int:
    """Pages that the process had to be given so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
