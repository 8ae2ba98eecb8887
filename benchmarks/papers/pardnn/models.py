"""The paper's models at its scale, as problems: Word-RNN, Char-CRN, WRN and TRN, written op by op (`tape`).

The layer counts, widths and sequence lengths are the paper's (its Table 3). The paper prints neither the ops nor their times,
so these graphs are reconstructions from the models' definitions: every kernel of the forward pass and its gradients, summed
weight gradients, updates. What makes TensorFlow's graphs larger than that, constants, shapes and reshapes, is added as small
nodes, as many a kernel as bring the count near the paper's. Vocabularies and the optimizer (plain SGD for the recurrent models,
momentum for WRN, Adam for TRN) are chosen so that parameters are near the paper's and one sample fits a device of 32 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.papers.pardnn.tape import Chip, Tape
from rlplace.problem import Problem

FLOAT = 4


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper and what the paper says of it.

    Attributes:
        build: ``build(batch, num_devices)`` gives the problem.
        nodes, parallelism, communication_ratio: The paper's node count, DoP and CCR.
        parameters: Their number.
    """

    build: Callable[..., Problem]
    nodes: int
    parallelism: float
    communication_ratio: float
    parameters: float


def _lstm_step(
    tape: Tape, x: int, state: tuple[int, int], weight: int, bias: int, batch: int, width: int, hidden: int
) -> tuple[int, int]:
    """One LSTM cell at one step: new (hidden, cell) state; `width` is that of `x`."""
    hidden_state, cell = state
    joined = tape.concat([x, hidden_state])
    gates = tape.matmul(joined, weight, 4 * batch * hidden * FLOAT, 2.0 * batch * (width + hidden) * 4 * hidden)
    gates = tape.op([gates, bias], tape.size(gates), {0: None, 1: []})[0]
    i, j, f, o = tape.split(gates, 4)
    kept = tape.multiply(cell, tape.unary(tape.unary(f)))  # the forget bias is an op of its own
    cell = tape.add(kept, tape.multiply(tape.unary(i), tape.unary(j)))
    return tape.multiply(tape.unary(cell), tape.unary(o)), cell


def _lstm_stack(tape: Tape, inputs: list[int], batch: int, width: int, hidden: int, layers: int) -> list[int]:
    """LSTM layers unrolled over a sequence; the top layer's states."""
    for _ in range(layers):
        weight, bias = tape.weight((width + hidden) * 4 * hidden * FLOAT), tape.weight(4 * hidden * FLOAT)
        state = (tape.source(batch * hidden * FLOAT), tape.source(batch * hidden * FLOAT))
        outputs = []
        for x in inputs:
            state = _lstm_step(tape, x, state, weight, bias, batch, width, hidden)
            outputs.append(state[0])
        inputs, width = outputs, hidden
    return inputs


def _softmax_loss(tape: Tape, states: list[int], batch: int, hidden: int, vocabulary: int) -> int:
    rows = batch * len(states)
    logits = tape.matmul(
        tape.concat(states),
        tape.weight(hidden * vocabulary * FLOAT),
        rows * vocabulary * FLOAT,
        2.0 * rows * hidden * vocabulary,
    )
    logits = tape.op([logits, tape.weight(vocabulary * FLOAT)], tape.size(logits), {0: None, 1: []})[0]
    return tape.reduce(tape.unary(logits), FLOAT)


def word_rnn(
    batch: int = 16,
    num_devices: int = 2,
    *,
    layers: int = 8,
    hidden: int = 2048,
    steps: int = 28,
    vocabulary: int = 17_000,
    small: float = 0.38,
    chip: Chip | None = None,
) -> Problem:
    """The word-level language model: an embedding, LSTM layers unrolled over the sequence, a softmax over the vocabulary."""
    tape = Tape(chip or Chip(), small=small)
    table = tape.weight(vocabulary * hidden * FLOAT)
    words = tape.op([tape.source(batch * steps * 8), table], [batch * hidden * FLOAT] * steps, {}, with_weight=True)
    states = _lstm_stack(tape, words, batch, hidden, hidden, layers)
    tape.backward(_softmax_loss(tape, states, batch, hidden, vocabulary))
    return tape.problem("word_rnn", num_devices, batch)


