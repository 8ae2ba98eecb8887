"""The models of the zoo by name. Each builder takes the batch, the sequence length and its own options.

A builder returns a module whose output is a dict with the key ``loss``, and its keyword inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rlplace.zoo.tabular import build_dlrm, build_lstm, build_mlp, build_moe_toy, build_transformer
from rlplace.zoo.vision import build_inception, build_nasnet, build_unet

BUILDERS: dict[str, Callable[..., tuple[nn.Module, dict[str, Any]]]] = {
    "dlrm": build_dlrm,
    "inception": build_inception,
    "lstm": build_lstm,
    "mlp": build_mlp,
    "moe_toy": build_moe_toy,
    "nasnet": build_nasnet,
    "transformer": build_transformer,
    "unet": build_unet,
}
