"""Optimizers of `torch.optim`: their FLOPs, traffic and state, and the temporary memory of an update.

State has the dtype of the parameter, as in torch (`zeros_like(parameter)`), unless there are master weights: a float32 copy of
the parameter, and state in float32 (mixed-precision Adam of Megatron and DeepSpeed, 16 bytes per parameter in all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KERNELS = ("foreach", "fused", "single")
"""Implementations of an update in torch: `foreach` (all parameters at once, torch's choice on GPUs), `fused` (one kernel, no
temporaries) and `single` (parameter by parameter)."""


@dataclass(frozen=True)
class OptimizerRule:
    """Costs of one optimizer.

    Attributes:
        flops: FLOPs per element.
        weight_traffic: Bytes read and written, in sizes of the parameter: the parameter twice, the gradient once.
        moments: Copies of the parameter that it keeps.
        foreach_temporaries: Copies of all parameters that a foreach update keeps at once, in the state's dtype.
        single_temporaries: Copies of one parameter that a single update keeps at once.
    """

    flops: float
    weight_traffic: float
    moments: int
    foreach_temporaries: int
    single_temporaries: int

    def state_bytes(self, elements: int, element_bytes: int, master_weights: bool) -> int:
        """Returns bytes of the state of a parameter; a float32 parameter is its own master."""
        if master_weights and element_bytes < 4:
            return 4 * elements * (1 + self.moments)
        return element_bytes * elements * self.moments

    def temporaries(self, kernel: str) -> int:
        """Returns the copies that an update keeps at once, of all parameters for foreach, of one for single."""
        return {"foreach": self.foreach_temporaries, "single": self.single_temporaries, "fused": 0}[kernel]


OPTIMIZERS: Mapping[str, OptimizerRule] = MappingProxyType(
    {
        # torch/optim/adam.py: foreach takes the square roots of all second moments; single holds a root, its quotient and the
        # quotient of the parameter before, which the loop's variable still names.
        "sgd": OptimizerRule(2.0, 3.0, 0, 0, 0),
        "momentum": OptimizerRule(4.0, 3.0, 1, 0, 0),
        "adam": OptimizerRule(12.0, 3.0, 2, 1, 3),
        "adamw": OptimizerRule(13.0, 3.0, 2, 1, 3),
    }
)
