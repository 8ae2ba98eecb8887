"""Optimizers as data: the class that runs, its FLOPs, traffic and state, and what it must see whole.

State has the dtype of the parameter, as in torch (`zeros_like(parameter)`), unless there are master weights: a float32 copy of
the parameter, and state in float32 (mixed-precision Adam of Megatron and DeepSpeed, 16 bytes per parameter in all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

KERNELS = ("foreach", "fused", "single")
"""Implementations of an update in torch: `foreach` (all parameters at once, torch's choice on GPUs), `fused` (one kernel, no
temporaries) and `single` (parameter by parameter)."""

_BLOCK, _SMALL = 256, 4096
"""Elements that share a scale in torchao's 8-bit states, and elements of a parameter whose states stay as they are."""


@dataclass(frozen=True)
class OptimizerRule:
    """One optimizer.

    Attributes:
        path: Module and name of its class.
        flops: FLOPs per element.
        weight_traffic: Bytes read and written, in sizes of the parameter: the parameter twice, the gradient once.
        moments: Copies of the parameter that it keeps.
        foreach_temporaries: Copies of all parameters that a foreach update keeps at once, in the state's dtype.
        single_temporaries: Copies of one parameter that a single update keeps at once.
        passes: Bytes that an update moves in multiples of those counted, parameter, gradient and state once each: torch runs
            one pass over memory for each line of its formula.
        options: Arguments of the class besides the learning rate.
        quantized: Moments take a byte an element, and a float32 scale for every `_BLOCK` of them.
        factored: Of a matrix it keeps one value a row and one a column.
        products: Newton-Schulz steps by which it makes the update of a matrix orthogonal.
        rest: Name of the optimizer of the parameters that are none of its own (`apart`); None: all are.
        whole: Why it cannot update parts of parameters; None where it can.
        sparse: It updates the rows of a sparse gradient.
        rounds: It rounds updates of bfloat16 weights up or down at random, by their distance; others it updates as ever.
    """

    path: str
    flops: float
    weight_traffic: float
    moments: int
    foreach_temporaries: int
    single_temporaries: int
    passes: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    quantized: bool = False
    factored: bool = False
    products: int = 0
    rest: str | None = None
    whole: str | None = None
    sparse: bool = False
    rounds: bool = False

    def of(self, own: bool) -> OptimizerRule:
        """Returns the rule of a parameter that is one of `apart`, or is not."""
        return self if own or self.rest is None else OPTIMIZERS[self.rest]

    def why_not(self, dtypes: Iterable[torch.dtype], master_weights: bool = False) -> str | None:
        """Explains why it makes no sense for weights of these dtypes; None where it does."""
        if self.rounds and (master_weights or not any(str(dtype) == "torch.bfloat16" for dtype in dtypes)):
            return f"{self.path} rounds weights in bfloat16 at random; take --dtype bf16 without master weights"
        return None

    def update_flops(self, shape: Sequence[int]) -> float:
        """Returns FLOPs of the update of a parameter; a Newton-Schulz step has three products (torch/optim/_muon.py)."""
        small, large = (min(shape), max(shape)) if self.products else (0, 0)
        return self.flops * prod(shape) + self.products * (4.0 * small * small * large + 2.0 * small**3)

    def state_bytes(self, shape: Sequence[int], element_bytes: int, master_weights: bool) -> int:
        """Returns bytes of the state of a parameter; a float32 parameter is its own master."""
        elements = prod(shape)
        masters = 4 * elements if master_weights and element_bytes < 4 else 0
        element_bytes = 4 if masters else element_bytes
        if self.factored and len(shape) > 1:
            return masters + element_bytes * (elements // max(shape[-1], 1) + elements // max(shape[-2], 1))
        if self.quantized and elements >= _SMALL and elements % _BLOCK == 0:
            return masters + self.moments * (elements + 4 * elements // _BLOCK)
        return masters + element_bytes * elements * self.moments

    def temporaries(self, kernel: str) -> int:
        """Returns the copies that an update keeps at once, of all parameters for foreach, of one for single."""
        return {"foreach": self.foreach_temporaries, "single": self.single_temporaries, "fused": 0}[kernel]


OPTIMIZERS: Mapping[str, OptimizerRule] = MappingProxyType(
    {
        # torch/optim/adam.py: foreach takes the square roots of all second moments; single holds a root, its quotient and the
        # quotient of the parameter before, which the loop's variable still names. It takes 18 tensors of 7 (lerp 3, mul 2,
        # addcmul 3, sqrt 2, div 2, add 2, addcdiv 4), decay 2 more, and momentum in torch/optim/sgd.py 8 of 5.
        "sgd": OptimizerRule("torch.optim.SGD", 2.0, 3.0, 0, 0, 0, sparse=True),
        "momentum": OptimizerRule("torch.optim.SGD", 4.0, 3.0, 1, 0, 0, 8 / 5, {"momentum": 0.9}),
        "adam": OptimizerRule("torch.optim.Adam", 12.0, 3.0, 2, 1, 3, 18 / 7),
        "adamw": OptimizerRule("torch.optim.AdamW", 13.0, 3.0, 2, 1, 3, 20 / 7),
        # torch/optim/_functional.py, of the rows of a gradient: it sums those of equal ids (2 of 7 tensors), reads old moments
        # (2), multiplies and adds (6), changes the moments (6), roots and divides (4) and changes the weights (4).
        "sparse-adam": OptimizerRule("torch.optim.SparseAdam", 12.0, 3.0, 2, 0, 0, 24 / 7, rest="adam", sparse=True),
        # torch/optim/_adafactor.py takes 14 tensors of 3: a norm of the parameter, two of the gradient, an estimate that is
        # made, divided, clamped, rooted, multiplied by the gradient and measured, and the update.
        "adafactor": OptimizerRule(
            "torch.optim.Adafactor", 12.0, 3.0, 1, 1, 2, 18 / 3, factored=True,
            whole="torch's Adafactor takes norms of whole parameters",
        ),
        # Chen et al. (arXiv 2302.06675), algorithm 2: mul 2, lerp 3, sign 2, add 3, lerp 3 of 5.
        "lion": OptimizerRule("rlplace.runtime.base.optimizers.Lion", 9.0, 3.0, 1, 0, 1, 13 / 5),
        # torch/optim/_muon.py: lerp 3, lerp 3, cast 2, decay 2, add 3 of 5, and passes over halves in the products.
        "muon": OptimizerRule("torch.optim.Muon", 6.0, 3.0, 1, 0, 4, 13 / 5, products=5, rest="adamw"),
        # torchao/optim/adam.py compiles the update into one kernel.
        "adamw8bit": OptimizerRule("torchao.optim.AdamW8bit", 17.0, 3.0, 2, 0, 0, quantized=True),
        # AdamW and of every weight a random number, two masks, a comparison, a sum and a choice (torchao/optim/quant_utils.py).
        "adamw-bf16": OptimizerRule(
            "torchao.optim._AdamW", 19.0, 3.0, 2, 0, 0, options={"bf16_stochastic_round": True}, rounds=True
        ),
    }
)  # fmt: skip


def apart(model: nn.Module, optimizer: str) -> frozenset[str]:
    """Returns names of the parameters that an optimizer with a `rest` updates itself.

    SparseAdam takes tables of embeddings with sparse gradients, Muon matrices but tables and the last module's, the head.
    """
    from torch.nn import Embedding, EmbeddingBag

    held = [
        (f"{path}.{name}".lstrip("."), module, p)
        for path, module in model.named_modules()
        for name, p in module._parameters.items()
    ]
    flat = [(name, module, p) for name, module, p in held if p is not None and p.dim() == 2]
    tables = {id(p) for _, module, p in flat if isinstance(module, (Embedding, EmbeddingBag))}
    if OPTIMIZERS[optimizer].sparse:
        dense = {id(p) for _, module, p in flat if not getattr(module, "sparse", False)}
        return frozenset(name for name, _, p in flat if id(p) in tables - dense)
    head = {id(p) for _, _, p in flat[-1:]}
    return frozenset(name for name, _, p in flat if id(p) not in tables | head)
