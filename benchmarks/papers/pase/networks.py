"""The paper's networks as layer graphs, with the shapes of its tables, where batches are 128 for CNNs and 64 otherwise.

Convolutions are never cut along height and width. Batch normalisation reduces over the batch, its other axes being one
statistic each, which makes cutting the batch dear: that is the paper's cost model. Embeddings are products with a one-hot
input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from benchmarks.papers.pase.graph import (
    ALL_REDUCE,
    HALO,
    RELAYOUT,
    WORK,
    Dim,
    Layer,
    LayerEdge,
    LayerGraph,
    Layout,
    Term,
    cross_entropy,
    gemm,
    norm,
    softmax,
)

Pair = tuple[int, int]
Kernel = tuple[int, Pair, Pair]
"""Channels, window and padding of a convolution with stride 1."""


class Tensor(NamedTuple):
    """A tensor between layers: shape, index of its producer (None: an input, which is free), and how that holds it."""

    sizes: tuple[int, ...]
    producer: int | None = None
    layout: Layout = ()


@dataclass
class Builder:
    """Collects layers, as a network is written down; edges follow from the tensors that a layer reads."""

    name: str
    smallest_part: int = 1
    layers: list[Layer] = field(default_factory=list)
    edges: list[LayerEdge] = field(default_factory=list)

    def add(
        self, kind: str, sizes: dict[str, int], terms: tuple[Term, ...], inputs: Sequence[tuple[Tensor, str]], output: str,
        *, fixed: str = "", shape: Mapping[str, int] | None = None, contiguous: bool = False,
    ) -> Tensor:  # fmt: skip
        """Adds a layer.

        Args:
            kind: Label; the layer's name is its number and this.
            sizes: Iteration space, a letter each.
            terms: Costs.
            inputs: Tensors with the layout in which the layer reads them: letters of each axis, with spaces; "-": whole.
            output: Layout of what it makes.
            fixed: Letters that are not cut.
            shape: Sizes of axes of the output that are not those of the dimensions, "-" of one that is whole.
            contiguous: See `Layer`.
        """
        index, dims = len(self.layers), tuple(Dim(name, size, name not in fixed) for name, size in sizes.items())
        self.layers.append(Layer(f"{index:03d}.{kind}", kind, dims, terms, contiguous))
        for tensor, text in inputs:
            if tensor.producer is not None:
                self.edges.append(LayerEdge(tensor.producer, index, tensor.sizes, tensor.layout, _layout(text)))
        known = sizes | (shape or {})
        made = tuple(prod(known[name] for name in axis or "-") for axis in _layout(output))
        return Tensor(made, index, _layout(output))

    def build(self) -> LayerGraph:
        """Returns the graph so far."""
        return LayerGraph(self.name, tuple(self.layers), tuple(self.edges), self.smallest_part)


def _layout(text: str) -> Layout:
    return tuple(axis.strip("-") for axis in text.split())


class Cnn(Builder):
    """Layers over images of shape (batch, channels, height, width)."""

    def __init__(self, name: str) -> None:
        super().__init__(name, smallest_part=4)

    def _image(self, kind: str, sizes: Sequence[int], terms: tuple[Term, ...], inputs: list[Tensor]) -> Tensor:
        """Adds a layer whose iteration space is its output image."""
        return self.add(kind, dict(zip("bchw", sizes, strict=True)), terms, [(x, "b c h w") for x in inputs], "b c h w")

    def conv(self, x: Tensor, out: int, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0), pointwise: int = 0) -> Tensor:
        """Adds a convolution."""
        b, c, h, w = x.sizes
        high, wide = _out(h, kernel[0], stride, pad[0]), _out(w, kernel[1], stride, pad[1])
        sizes = {"b": b, "c": c, "h": high, "w": wide, "r": kernel[0], "s": kernel[1], "n": out}
        terms = gemm("bhw", "n", "crs", pointwise=pointwise)
        return self.add("conv", sizes, terms, [(x, "b c h w")], "b n h w", fixed="hw")

    def pool(self, x: Tensor, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0)) -> Tensor:
        """Adds a pooling: one operation an output element, and halos where a windowed axis is cut."""
        b, c, h, w = x.sizes
        sizes = (b, c, _out(h, kernel[0], stride, pad[0]), _out(w, kernel[1], stride, pad[1]))
        halo = Term(HALO, 1.0, "bc", windows=(("h", h, kernel[0]), ("w", w, kernel[1])))
        return self._image("pool", sizes, (Term(WORK, 1.0, "bchw"), halo), [x])

    def unit(self, x: Tensor, channels: int, kernel: Pair, *, stride: int = 1, pad: Pair = (0, 0)) -> Tensor:
        """Adds a convolution and its batch normalisation."""
        y = self.conv(x, channels, kernel, stride=stride, pad=pad)
        return self._image("norm", y.sizes, norm("bchw", "b"), [y])

    def chain(self, x: Tensor, *kernels: Kernel) -> Tensor:
        """Adds units one after the other."""
        for channels, kernel, pad in kernels:
            x = self.unit(x, channels, kernel, pad=pad)
        return x

    def concat(self, inputs: list[Tensor]) -> Tensor:
        """Adds a concatenation of channels, which it does not cut."""
        b, _, h, w = inputs[0].sizes
        channels = sum(x.sizes[1] for x in inputs)
        return self.add(
            "concat", {"b": b, "h": h, "w": w}, (), [(x, "b - h w") for x in inputs], "b - h w", shape={"-": channels}
        )

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds a sum of two images and its activation."""
        return self._image("add", x.sizes, (Term(WORK, 2.0, "bchw"),), [x, y])

    def mean(self, x: Tensor) -> Tensor:
        """Adds a mean over height and width, of which only the all-reduce counts."""
        sizes = dict(zip("bchw", x.sizes, strict=True))
        return self.add("mean", sizes, (Term(ALL_REDUCE, 1.0, "bchw", "hw"),), [(x, "b c h w")], "b c")

    def flatten(self, x: Tensor) -> Tensor:
        """Adds what makes a vector of an image by way of a flat array: two layers that only cut it into contiguous pieces."""
        b, c, h, w = x.sizes
        flat = self.add("ravel", dict(zip("bchw", x.sizes, strict=True)), (), [(x, "b c h w")], "bchw", contiguous=True)
        return self.add("unravel", {"b": b, "n": c * h * w}, (), [(flat, "bn")], "b n", contiguous=True)

    def fc(self, x: Tensor, out: int, *, pointwise: int = 0) -> Tensor:
        """Adds a fully connected layer."""
        sizes = {"b": x.sizes[0], "n": out, "c": x.sizes[1]}
        return self.add("gemm", sizes, gemm("b", "n", "c", pointwise=pointwise), [(x, "b c")], "b n")

    def loss(self, x: Tensor) -> LayerGraph:
        """Adds softmax and cross entropy, and returns the graph."""
        self.add("loss", dict(zip("bn", x.sizes, strict=True)), cross_entropy("bn", "n"), [(x, "b n")], "b n")
        return self.build()


