"""Models and strategies that run on emulated hosts: of every kind, for what a model is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlplace.plan.schedule import SCHEDULES, V
from rlplace.plan.strategy import HEADS
from rlplace.strategy.drafts import Draft, Mesh, joined, plain_draft

HOSTS = 4


class Model(NamedTuple):
    """A model to run.

    Attributes:
        text: MODEL, as the command line takes it.
        batch: Samples of a step.
        seq: Positions of a sample.
        flops: Of a device whose blocks take far longer than this machine takes for them.
        kind: Of its strategies: a key of `KINDS`.
        slower: Of each host, by how much.
    """

    text: str
    batch: int = 16
    seq: int = 16
    flops: float = 3e9
    kind: str = "plain"
    slower: tuple[float, ...] = (1.0,) * HOSTS


_LLAMA = "hidden_size=256,intermediate_size=768,num_attention_heads=8,num_key_value_heads=8,num_hidden_layers=8,vocab_size=512"
_SMALL = "hidden_size=256,num_hidden_layers=8,num_attention_heads=8,vocab_size=512"
_QWEN3 = "hidden_size=256,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,vocab_size=512"
MODELS = {
    "llama": Model(f"hf:llama,{_LLAMA}"),
    "gpt2": Model(
        "hf:gpt2,n_layer=8,n_embd=256,n_head=8,vocab_size=512,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    ),
    "bert": Model(
        "hf:bert,num_hidden_layers=8,hidden_size=256,intermediate_size=1024,num_attention_heads=8,vocab_size=512,"
        "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    ),
    "opt": Model(
        f"hf:opt,{_SMALL},ffn_dim=1024,word_embed_proj_dim=256,max_position_embeddings=64,dropout=0,attention_dropout=0"
    ),
    "qwen2": Model(f"hf:qwen2,{_SMALL},intermediate_size=768,num_key_value_heads=4"),
    "mixture": Model(
        f"hf:qwen3_moe,{_QWEN3},moe_intermediate_size=128,num_experts=16,num_experts_per_tok=4", 16, 32, 1e9, "experts"
    ),
    "long": Model(f"hf:llama,{_LLAMA.replace('layers=8', 'layers=4')}", 4, 128, 1e9, "context"),
    "unlike": Model(f"hf:llama,{_LLAMA}", kind="unlike", slower=(1.0, 1.0, 1.7, 1.7)),
}  # fmt: skip

Drafts = Iterator[tuple[str, Draft]]


class Shapes:
    """Strategies on the hosts, with names.

    Args:
        forward_s: Of each block; stages are cut where the forward has done its share.
        batch: Samples of a step.
        first: Host.
    """

    def __init__(self, forward_s: Sequence[float], batch: int, first: int = 0) -> None:
        self._forward_s, self._batch, self._first = forward_s, batch, first
        self._done, self._blocks = np.cumsum(forward_s) / sum(forward_s), len(forward_s)

    def on(self, first: int, samples: int) -> Shapes:
        """Returns those on the hosts from this one on, for so many samples."""
        return Shapes(self._forward_s, samples, first)

    def flat(self, name: str, passes: int, recompute: int = 0, **mesh: Any) -> tuple[str, Draft]:
        """Returns a strategy of one stage."""
        place = _mesh(self._first, mesh)
        draft = plain_draft((0, self._blocks), [place], microbatch=(self._size(place, passes),), microbatches=(passes,))
        again = bytes([recompute]) * self._blocks
        return f"{name} x{passes}{' full' * (recompute > 0)}", replace(draft, recompute=again)

    def chain(self, name: str, schedule: str, places: int, passes: int, **mesh: Any) -> tuple[str, Draft]:
        """Returns a pipeline over so many places."""
        row = [_mesh(self._first + at * _width(mesh), mesh) for at in range(places)]
        turn = list(range(places))
        order = turn
        if schedule in ("looped_bfs", "interleaved_1f1b", "zbv"):  # two chunks a device
            order = turn + (turn[::-1] if SCHEDULES[schedule].layout == V else turn)
        inner = [int(np.abs(self._done - part / len(order)).argmin()) + 1 for part in range(1, len(order))]
        draft = plain_draft(
            (0, *inner, self._blocks), row, order,
            microbatch=(self._size(row[0], passes),), microbatches=(passes,), schedule=schedule,
        )  # fmt: skip
        return f"{schedule} {places} x{passes}{name}", draft

    def _size(self, place: Mesh, passes: int) -> int:
        return self._batch // place.data_degree // passes


def _mesh(at: int, mesh: dict[str, Any]) -> Mesh:
    """Returns the mesh of these sizes that begins at a host."""
    return Mesh(tuple(range(at, at + _width(mesh))), **mesh)


def _width(mesh: dict[str, Any]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in ("replicate", "shard", "context", "tensor"))


def plain(shapes: Shapes) -> Drafts:
    """Yields strategies with the axes that every model has."""
    flat, chain = shapes.flat, shapes.chain
    for passes in (1, 4):
        yield flat("one device", passes)
        yield flat("replicate", passes, replicate=HOSTS)
        for level in (1, 2, 3):
            yield flat(f"shard {level}", passes, shard=HOSTS, sharding=level)
        yield flat("tensor", passes, tensor=HOSTS)
        yield flat("hybrid 3", passes, replicate=2, shard=2, sharding=3)
        yield flat("tensor + replicate", passes, tensor=2, replicate=2)
        yield flat("tensor + shard", passes, tensor=2, shard=2, sharding=3)
        yield flat("two devices", passes, replicate=2)
    for mesh in ({"replicate": HOSTS}, {"shard": HOSTS, "sharding": 3}, {"tensor": HOSTS}):
        yield flat(next(iter(mesh)), 1, 2, **mesh)
    wide = {"replicate": {"replicate": 2}, "shard": {"shard": 2, "sharding": 1}, "tensor": {"tensor": 2}}
    for schedule in ("gpipe", "1f1b", "interleaved_zero_bubble", "looped_bfs", "interleaved_1f1b", "zbv"):
        for places, passes in ((4, 4), (4, 8), (2, 4)):
            yield chain("", schedule, places, passes)
        for axis, sizes in wide.items() if schedule in ("1f1b", "zbv") else ():
            yield chain(f" + {axis}", schedule, 2, 4, **sizes)


def _undivided(shapes: Shapes) -> Drafts:
    """Yields strategies that divide neither experts nor positions."""
    flat = shapes.flat
    yield flat("one device", 1)
    yield flat("replicate", 1, replicate=HOSTS)
    yield flat("tensor", 1, tensor=HOSTS)
    for level in (1, 3):
        yield flat(f"shard {level}", 1, shard=HOSTS, sharding=level)


def experts(shapes: Shapes) -> Drafts:
    """Yields strategies of a mixture: experts spread over all hosts or over pairs, at every level, and not at all."""
    flat, chain = shapes.flat, shapes.chain
    yield from _undivided(shapes)
    for degree in (2, 4):
        for level in (1, 2, 3):
            yield flat(f"shard {level} + expert {degree}", 1, shard=HOSTS, sharding=level, expert=degree)
        for level in (1, 3):
            yield flat(f"shard {level} + expert {degree}", 2, shard=HOSTS, sharding=level, expert=degree)
            yield flat(f"tensor + shard {level} + expert {degree}", 1, tensor=2, shard=2, sharding=level, expert=degree)
        yield flat(f"shard + expert {degree}", 1, 2, shard=HOSTS, sharding=3, expert=degree)
    yield flat("tensor + expert 4", 1, tensor=HOSTS, expert=4)
    yield flat("tensor + expert 4", 2, tensor=HOSTS, expert=4)
    yield flat("tensor + replicate + expert 2", 1, tensor=2, replicate=2, expert=2)
    for level in (1, 3):
        yield flat(f"hybrid {level} + expert 2", 1, replicate=2, shard=2, sharding=level, expert=2)
    yield flat("context + shard 1 + expert 4", 1, context=2, shard=2, sharding=1, expert=4)
    yield chain("", "1f1b", 4, 4)
    yield chain("", "zbv", 2, 4)
    for schedule in ("1f1b", "zbv"):
        yield chain(" + shard + expert 2", schedule, 2, 4, shard=2, sharding=1, expert=2)
        yield chain(" + tensor + expert 2", schedule, 2, 4, tensor=2, expert=2)


def context(shapes: Shapes) -> Drafts:
    """Yields strategies of long samples: positions divided by all hosts or by pairs, beside every axis, and not at all."""
    flat, chain = shapes.flat, shapes.chain
    yield from _undivided(shapes)
    for passes in (1, 2, 4):
        yield flat("context 4", passes, context=4)
    for passes in (1, 2):
        yield flat("context 2 + replicate", passes, context=2, replicate=2)
        for level in (1, 2, 3):
            yield flat(f"context 2 + shard {level}", passes, context=2, shard=2, sharding=level)
        yield flat("context 2 + tensor", passes, context=2, tensor=2)
    for passes in (1, 2):
        yield flat("context 4 heads", passes, context=4, context_method=HEADS)
    yield flat("context 2 heads + replicate", 1, context=2, replicate=2, context_method=HEADS)
    yield flat("context 2 heads + tensor", 1, context=2, tensor=2, context_method=HEADS)
    for level in (1, 3):
        yield flat(f"context 2 heads + shard {level}", 1, context=2, shard=2, sharding=level, context_method=HEADS)
    yield flat("context 4", 1, 2, context=4)
    yield flat("context 2 + shard", 1, 2, context=2, shard=2, sharding=3)
    yield flat("context 2 + tensor", 1, 2, context=2, tensor=2)
    yield flat("context 2", 1, context=2)
    yield flat("tensor + replicate", 1, tensor=2, replicate=2)
    yield chain("", "1f1b", 4, 4)
    for schedule in ("1f1b", "zbv"):
        yield chain("", schedule, 2, 4)
        yield chain(" + tensor", schedule, 2, 4, tensor=2)


def unlike(shapes: Shapes) -> Drafts:
    """Yields pipelines beside each other: the quick pair of hosts has most of the samples; and strategies of one pipeline."""
    quick, slow = shapes.on(0, 10), shapes.on(2, 6)
    pair = {"replicate": {"replicate": 2}, "shard 3": {"shard": 2, "sharding": 3}, "tensor": {"tensor": 2}}
    ahead = {axis: quick.flat(axis, 1, **mesh) for axis, mesh in pair.items()}
    behind = {axis: slow.flat(axis, 1, **mesh) for axis, mesh in pair.items()}
    for schedule in ("1f1b", "zbv"):
        ahead[schedule], behind[schedule] = quick.chain("", schedule, 2, 5), slow.chain("", schedule, 2, 6)
    pairs = [(one, one) for one in ahead] + [("replicate", "1f1b"), ("shard 3", "tensor"), ("zbv", "replicate")]
    for one, other in pairs:
        yield f"{ahead[one][0]} beside {behind[other][0]}", joined((ahead[one][1], behind[other][1]))
    half = shapes.on(0, 8).flat("half", 1, replicate=2), shapes.on(2, 8).flat("half", 1, replicate=2)
    yield "half beside half", joined(draft for _, draft in half)
    three = shapes.on(0, 5).flat("5", 1), shapes.on(1, 5).flat("5", 1), slow.chain("", "1f1b", 2, 6)
    yield "5 beside 5 beside 1f1b 2 x6", joined(draft for _, draft in three)
    yield shapes.flat("replicate", 1, replicate=HOSTS)
    yield shapes.flat("shard 3", 1, shard=HOSTS, sharding=3)
    yield shapes.flat("tensor", 1, tensor=HOSTS)
    yield shapes.flat("two devices", 1, replicate=2)
    yield shapes.chain("", "zbv", 2, 4)
    yield shapes.chain("", "1f1b", 4, 8)
    yield shapes.chain("", "zbv", 4, 8)


KINDS = {"plain": plain, "experts": experts, "context": context, "unlike": unlike}
