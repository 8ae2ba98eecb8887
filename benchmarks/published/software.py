"""Software of published steps, where it is not torch as this project prices it; each entry says where that is known from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlplace.cost.scaled import FLASH_ATTENTION_2


@dataclass(frozen=True)
class Software:
    """A training stack.

    Attributes:
        name: Start of the source's name.
        fused_loss: Cross entropy reads logits in half precision in one kernel.
        compiles: Whether a compiler generates its kernels: always, never or (None) where the strategy says "compile".
        fused_norms: Norms keep their input alone.
        factors: Time of op classes as multiples of what they are priced at, by (device kind, class); "" is every kind.
        layer_host_us: Host time of a layer, forward and backward, by device kind, where it is more than that of its ops.
        overlaps_tensor: Collectives of tensor and context groups run under the products that they belong to.
        known: Where all that is from.
    """

    name: str
    fused_loss: bool = False
    compiles: bool | None = None
    fused_norms: bool = True
    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    layer_host_us: Mapping[str, float] = field(default_factory=dict)
    overlaps_tensor: bool = False
    known: str = ""

    def factors_on(self, kind: str) -> tuple[tuple[str, float], ...]:
        """Returns op classes with their multiples on a device kind."""
        return tuple((op, factor) for (name, op), factor in self.factors.items() if name in ("", kind))

    def compiled(self, words: str) -> bool:
        """Says whether a compiler generates its kernels."""
        return "compile" in words if self.compiles is None else self.compiles


_HOPPER = ("h100", "h200", "gh200")
_OLDER = {(kind, "attention"): FLASH_ATTENTION_2 for kind in _HOPPER}

SOFTWARE = (
    Software(
        "mosaicml/llm-foundry", fused_loss=True,
        factors={("", "attention"): 1.37, ("h100", "attention"): 2.9, ("h100", "gemm"): 1.25},
        known="its benchmark script: triton attention (FlashAttention-1), low precision norms; loss_fn fused_crossentropy; "
        "products of a CUDA whose H100 kernels were young. Both factors: least squares over its own rows",
    ),
    Software("karpathy/llm.c", fused_loss=True, compiles=True, known="CUDA without Python: fused classifier, little host time"),
    Software("jzhang38", fused_loss=True, known="its README: fused norm, SwiGLU, cross entropy and rotary kernels"),
    Software(
        "sail-sg", layer_host_us={"a100-80g": 5800.0},
        known="Megatron-LM core, local layers; host time: least squares over its rows",
    ),
    Software(
        "NVIDIA/Megatron-LM", compiles=True, layer_host_us={"h100": 4100.0},
        known="Transformer Engine: fused norms, activations, rotary; host time from its DP8 row alone",
    ),
    Software(
        "NVIDIA/dgxc", fused_loss=True, compiles=True, overlaps_tensor=True,
        known="NeMo on Megatron-LM and Transformer Engine: the same kernels, tp_comm_overlap, ring attention under compute",
    ),
    Software("gist", fused_norms=False, known="transformers' Trainer and DeepSpeed, models as they are"),
)  # fmt: skip
PLAIN = Software("", factors=_OLDER, known="torch as it was before 2.10")


def software_of(source: str) -> Software:
    """Returns the stack of a source; torch itself where nothing else is known."""
    return next((entry for entry in SOFTWARE if source.startswith(entry.name)), PLAIN)