def _out(size: int, kernel: int, stride: int, pad: int) -> int:
    return (size - kernel + 2 * pad) // stride + 1


def alexnet(batch: int = 128) -> LayerGraph:
    """Builds AlexNet on 227 x 227 images: 14 layers."""
    net = Cnn("alexnet")
    x = net.conv(Tensor((batch, 3, 227, 227)), 96, (11, 11), stride=4, pointwise=1)
    x = net.conv(net.pool(x, (3, 3), stride=2), 256, (5, 5), pad=(2, 2), pointwise=1)
    x = net.pool(x, (3, 3), stride=2)
    for channels in (384, 384, 256):
        x = net.conv(x, channels, (3, 3), pad=(1, 1), pointwise=1)
    x = net.flatten(net.pool(x, (3, 3), stride=2))
    for units in (4096, 4096):
        x = net.fc(x, units, pointwise=1)
    return net.loss(net.fc(x, 1024))


def resnet101(batch: int = 128) -> LayerGraph:
    """Builds ResNet101 on 227 x 227 images: 245 layers."""
    net = Cnn("resnet101")
    x = net.unit(Tensor((batch, 3, 227, 227)), 64, (7, 7), stride=2, pad=(3, 3))
    x = net.pool(x, (3, 3), stride=2, pad=(1, 1))
    for stage, (planes, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = net.unit(net.unit(x, planes, (1, 1)), planes, (3, 3), stride=stride, pad=(1, 1))
            y = net.unit(y, 4 * planes, (1, 1))
            if x.sizes != y.sizes:  # the shortcut is projected where the shape changes
                x = net.unit(x, 4 * planes, (1, 1), stride=stride)
            x = net.sum(y, x)
    return net.loss(net.fc(net.mean(x), 1000))


def inception_v3(batch: int = 128) -> LayerGraph:
    """Builds InceptionV3 on 299 x 299 images without the auxiliary head: 219 layers (the paper counts one fewer)."""
    net, one, three, down = Cnn("inception_v3"), ((1, 1), (0, 0)), ((3, 3), (1, 1)), {"kernel": (3, 3), "stride": 2}
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))

    def pooled(x: Tensor, channels: int) -> Tensor:
        return net.chain(net.pool(x, (3, 3), pad=(1, 1)), (channels, *one))

    def fan(x: Tensor) -> Tensor:
        return net.concat([net.chain(x, (384, (1, 3), (0, 1))), net.chain(x, (384, (3, 1), (1, 0)))])

    x = net.unit(Tensor((batch, 3, 299, 299)), 32, **down)
    x = net.chain(x, (32, (3, 3), (0, 0)), (64, *three))
    x = net.chain(net.pool(x, **down), (80, *one), (192, (3, 3), (0, 0)))
    x = net.pool(x, **down)
    for channels in (32, 64, 64):  # 35 x 35
        branches = [((64, *one),), ((48, *one), (64, (5, 5), (2, 2))), ((64, *one), (96, *three), (96, *three))]
        x = net.concat([*(net.chain(x, *branch) for branch in branches), pooled(x, channels)])
    direct = net.unit(x, 384, **down)
    double = net.unit(net.chain(x, (64, *one), (96, *three)), 96, **down)
    x = net.concat([direct, double, net.pool(x, **down)])
    for n in (128, 160, 160, 192):  # 17 x 17, with factorised 7 x 7 convolutions
        branches = [
            ((192, *one),), ((n, *one), (n, *row), (192, *column)),
            ((n, *one), (n, *column), (n, *row), (n, *column), (192, *row)),
        ]  # fmt: skip
        x = net.concat([*(net.chain(x, *branch) for branch in branches), pooled(x, 192)])
    single = net.unit(net.chain(x, (192, *one)), 320, **down)
    factored = net.unit(net.chain(x, (192, *one), (192, *row), (192, *column)), 192, **down)
    x = net.concat([single, factored, net.pool(x, **down)])
    for _ in range(2):  # 8 x 8, whose 3 x 3 branches fan out
        narrow = net.chain(x, (320, *one))
        wide = fan(net.chain(x, (384, *one)))
        deep = fan(net.chain(x, (448, *one), (384, *three)))
        x = net.concat([narrow, wide, deep, pooled(x, 192)])
    return net.loss(net.fc(net.mean(x), 1000))


