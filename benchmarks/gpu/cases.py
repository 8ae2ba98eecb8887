"""Which kernels are timed: random sizes by a seed, in an order in which every class has its share however early it is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

HALF = ("bfloat16", "float16")
PRODUCT_DTYPES = ("bfloat16", "bfloat16", "float16", "float32", "tf32")
OTHER_DTYPES = ("bfloat16", "float32")
MOST_FLOPS = {"bfloat16": 3e12, "float16": 3e12, "tf32": 1.2e12, "float32": 1.5e11}
MOST_BYTES = 2e9


@dataclass(frozen=True)
class Case:
    """A kernel to time.

    Attributes:
        op: What is called, a name of `rlplace.model.graph.opgraph.OP_KINDS` or a function of torch.
        dtype: Of operands; tf32 is float32 on tensor cores.
        direction: forward, backward, or of products backward_weight.
        dims: Sizes by name.
    """

    op: str
    dtype: str
    direction: str
    dims: dict[str, int]

    @property
    def key(self) -> str:
        """Names the case in a file."""
        sizes = ",".join(f"{name}={size}" for name, size in self.dims.items())
        return f"{self.op}/{self.dtype}/{self.direction}/{sizes}"


def cases(count: int, largest: float = 1.0) -> Iterator[Case]:
    """Yields so many rounds of one case of each class.

    Args:
        count: Rounds.
        largest: Share of the largest work; small on a processor.
    """
    for number in range(count):
        draw = random.Random(f"kernels {number}")
        for make in (_linear, _linear, _linear, _bmm, _bmm, _conv, _conv, _attention, _rows, _rows, _elementwise, _update):
            yield make(draw, largest)


def _size(draw: random.Random, low: int, high: int) -> int:
    """Returns log-uniform; two of three are multiples of 8 or more."""
    value = math.exp(draw.uniform(math.log(low), math.log(high)))
    step = draw.choice((1, 8, 64)) if value >= 64 else 1
    return max(1, round(value / step) * step)


def _linear(draw: random.Random, largest: float) -> Case:
    dtype, direction = draw.choice(PRODUCT_DTYPES), draw.choice(("forward", "backward", "backward_weight"))
    while True:
        m, n, k = _size(draw, 8, 32768), _size(draw, 32, 32768), _size(draw, 32, 32768)
        if 2 * m * n * k < largest * MOST_FLOPS[dtype] and 4 * (m * n + n * k + m * k) < largest * MOST_BYTES:
            return Case("gemm", dtype, direction, {"m": m, "n": n, "k": k})


def _bmm(draw: random.Random, largest: float) -> Case:
    dtype, direction = draw.choice(PRODUCT_DTYPES), draw.choice(("forward", "backward", "backward_weight"))
    while True:
        batch, m, n, k = _size(draw, 2, 2048), _size(draw, 16, 4096), _size(draw, 16, 4096), _size(draw, 16, 4096)
        flops, size = 2 * batch * m * n * k, 4 * batch * (m * n + n * k + m * k)
        if flops < largest * MOST_FLOPS[dtype] and size < largest * MOST_BYTES:
            return Case("bmm", dtype, direction, {"batch": batch, "m": m, "n": n, "k": k})


def _conv(draw: random.Random, largest: float) -> Case:
    dtype, direction = draw.choice(("bfloat16", "float16", "float32", "tf32")), draw.choice(("forward", "backward"))
    while True:
        kernel, stride, image = draw.choice((1, 1, 3, 3, 3, 5, 7)), draw.choice((1, 1, 2)), _size(draw, 7, 224)
        batch, taken, given = _size(draw, 1, 256), _size(draw, 3, 2048), _size(draw, 8, 2048)
        pixels = batch * (-(-image // stride)) ** 2
        flops = 2 * pixels * kernel * kernel * taken * given
        size = 4 * (batch * image * image * taken + pixels * given)
        if flops < 0.5 * largest * MOST_FLOPS[dtype] and size < largest * MOST_BYTES and image >= kernel:
            dims = {"batch": batch, "channels": taken, "image": image, "filters": given, "kernel": kernel, "stride": stride}
            return Case("conv", dtype, direction, dims)


def _attention(draw: random.Random, largest: float) -> Case:
    dtype = draw.choice(("bfloat16", "bfloat16", "float16", "float32"))
    while True:
        batch, heads, seq, width = _size(draw, 1, 64), _size(draw, 4, 64), _size(draw, 64, 8192), draw.choice((64, 64, 128, 96))
        flops, elements = 4 * batch * heads * seq * seq * width, batch * heads * seq * width
        if flops < 0.5 * largest * MOST_FLOPS[dtype] and elements < 2e8 * largest:
            dims = {"batch": batch, "heads": heads, "seq": seq, "head_dim": width, "causal": draw.choice((0, 1, 1, 2))}
            return Case("attention", dtype, draw.choice(("forward", "backward")), dims)


def _rows(draw: random.Random, largest: float) -> Case:
    op = draw.choice(("layer_norm", "rms_norm", "softmax", "log_softmax", "embedding", "sum"))
    dtype, direction = draw.choice(OTHER_DTYPES), draw.choice(("forward", "backward"))
    direction = "forward" if op == "sum" else direction  # its backward is a view
    while True:
        rows, columns = _size(draw, 16, 262144), _size(draw, 64, 131072 if "softmax" in op else 16384)
        if 1e4 < rows * columns < 2.5e8 * largest:
            return Case(op, dtype, direction, {"rows": rows, "columns": columns})


def _elementwise(draw: random.Random, largest: float) -> Case:
    op = draw.choice(("add", "mul", "gelu", "silu", "relu", "dropout", "copy", "cast"))
    direction = draw.choice(("forward", "backward")) if op in ("gelu", "silu", "dropout") else "forward"
    count = int(math.exp(draw.uniform(math.log(1e4), math.log(4e8 * largest + 2e4))))
    return Case(op, draw.choice(OTHER_DTYPES), direction, {"count": count})


def _update(draw: random.Random, largest: float) -> Case:
    op = draw.choice(("adamw_foreach", "adamw_fused", "sgd_foreach"))
    tensors = _size(draw, 4, 400)
    count = int(math.exp(draw.uniform(math.log(1e5), math.log(1e9 * largest + 2e5))))
    return Case(op, draw.choice(OTHER_DTYPES), "update", {"tensors": tensors, "count": max(count, tensors)})
