"""Colours that colour-blind people can tell apart: those of Okabe and Ito (2008), without black and with a darker yellow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B3A125", "#8C8C8C")
"""Categories, in this order; more than these take them again."""

PHASE_COLORS = ("#0072B2", "#E69F00", "#D55E00", "#009E73")
"""Of `rlplace.problem.PHASES`."""

COLLECTIVE_COLOR, TRANSFER_COLOR = "#CC79A7", "#8C8C8C"
LIMIT_COLOR = "#D55E00"


def rgb(colors: tuple[str, ...]) -> NDArray[np.uint8]:
    """uint8 [number of colours, 3] of ``#RRGGBB``."""
    return np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors], dtype=np.uint8)