def rnnlm(batch: int = 64) -> LayerGraph:
    """Builds the language model: embedding, two LSTM layers of 2,048 units as one layer, projection, loss over 100,000 words.

    The sequence of 256 is not cut in the LSTM; cutting its stacked layers is a wavefront pipeline inside the operator.
    """
    net, steps, units, words = Builder("rnnlm"), 256, 2048, 100_000
    sizes = {"b": batch, "s": steps, "d": units, "v": words}
    x = net.add("embedding", sizes, gemm("bs", "d", "v"), [(Tensor((batch, steps, words)), "b s v")], "b s d")
    # The gates' products of all steps, and the cell's output turned into its next input at each step.
    turned = Term(RELAYOUT, 2.0 * steps, "", sizes=(batch, units), layouts=(("b", "d"), ("b", "e")))
    terms = (*gemm("sb", "d", "e", batch="l", pointwise=3, times=(4, 2)), turned)
    x = net.add("lstm", {"l": 2, "s": steps, "b": batch, "d": units, "e": units}, terms, [(x, "b s e")], "b s d", fixed="s")
    sizes = {"b": batch, "s": steps, "v": words, "d": units}
    x = net.add("gemm", sizes, gemm("bs", "v", "d"), [(x, "b s d")], "b s v")
    net.add("loss", dict(zip("bsv", x.sizes, strict=True)), cross_entropy("bsv", "v"), [(x, "b s v")], "b s v")
    return net.build()