def char_crn(
    batch: int = 8,
    num_devices: int = 2,
    *,
    layers: int = 8,
    hidden: int = 2048,
    embedding: int = 15,
    steps: int = 28,
    characters: int = 50,
    vocabulary: int = 10_000,
    small: float = 1.2,
    chip: Chip | None = None,
) -> Problem:
    """The character-aware model of Kim et al. (2016): convolutions over the characters of each word, a highway layer, LSTMs."""
    tape = Tape(chip or Chip(), small=small)
    widths = [(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)]
    features = sum(f for _, f in widths)
    filters = [(tape.weight(k * embedding * f * FLOAT), tape.weight(f * FLOAT)) for k, f in widths]
    gate, transform = (tape.weight(features * features * FLOAT) for _ in range(2))
    words = []
    for _ in range(steps):
        letters = tape.source(batch * characters * embedding * FLOAT)
        pooled = []
        for (k, f), (weight, bias) in zip(widths, filters, strict=True):
            length = characters - k + 1
            size = batch * length * f * FLOAT
            convolved = tape.matmul(letters, weight, size, 2.0 * batch * length * k * embedding * f)
            biased = tape.op([convolved, bias], size, {0: None, 1: []})[0]
            active = tape.unary(biased)
            pooled.append(tape.op([active], batch * f * FLOAT, {0: [active, -1]})[0])
        word = tape.concat(pooled)
        flops = 2.0 * batch * features * features
        carry = tape.unary(tape.matmul(word, gate, tape.size(word), flops))
        changed = tape.unary(tape.matmul(word, transform, tape.size(word), flops))
        words.append(tape.add(tape.multiply(carry, changed), tape.multiply(tape.unary(carry), word)))
    states = _lstm_stack(tape, words, batch, features, hidden, layers)
    tape.backward(_softmax_loss(tape, states, batch, hidden, vocabulary))
    return tape.problem("char_crn", num_devices, batch)


def _batch_norm(tape: Tape, x: int, channels: int) -> int:
    """Unfused batch normalisation: moments, scale and shift, each an op."""
    vector = channels * FLOAT
    scale, shift = tape.weight(vector), tape.weight(vector)
    mean = tape.reduce(x, vector)
    variance = tape.reduce(tape.op([x, mean], tape.size(x), {0: [x, mean], 1: [x, mean]})[0], vector)
    factor = tape.multiply(tape.unary(tape.unary(variance)), scale)  # epsilon, reciprocal root
    scaled = tape.multiply(x, factor)
    offset = tape.add(tape.multiply(mean, factor), shift)
    return tape.add(scaled, offset)


def wrn(
    batch: int = 1,
    num_devices: int = 2,
    *,
    units: int = 101,
    widening: int = 14,
    image: int = 32,
    classes: int = 100,
    small: float = 8.62,
    chip: Chip | None = None,
) -> Problem:
    """A wide residual network of 6 x `units` + 4 layers in three stages, on images of 32 x 32."""
    tape = Tape(chip or Chip(), small=small, state_factor=2.0)
    side, before = image, 16
    x = tape.source(batch * side * side * 3 * FLOAT)
    x = _conv(tape, x, batch, side, 3, before, 3)
    for stage, base in enumerate((16, 32, 64)):
        channels = base * widening
        for unit in range(units):
            if unit == 0 and stage > 0:
                side //= 2
            y = tape.unary(_batch_norm(tape, x, before))
            shortcut = x if unit else _conv(tape, y, batch, side, before, channels, 1)
            y = _conv(tape, y, batch, side, before, channels, 3)
            y = _conv(tape, tape.unary(_batch_norm(tape, y, channels)), batch, side, channels, channels, 3)
            x, before = tape.add(y, shortcut), channels
    pooled = tape.reduce(tape.unary(_batch_norm(tape, x, before)), batch * before * FLOAT)
    logits = tape.matmul(pooled, tape.weight(before * classes * FLOAT), batch * classes * FLOAT, 2.0 * batch * before * classes)
    tape.backward(tape.reduce(tape.unary(logits), FLOAT))
    return tape.problem("wrn", num_devices, batch)


