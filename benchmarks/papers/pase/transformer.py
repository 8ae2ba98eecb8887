"""The paper's Transformer as a layer graph: 6 encoder and 6 decoder layers, normalised after each residual sum.

Base: 512 wide, feed-forward 2048, 8 heads of 64; large: 1024, 4096, 16 heads of 64; vocabulary 50,000, sequence 256, batch 64.
Self-attention makes its three projections from one input in one product; attention to the encoder stacks its inputs first, and
key and value, being the same tensor, are stacked from one. Reading several of the split projections is charged once.
204 layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.pase import kinds
from benchmarks.papers.pase.builder import GraphBuilder, Tensor
from benchmarks.papers.pase.layers import Dim, LayerGraph, Layout, Term

DEPTH = 6
"""Layers of the encoder, and of the decoder."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Transformer; the letters are the names of the dimensions.

    Attributes:
        b: Batch.
        l: Sequence.
        e: Width.
        f: Feed-forward width.
        h: Heads.
        k: Width of a head.
        v: Vocabulary.
    """

    b: int
    l: int = 256  # noqa: E741
    e: int = 512
    f: int = 2048
    h: int = 8
    k: int = 64
    v: int = 50_000

    def size(self, name: str) -> int:
        """Size of a dimension: ``m`` is the sequence that attention looks at, ``s`` the stack of query, key and value."""
        return 3 if name == "s" else self.l if name == "m" else int(getattr(self, name))


def transformer(batch: int = 64) -> LayerGraph:
    """The base model."""
    return _transformer("transformer", Shape(batch))


def transformer_large(batch: int = 64) -> LayerGraph:
    """The large model."""
    return _transformer("transformer_large", Shape(batch, e=1024, f=4096, h=16))


def _transformer(name: str, shape: Shape) -> LayerGraph:
    """The whole network."""
    net = _Builder(name, shape)
    encoded = net.embed()
    for _ in range(DEPTH):
        encoded = net.residual(encoded, net.attend(net.project(encoded)))
        encoded = net.residual(encoded, net.feed_forward(encoded))
    decoded = net.embed()
    for _ in range(DEPTH):
        decoded = net.residual(decoded, net.attend(net.project(decoded)))
        decoded = net.residual(decoded, net.attend(net.project(net.stack(decoded, encoded), stacked=True)))
        decoded = net.residual(decoded, net.feed_forward(decoded))
    scores = net.product("projection", "ble,ev->blv", [decoded])
    net.layer("loss", [scores], "blv", kinds.softmax_cross_entropy("blv", "v"))
    return net.build()


class _Builder(GraphBuilder):
    """Layers whose dimensions are letters."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__(name)
        self._shape = shape

    def embed(self) -> Tensor:
        """Embedding, a product with a one-hot input, and the sum with positions."""
        x = self.product("embedding", "blv,ve->ble", [Tensor(tuple(self._shape.size(c) for c in "blv"))])
        return self.layer("add", [x], "ble", kinds.elementwise("ble"))

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum and normalisation along the width."""
        return self.layer("norm", [self.layer("add", [x, y], "ble", kinds.elementwise("ble"))], "ble", kinds.norm("ble", "e"))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Two products, activation and dropout between."""
        return self.product("ffn", "blf,fe->ble", [self.product("ffn", "ble,ef->blf", [x], pointwise=2)])

    def stack(self, query: Tensor, memory: Tensor) -> Tensor:
        """Query, key and value in one tensor; the stack is not cut."""
        dims = (Dim("s", 1, splittable=False), *self._dims("ble"))
        inputs = [(x, _layout("ble")) for x in (query, memory)]
        return self.add(self._name("stack"), "stack", dims, (), inputs, self._output("sble"))

    def project(self, x: Tensor, *, stacked: bool = False) -> Tensor:
        """Query, key and value of all heads, split from one tensor."""
        x = self.product("qkv", f"{'s' * stacked}ble,shek->sbhlk", [x])
        dims = (Dim("s", 1, splittable=False), *self._dims("bhlk"))
        return self.add(self._name("unstack"), "unstack", dims, (), [(x, _layout("sbhlk"))], self._output("bhlk"))

    def attend(self, qkv: Tensor) -> Tensor:
        """Scores, softmax, weighted values and the output product."""
        scores = self.product("scores", "bhlk,bhmk->bhlm", [qkv])
        weights = self.layer("softmax", [scores], "bhlm", kinds.softmax("bhlm", "m", self._shape.size("m")))
        values = self.product("values", "bhlm,bhmk->bhlk", [weights, qkv])
        return self.product("output", "bhlk,hek->ble", [values])

    def product(self, kind: str, equation: str, inputs: list[Tensor], *, pointwise: int = 0) -> Tensor:
        """Einsum of two operands.

        The first tensor is the first operand and the second the second; with one tensor the second operand is a parameter,
        or in attention scores the other half of the same tensor, whose layout as second operand is the one that counts.
        """
        operands, out = equation.split("->")
        left, right = operands.split(",")
        shared = [name for name in left if name in right]
        batch, inner = [n for n in shared if n in out], [n for n in shared if n not in out]
        rows, columns = [n for n in left if n not in right], [n for n in right if n not in left]
        terms = kinds.gemm(rows, columns, inner, batch=batch, pointwise=pointwise)
        reads = [right] if kind == "scores" else [left, right]
        pairs = [(x, _layout(names)) for x, names in zip(inputs, reads, strict=False)]
        return self.add(self._name(kind), "gemm", self._dims([*out, *inner]), terms, pairs, self._output(out))

    def layer(self, kind: str, inputs: list[Tensor], names: str, terms: tuple[Term, ...]) -> Tensor:
        """A layer whose iteration space is its output."""
        pairs = [(x, _layout(names)) for x in inputs]
        return self.add(self._name(kind), kind, self._dims(names), terms, pairs, self._output(names))

    def _name(self, kind: str) -> str:
        return f"{len(self._layers):03d}.{kind}"

    def _dims(self, names: str | list[str]) -> tuple[Dim, ...]:
        return tuple(Dim(name, self._shape.size(name)) for name in names)

    def _output(self, names: str) -> list[tuple[int, tuple[str, ...]]]:
        return [(self._shape.size(name), (name,)) for name in names]


def _layout(names: str) -> Layout:
    """One dimension an axis."""
    return tuple((name,) for name in names)