class Transformer(Builder):
    """Layers whose dimensions are letters: batch, sequences l and m, width e, feed-forward f, heads h of k, vocabulary v."""

    def __init__(self, name: str, batch: int, e: int, f: int, h: int) -> None:
        super().__init__(name)
        self.sizes = {"s": 3, "b": batch, "l": 256, "m": 256, "e": e, "f": f, "h": h, "k": 64, "v": 50_000}

    def layer(self, kind: str, inputs: list[Tensor], names: str, terms: tuple[Term, ...]) -> Tensor:
        """Adds a layer whose iteration space is its output."""
        axes = " ".join(names)
        return self.add(kind, {name: self.sizes[name] for name in names}, terms, [(x, axes) for x in inputs], axes)

    def product(self, kind: str, equation: str, inputs: list[Tensor], pointwise: int = 0) -> Tensor:
        """Adds an einsum of two operands.

        The first tensor is the first operand and the second the second; with one tensor the second operand is a parameter,
        or in attention scores the other half of the same tensor, whose layout as second operand is the one that counts.
        """
        operands, out = equation.split("->")
        left, right = operands.split(",")
        shared = [name for name in left if name in right]
        batch, inner = ("".join(n for n in shared if (n in out) == kept) for kept in (True, False))
        rows, columns = "".join(n for n in left if n not in right), "".join(n for n in right if n not in left)
        sizes = {name: self.sizes[name] for name in out + inner}
        reads = [right] if kind == "scores" else [left, right]
        pairs = [(x, " ".join(names)) for x, names in zip(inputs, reads, strict=False)]
        return self.add(kind, sizes, gemm(rows, columns, inner, batch, pointwise), pairs, " ".join(out))

    def embed(self) -> Tensor:
        """Adds an embedding and the sum with positions."""
        x = self.product("embedding", "blv,ve->ble", [Tensor(tuple(self.sizes[name] for name in "blv"))])
        return self.layer("add", [x], "ble", (Term(WORK, 1.0, "ble"),))

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds a sum and its normalisation along the width."""
        return self.layer("norm", [self.layer("add", [x, y], "ble", (Term(WORK, 1.0, "ble"),))], "ble", norm("ble", "e"))

    def attend(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Adds attention: projections split from one tensor, scores, softmax, weighted values, the output product."""
        if memory is not None:  # query, key and value in one tensor; the stack is not cut
            sizes = {"s": 1} | {name: self.sizes[name] for name in "ble"}
            x = self.add("stack", sizes, (), [(x, "b l e"), (memory, "b l e")], "s b l e", fixed="s", shape={"s": 3})
        x = self.product("qkv", f"{'s' * (memory is not None)}ble,shek->sbhlk", [x])
        sizes = {"s": 1} | {name: self.sizes[name] for name in "bhlk"}
        qkv = self.add("unstack", sizes, (), [(x, "s b h l k")], "b h l k", fixed="s")
        scores = self.product("scores", "bhlk,bhmk->bhlm", [qkv])
        weights = self.layer("softmax", [scores], "bhlm", softmax("bhlm", "m", self.sizes["m"]))
        return self.product("output", "bhlk,hek->ble", [self.product("values", "bhlm,bhmk->bhlk", [weights, qkv])])

    def feed_forward(self, x: Tensor) -> Tensor:
        """Adds two products, activation and dropout between."""
        return self.product("ffn", "blf,fe->ble", [self.product("ffn", "ble,ef->blf", [x], pointwise=2)])


def transformer(batch: int = 64) -> LayerGraph:
    """Builds the base Transformer, 6 encoder and 6 decoder layers normalised after each residual sum: 204 layers.

    Attention to the encoder stacks its inputs first, and key and value, being the same tensor, are stacked from one. Reading
    several of the split projections is charged once.
    """
    net = Transformer("transformer", batch, e=512, f=2048, h=8)
    encoded = net.embed()
    for _ in range(6):
        encoded = net.residual(encoded, net.attend(encoded))
        encoded = net.residual(encoded, net.feed_forward(encoded))
    decoded = net.embed()
    for _ in range(6):
        decoded = net.residual(decoded, net.attend(decoded))
        decoded = net.residual(decoded, net.attend(decoded, encoded))
        decoded = net.residual(decoded, net.feed_forward(decoded))
    scores = net.product("projection", "ble,ev->blv", [decoded])
    net.layer("loss", [scores], "blv", cross_entropy("blv", "v"))
    return net.build()


NETWORKS: dict[str, Callable[[], LayerGraph]] = {
    "alexnet": alexnet, "inception_v3": inception_v3, "resnet101": resnet101, "rnnlm": rnnlm, "transformer": transformer,
}  # fmt: skip
"""By name, with the paper's batch."""
