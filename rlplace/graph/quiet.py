"""Keeps torch from writing to the terminal what capture reports in one line, or settles with another method."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator


def _muted(record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Mutes torch's own log handlers, which print tracebacks of errors that the caller handles; not when TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    names = [name for name in list(logging.root.manager.loggerDict) if name == "torch" or name.startswith("torch.")]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(_muted)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_muted)


@contextlib.contextmanager
def quiet_prints() -> Iterator[None]:
    """Drops what `torch.export` prints to stderr: the whole graph so far, when a forward depends on tensor values."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
