"""The paper's RNN language model: embedding, two LSTM layers of 2048 units as one layer, projection, loss over 100,000 words.

Sequence 256, batch 64 in the paper's tables. The embedding is a product with a one-hot input. The LSTM's sequence is not cut;
cutting its layers is a wavefront pipeline inside the operator.
"""

from __future__ import annotations

from benchmarks.papers.pase import kinds
from benchmarks.papers.pase.builder import GraphBuilder, Tensor
from benchmarks.papers.pase.layers import Dim, LayerGraph


def rnnlm(
    batch: int = 64, *, steps: int = 256, units: int = 2048, vocabulary: int = 100_000, lstm_layers: int = 2
) -> LayerGraph:
    """The network: 4 layers in a chain."""
    net = GraphBuilder("rnnlm")
    dims: tuple[Dim, ...] = (Dim("b", batch), Dim("s", steps), Dim("d", units), Dim("v", vocabulary))
    hidden = ((batch, ("b",)), (steps, ("s",)), (units, ("d",)))
    words = Tensor((batch, steps, vocabulary))
    read = (("b",), ("s",), ("v",))
    x = net.add("embedding", "embedding", dims, kinds.gemm("bs", "d", "v"), [(words, read)], hidden)

    dims = (
        Dim("l", lstm_layers),
        Dim("s", steps, splittable=False),
        Dim("b", batch),
        Dim("d", units),
        Dim("e", units),
    )
    terms = kinds.lstm("l", "s", "b", "d", "e", (lstm_layers, steps, batch, units))
    x = net.add("lstm", "lstm", dims, terms, [(x, (("b",), ("s",), ("e",)))], hidden)

    dims = (Dim("b", batch), Dim("s", steps), Dim("v", vocabulary), Dim("d", units))
    scores = ((batch, ("b",)), (steps, ("s",)), (vocabulary, ("v",)))
    x = net.add("projection", "gemm", dims, kinds.gemm("bs", "v", "d"), [(x, (("b",), ("s",), ("d",)))], scores)

    dims = dims[:3]
    net.add("loss", "loss", dims, kinds.softmax_cross_entropy("bsv", "v"), [(x, tuple((n,) for n in "bsv"))], scores)
    return net.build()
