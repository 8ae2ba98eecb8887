"""AlexNet and ResNet101 as layer graphs, with the shapes of the paper's tables (batch 128 there).

Convolutions are never cut along height and width. Batch normalisation reduces over the batch, its other axes being one
statistic each, which makes cutting the batch dear: that is the paper's cost model, and why its predicted gains over data
parallelism are larger than its measured ones.
"""

from __future__ import annotations

from math import prod

from benchmarks.papers.pase import kinds
from benchmarks.papers.pase.builder import GraphBuilder, Tensor
from benchmarks.papers.pase.layers import Dim, LayerGraph, Term

CNN_SMALLEST_PART = 4
"""Dimensions are only cut into parts of at least this size."""

Pair = tuple[int, int]


class CnnBuilder(GraphBuilder):
    """Layers over images of shape (batch, channels, height, width)."""

    def __init__(self, name: str) -> None:
        super().__init__(name, CNN_SMALLEST_PART)

    def _name(self, kind: str) -> str:
        return f"{len(self._layers):03d}.{kind}"

    def conv(self, x: Tensor, out: int, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0), pointwise: int = 0) -> Tensor:
        """Convolution with square strides."""
        b, c, h, w = x.sizes
        high, wide = _out(h, kernel[0], stride, pad[0]), _out(w, kernel[1], stride, pad[1])
        dims = (
            Dim("b", b),
            Dim("c", c),
            Dim("h", high, splittable=False),
            Dim("w", wide, splittable=False),
            Dim("r", kernel[0]),
            Dim("s", kernel[1]),
            Dim("n", out),
        )
        terms = kinds.gemm(("b", "h", "w"), ("n",), ("c", "r", "s"), pointwise=pointwise)
        inputs = [(x, (("b",), ("c",), ("h",), ("w",)))]
        output = ((b, ("b",)), (out, ("n",)), (high, ("h",)), (wide, ("w",)))
        return self.add(self._name("conv"), "conv", dims, terms, inputs, output)

    def pool(self, x: Tensor, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0)) -> Tensor:
        """Pooling."""
        b, c, h, w = x.sizes
        sizes = (b, c, _out(h, kernel[0], stride, pad[0]), _out(w, kernel[1], stride, pad[1]))
        terms = kinds.pooling("bchw", (("h", h, kernel[0]), ("w", w, kernel[1])))
        return self._image("pool", sizes, terms, [x])

    def batch_norm(self, x: Tensor) -> Tensor:
        """Batch normalisation."""
        return self._image("norm", x.sizes, kinds.norm("bchw", "b"), [x])

    def concat(self, inputs: list[Tensor]) -> Tensor:
        """Concatenation of channels, which it does not cut."""
        b, _, h, w = inputs[0].sizes
        channels = sum(x.sizes[1] for x in inputs)
        dims = (Dim("b", b), Dim("h", h), Dim("w", w))
        layout = (("b",), (), ("h",), ("w",))
        output = tuple(zip((b, channels, h, w), layout, strict=True))
        return self.add(self._name("concat"), "concat", dims, (), [(x, layout) for x in inputs], output)

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum of two images and its activation."""
        return self._image("add", x.sizes, kinds.elementwise("bchw", 2.0), [x, y])

    def mean(self, x: Tensor) -> Tensor:
        """Mean over height and width."""
        b, c, h, w = x.sizes
        dims = (Dim("b", b), Dim("c", c), Dim("h", h), Dim("w", w))
        inputs = [(x, (("b",), ("c",), ("h",), ("w",)))]
        terms = kinds.mean("bchw", "hw")
        return self.add(self._name("mean"), "mean", dims, terms, inputs, ((b, ("b",)), (c, ("c",))))

    def flatten(self, x: Tensor) -> Tensor:
        """Image to vector by way of a flat array: two layers that only cut it into contiguous pieces."""
        b, c, h, w = x.sizes
        image = (Dim("b", b), Dim("c", c), Dim("h", h), Dim("w", w))
        inputs = [(x, (("b",), ("c",), ("h",), ("w",)))]
        whole = ((prod(x.sizes), ("b", "c", "h", "w")),)
        flat = self.add(self._name("ravel"), "reshape", image, (), inputs, whole, allows=kinds.contiguous)
        rows = (Dim("b", b), Dim("n", c * h * w))
        output = ((b, ("b",)), (c * h * w, ("n",)))
        return self.add(self._name("unravel"), "reshape", rows, (), [(flat, (("b", "n"),))], output, allows=kinds.contiguous)

    def fc(self, x: Tensor, out: int, *, pointwise: int = 0) -> Tensor:
        """Fully connected layer."""
        b, k = x.sizes
        dims = (Dim("b", b), Dim("n", out), Dim("c", k))
        terms = kinds.gemm("b", "n", "c", pointwise=pointwise)
        return self.add(self._name("fc"), "gemm", dims, terms, [(x, (("b",), ("c",)))], ((b, ("b",)), (out, ("n",))))

    def loss(self, x: Tensor) -> Tensor:
        """Softmax and cross entropy."""
        b, n = x.sizes
        dims = (Dim("b", b), Dim("n", n))
        layout = (("b",), ("n",))
        terms = kinds.softmax_cross_entropy("bn", "n")
        return self.add(self._name("loss"), "loss", dims, terms, [(x, layout)], ((b, ("b",)), (n, ("n",))))

    def _image(self, kind: str, sizes: tuple[int, ...], terms: tuple[Term, ...], inputs: list[Tensor]) -> Tensor:
        """A layer whose iteration space is its output image."""
        dims = tuple(Dim(name, size) for name, size in zip("bchw", sizes, strict=True))
        layout = tuple((name,) for name in "bchw")
        return self.add(
            self._name(kind), kind, dims, terms, [(x, layout) for x in inputs], tuple(zip(sizes, layout, strict=True))
        )


def alexnet(batch: int = 128) -> LayerGraph:
    """AlexNet on 227 x 227 images: 14 layers."""
    net = CnnBuilder("alexnet")
    x = net.conv(Tensor((batch, 3, 227, 227)), 96, (11, 11), stride=4, pointwise=1)
    x = net.pool(x, (3, 3), stride=2)
    x = net.conv(x, 256, (5, 5), pad=(2, 2), pointwise=1)
    x = net.pool(x, (3, 3), stride=2)
    for channels in (384, 384, 256):
        x = net.conv(x, channels, (3, 3), pad=(1, 1), pointwise=1)
    x = net.flatten(net.pool(x, (3, 3), stride=2))
    for units in (4096, 4096):
        x = net.fc(x, units, pointwise=1)
    net.loss(net.fc(x, 1024))
    return net.build()


def resnet101(batch: int = 128) -> LayerGraph:
    """ResNet101 on 227 x 227 images: 245 layers."""
    net = CnnBuilder("resnet101")
    x = net.conv(Tensor((batch, 3, 227, 227)), 64, (7, 7), stride=2, pad=(3, 3))
    x = net.pool(net.batch_norm(x), (3, 3), stride=2, pad=(1, 1))
    for stage, (planes, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3))):
        for block in range(blocks):
            x = _bottleneck(net, x, planes, stride=2 if stage > 0 and block == 0 else 1)
    net.loss(net.fc(net.mean(x), 1000))
    return net.build()


def _bottleneck(net: CnnBuilder, x: Tensor, planes: int, stride: int) -> Tensor:
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is projected where the shape changes."""
    y = net.batch_norm(net.conv(x, planes, (1, 1)))
    y = net.batch_norm(net.conv(y, planes, (3, 3), stride=stride, pad=(1, 1)))
    y = net.batch_norm(net.conv(y, 4 * planes, (1, 1)))
    if x.sizes != y.sizes:
        x = net.batch_norm(net.conv(x, 4 * planes, (1, 1), stride=stride))
    return net.sum(y, x)


def _out(size: int, kernel: int, stride: int, pad: int) -> int:
    """Size of a windowed axis of the output."""
    return (size - kernel + 2 * pad) // stride + 1
