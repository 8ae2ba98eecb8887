"""Captured models to draw problems from: a bounded number of random variants of each family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

if TYPE_CHECKING:
    from rlplace.cluster.spec import Cluster
    from rlplace.graph.opgraph import OpGraph
    from rlplace.problem import Problem

MOST_GRAPHS = 32
"""Captured graphs that are kept in memory, a few MB each."""

Recipe = tuple[str, int, int]
"""MODEL, batch and sequence length."""


def _pick(rng: Generator, *values: int) -> int:
    return int(rng.choice(values))


def _inception(rng: Generator) -> Recipe:
    blocks, width, branches = _pick(rng, 2, 3, 4, 6, 9), _pick(rng, 32, 64, 96), _pick(rng, 4, 6, 8)
    return f"zoo:inception,blocks={blocks},width={width},branches={branches}", _pick(rng, 4, 8, 16, 32), 64


def _lstm(rng: Generator) -> Recipe:
    return (
        f"zoo:lstm,layers={_pick(rng, 2, 4, 6, 8)},width={_pick(rng, 512, 1024, 2048)}",
        _pick(rng, 16, 64),
        _pick(rng, 32, 64),
    )


def _transformer(rng: Generator) -> Recipe:
    layers, width = _pick(rng, 2, 3, 4, 6), _pick(rng, 256, 512, 1024)
    return f"zoo:transformer,layers={layers},width={width},feedforward={4 * width}", _pick(rng, 8, 32), _pick(rng, 64, 128, 256)


def _moe_toy(rng: Generator) -> Recipe:
    layers, experts, width = _pick(rng, 2, 3, 4, 6), _pick(rng, 4, 6, 8, 12), _pick(rng, 256, 512, 1024)
    return f"zoo:moe_toy,layers={layers},experts={experts},width={width}", _pick(rng, 1024, 4096, 8192), 64


def _mlp(rng: Generator) -> Recipe:
    return f"zoo:mlp,layers={_pick(rng, 6, 8, 12, 16)},width={_pick(rng, 1024, 2048, 4096)}", _pick(rng, 512, 4096), 64


def _gpt2(rng: Generator) -> Recipe:
    layers, width = _pick(rng, 2, 3, 4, 6, 8), _pick(rng, 256, 512, 768, 1024)
    return f"hf:gpt2,n_layer={layers},n_embd={width},n_head={width // 64}", _pick(rng, 2, 4, 8), _pick(rng, 128, 256, 512)


def _bert(rng: Generator) -> Recipe:
    layers, width = _pick(rng, 2, 4, 6, 8), _pick(rng, 256, 512, 768, 1024)
    sizes = f"hidden_size={width},num_attention_heads={width // 64},intermediate_size={4 * width}"
    return f"hf:bert,num_hidden_layers={layers},{sizes}", _pick(rng, 2, 4, 8), _pick(rng, 128, 256, 512)


def _vit(rng: Generator) -> Recipe:
    layers, width = _pick(rng, 3, 4, 6, 8), _pick(rng, 384, 768, 1024)
    sizes = f"hidden_size={width},num_attention_heads={width // 64},intermediate_size={4 * width}"
    return f"hf:vit,num_hidden_layers={layers},{sizes}", _pick(rng, 4, 8, 16), 64


def _resnet(rng: Generator) -> Recipe:
    depths = ("2/2/2/2", "3/4/6/3", "3/4/9/3")[int(rng.integers(3))]
    return f"hf:resnet,depths={depths}", _pick(rng, 4, 8, 16, 32), 64


FAMILIES: dict[str, Callable[[Generator], Recipe]] = {
    "zoo:inception": _inception,
    "zoo:lstm": _lstm,
    "zoo:transformer": _transformer,
    "zoo:moe_toy": _moe_toy,
    "zoo:mlp": _mlp,
    "hf:gpt2": _gpt2,
    "hf:bert": _bert,
    "hf:vit": _vit,
    "hf:resnet": _resnet,
}
"""Families of captured models that training sees, with a draw of depth, width and batch."""

FAMILY_SHARES = {
    "zoo:inception": 5, "zoo:moe_toy": 4, "zoo:transformer": 3, "zoo:lstm": 2, "zoo:mlp": 1, "hf:gpt2": 3, "hf:bert": 2,
    "hf:vit": 2, "hf:resnet": 2,
}  # fmt: skip
"""How many of 24 variants belong to each family."""


def variant(families: tuple[str, ...], seed: int, slot: int) -> tuple[str, Recipe]:
    """Family and recipe of a numbered variant; families take turns by their shares."""
    turns = [name for name in families for _ in range(FAMILY_SHARES[name])]
    family = turns[slot % len(turns)]
    return family, FAMILIES[family](np.random.default_rng([seed, slot, 1]))


def priced(recipe: Recipe, cluster: Cluster | str, groups: int, *, on: str) -> Problem:
    """A captured model, grouped and priced for a cluster, whose text is `on`; the problem does not keep where it came from."""
    from rlplace.cost.price import price

    spec, batch, seq = recipe
    problem = price(captured(recipe), cluster, groups=groups, name=f"{spec} b{batch} s{seq} on {on}")
    return dataclasses.replace(problem, source=None, group_ops=None, group_modules=None)


@lru_cache(maxsize=MOST_GRAPHS)
def captured(recipe: Recipe) -> OpGraph:
    """The captured training step of a model, without its weights."""
    from rlplace.graph.capture import capture
    from rlplace.zoo import load_model

    spec, batch, seq = recipe
    loaded = load_model(spec, batch=batch, seq=seq)
    return capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=spec)
