"""Which versions of torch the pipeline engine knows."""

from __future__ import annotations

import torch

FIRST, BEYOND = (2, 11), (2, 14)


def unsupported_version() -> str | None:
    """What is wrong with the installed torch; None: nothing.

    The engine overrides one method of `PipelineStage` and, where torch has no schedule for a layout, fills in the action lists
    of its schedule runtime. Both are private, so versions that nobody has looked at are not trusted.
    """
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if FIRST <= installed < BEYOND:
        return None
    return f"the pipeline engine knows torch 2.{FIRST[1]} to 2.{BEYOND[1] - 1}, found {torch.__version__}"
