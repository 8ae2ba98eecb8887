"""Shape, strides, dtype and need of a gradient of every value, from one run on fake tensors.

What crosses a wire is laid out by this record on both sides and never by the strides of the tensor at hand: a kernel may
return other strides than its shape rule says. The run happens under the autocast state of the caller, because autocast changes
dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import RlplaceError
from rlplace.graph.fake import any_dtype_grouped_mm, autocast_region, fake_inputs


@dataclass(frozen=True)
class Layout:
    """A tensor without its values.

    Attributes:
        shape: Sizes.
        dtype: As torch has it.
        requires_grad: Whether a gradient flows back to it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of this layout, values undefined."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def check(self, value: torch.Tensor, what: str) -> None:
        """Refuses a tensor of another shape or dtype; `what` says what it is.

        Raises:
            RlplaceError: It is.
        """
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise RlplaceError(
                f"{what} is {value.dtype}{list(value.shape)}, but tracing promised {self.dtype}{list(self.shape)}; "
                "the model depends on values that tracing cannot see"
            )


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.layout: dict[str, Layout] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op != "output":
            self.layout[n.name] = Layout(tuple(value.shape), value.dtype, value.requires_grad)
        return value


def trace_layouts(
    module: fx.GraphModule, mode: FakeTensorMode, held: Sequence[torch.Tensor], inputs: Sequence[Any]
) -> dict[str, Layout]:
    """Runs a graph on fake tensors.

    Args:
        module: Takes `held`, then `inputs`.
        mode: The fake mode that owns `held`.
        held: Fake parameters and buffers.
        inputs: Flat inputs, real, meta or fake.

    Returns:
        The layout by node name, for every node that makes one tensor.
    """
    fake = fake_inputs(list(inputs), mode)
    recorder = _Recorder(module)
    # The run is on fake processor tensors, which CUDA's autocast does not reach: they follow its rules by another way.
    cuda = torch.is_autocast_enabled("cuda")
    region = autocast_region(torch.get_autocast_dtype("cuda") if cuda else None, "cuda")
    with mode, any_dtype_grouped_mm(), torch.enable_grad(), region:
        recorder.run(*held, *fake)
    return recorder.layout