def _conv(tape: Tape, x: int, batch: int, side: int, before: int, channels: int, kernel: int) -> int:
    weight = tape.weight(kernel * kernel * before * channels * FLOAT)
    flops = 2.0 * batch * side * side * kernel * kernel * before * channels
    return tape.matmul(x, weight, batch * side * side * channels * FLOAT, flops)


def trn(
    batch: int = 1,
    num_devices: int = 2,
    *,
    layers: int = 52,
    model: int = 2048,
    inner: int = 4098,
    heads: int = 16,
    length: int = 32,
    vocabulary: int = 10_000,
    small: float = 28.2,
    chip: Chip | None = None,
) -> Problem:
    """An encoder-decoder transformer, half of its layers in each, its softmax and normalisation unfused."""
    tape = Tape(chip or Chip(), small=small, state_factor=3.0)
    rows, table = batch * length, tape.weight(vocabulary * model * FLOAT)

    def embed() -> int:
        return tape.op([tape.source(rows * 8), table], rows * model * FLOAT, {}, with_weight=True)[0]

    def linear(x: int, width: int, out: int) -> int:
        weight = tape.weight(width * out * FLOAT)
        return tape.matmul(x, weight, rows * out * FLOAT, 2.0 * rows * width * out)

    def attention(x: int, memory: int) -> int:
        query, key, value = (transposed(linear(t, model, model)) for t in (x, memory, memory))
        flops, size = 2.0 * rows * length * model, rows * length * heads * FLOAT
        scores = tape.op([query, key], size, {0: [key], 1: [query]}, flops=flops)[0]
        masked = tape.unary(tape.unary(scores))  # scaled, masked
        largest = tape.op([masked], rows * heads * FLOAT, {})[0]
        raised = tape.unary(tape.op([masked, largest], size, {0: None})[0])
        weights = tape.op([raised, tape.reduce(raised, rows * heads * FLOAT)], size, {0: [-1], 1: [-1]})[0]
        kept = tape.unary(weights)  # dropout
        context = tape.op([kept, value], tape.size(query), {0: [value], 1: [kept]}, flops=flops)[0]
        return linear(transposed(context), model, model)

    def transposed(x: int) -> int:
        return tape.op([x], tape.size(x), {0: []})[0]

    def add_and_norm(x: int, y: int) -> int:
        summed = tape.add(x, tape.unary(y))  # dropout
        mean = tape.reduce(summed, rows * FLOAT)
        variance = tape.reduce(tape.op([summed, mean], tape.size(x), {0: [summed, mean], 1: [summed, mean]})[0], rows * FLOAT)
        normal = tape.multiply(tape.op([summed, mean], tape.size(x), {0: None, 1: []})[0], tape.unary(variance))
        return tape.add(tape.multiply(normal, tape.weight(model * FLOAT)), tape.weight(model * FLOAT))

    def feed_forward(x: int) -> int:
        return linear(tape.unary(linear(x, model, inner)), inner, model)

    x = embed()
    for _ in range(layers // 2):
        x = add_and_norm(x, attention(x, x))
        x = add_and_norm(x, feed_forward(x))
    memory, y = x, embed()
    for _ in range(layers - layers // 2):
        y = add_and_norm(y, attention(y, y))
        y = add_and_norm(y, attention(y, memory))
        y = add_and_norm(y, feed_forward(y))
    logits = linear(y, model, vocabulary)
    tape.backward(tape.reduce(tape.unary(logits), FLOAT))
    return tape.problem("trn", num_devices, batch)


MODELS = {
    "word_rnn": PaperModel(word_rnn, 10_578, 10.45, 14.5, 0.34e9),
    "char_crn": PaperModel(char_crn, 22_748, 49.0, 57.0, 0.23e9),
    "wrn": PaperModel(wrn, 187_742, 1.16, 13.02, 1.91e9),
    "trn": PaperModel(trn, 204_792, 2.0, 13.7, 1.99e9),
}
"""Model name to its builder and the paper's figures (small variants)."""
