"""What ran published steps, as far as it is not torch as this project prices it; each entry says where that is known from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """A training stack.

    Attributes:
        name: Start of the source's name.
        fused_loss: Cross entropy reads logits in half precision in one kernel.
        compiles: Whether a compiler generates its kernels: always, never or (None) where the strategy says "compile".
        attention: Time of attention as a multiple of what it is priced at.
        layer_host_us: Host time of a layer, forward and backward, where it is more than that of its ops; 0: not known.
        known: Where all that is from.
    """

    name: str
    fused_loss: bool = False
    compiles: bool | None = None
    attention: float = 1.0
    layer_host_us: float = 0.0
    known: str = ""

    def compiled(self, words: str) -> bool:
        """Whether a compiler generates its kernels."""
        return "compile" in words if self.compiles is None else self.compiles


SOFTWARE = (
    Software(
        "mosaicml/llm-foundry", fused_loss=True,
        known="its benchmark script: triton attention (FlashAttention-1), low precision norms; loss_fn fused_crossentropy",
    ),
    Software("karpathy/llm.c", fused_loss=True, compiles=True, known="CUDA without Python: fused classifier, little host time"),
    Software("jzhang38", fused_loss=True, known="its README: fused norm, SwiGLU, cross entropy and rotary kernels"),
    Software("sail-sg", known="Megatron-LM core, local transformer layers"),
    Software("NVIDIA/Megatron-LM", known="Transformer Engine where the model says so"),
    Software("NVIDIA/dgxc", fused_loss=True, known="NeMo on Megatron-LM and Transformer Engine"),
)  # fmt: skip
PLAIN = Software("", known="torch as it is")


def software_of(source: str) -> Software:
    """The stack of a source; torch itself where nothing else is known."""
    return next((entry for entry in SOFTWARE if source.startswith(entry.name)), PLAIN)
