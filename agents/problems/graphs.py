"""Captured models from which problems are drawn: a bounded number of random variants of each family.

Clusters to draw problems on: which ones training sees, which ones only the test split has.

Training draws clusters of `SIZES` devices of `KINDS` on one, two or four hosts, or on two hosts of different kinds. What it
never draws: in the test split 7, 9, 10 and 14 devices, three hosts, and the kinds l4 and mi300x, whose fabric (a mesh) no other
kind has; in validation 11 and 13 devices, so that nothing is tuned on what is unseen in the test either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import Generator

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.problem import Problem


SIZES = (2, 3, 4, 5, 6, 8, 12, 16)
SIZE_WEIGHTS = (0.2, 0.1, 0.25, 0.05, 0.1, 0.2, 0.05, 0.05)
KINDS = ("v100", "a100-40g", "a100-80g", "h100", "h200", "t4", "rtx4090")
HOSTS = (1, 2, 4)
_NETWORKS = ("", "", ",eth=10g", ",eth=25g", ",eth=100g", ",ib=100g", ",ib=400g")
_MOST_PER_HOST = 8

SEEN_CLUSTERS = (
    "a100-80g:2", "a100-80g:4", "h100:8", "v100:4", "v100:2x2,eth=25g", "t4:4", "a100-40g:2+v100:2", "rtx4090:4", "v100:8",
    "a100-40g:4,pcie", "h100:2x4", "a100-80g:2x8", "v100:3", "a100-80g:4x2,ib=100g", "t4:2+rtx4090:2", "h100:2x6", "t4:6",
    "h200:5",
)  # fmt: skip
"""Clusters like those that training draws."""

TEST_CLUSTERS = (
    "l4:4", "mi300x:8", "a100-80g:7", "h100:3x3", "a100-40g:2x5", "v100:3x2,eth=25g", "l4:2+t4:2", "h100:2x7", "mi300x:4",
    "a100-80g:2+v100:2+t4:2", "l4:2x4,eth=25g", "v100:7", "t4:2x5,eth=10g", "rtx4090:3x2,eth=25g", "h100:4+a100-40g:3",
    "mi300x:2x8", "l4:2", "a100-80g:3x4",
)  # fmt: skip
"""Clusters of the test split that training and validation never draw."""

VALIDATION_CLUSTERS = (
    "v100:6+t4:5",
    "h100:8+a100-80g:5,ib=100g",
    "a100-40g:6+rtx4090:5,eth=25g",
    "a100-80g:8+v100:3",
    "h200:7+h100:6",
)
"""Clusters of the validation split that training never draws, of 11 and 13 devices."""


def is_unseen(num_devices: int, kinds: set[str], num_hosts: int) -> bool:
    """Returns whether training never draws such a cluster."""
    return num_devices not in SIZES or not kinds <= set(KINDS) or num_hosts not in HOSTS


def is_unseen_cluster(cluster: Cluster) -> bool:
    """Returns `is_unseen` of a cluster."""
    return is_unseen(cluster.num_devices, {kind.name for kind in cluster.kinds}, len(set(cluster.hosts)))


def draw_size(rng: Generator) -> int:
    """Returns a number of devices."""
    return int(rng.choice(SIZES, p=SIZE_WEIGHTS))


def draw_hosts(rng: Generator, size: int) -> int:
    """Returns a number of hosts that deals `size` devices equally, at most eight to each."""
    return int(rng.choice([hosts for hosts in HOSTS if size % hosts == 0 and size // hosts <= _MOST_PER_HOST]))


def draw_cluster(rng: Generator) -> str:
    """Returns the text of a cluster for training."""
    size = draw_size(rng)
    if rng.random() < 0.25:  # two hosts of different kinds
        first, second = rng.choice(KINDS, 2, replace=False).tolist()
        near = int(rng.integers(max(1, size - _MOST_PER_HOST), min(_MOST_PER_HOST, size - 1) + 1))
        network = str(rng.choice(_NETWORKS))
        return f"{first}:{near}{network}+{second}:{size - near}{network}"
    kind, hosts = str(rng.choice(KINDS)), draw_hosts(rng, size)
    count = str(size) if hosts == 1 else f"{hosts}x{size // hosts}"
    inside = ",pcie" if rng.random() < 0.3 else ""
    network = "" if hosts == 1 else str(rng.choice(_NETWORKS))
    return f"{kind}:{count}{inside}{network}"


MOST_GRAPHS = 32
"""Captured graphs that are kept in memory, a few MB each."""

Recipe = tuple[str, int, int]
"""MODEL, batch and sequence length."""


class Family(NamedTuple):
    """Models of one kind: what is drawn for each, and how many of 24 are of it.

    Attributes:
        share: Number of 24 variants.
        settings: Values of the settings of the model, one of which is drawn for each.
        batches: Batch sizes.
        lengths: Lengths of sequences.
        more: Further settings, which follow from the width: ``{heads}`` of 64 each, and four times the width, ``{wide}``.
    """

    share: int
    settings: Mapping[str, Sequence[int | str]]
    batches: Sequence[int]
    lengths: Sequence[int] = (64,)
    more: str = ""

    def draw(self, name: str, rng: Generator) -> Recipe:
        """Draws a model of the family of this name."""
        *values, batch, seq = (
            some[int(rng.integers(len(some)))] for some in (*self.settings.values(), self.batches, self.lengths)
        )
        drawn = dict(zip(self.settings, values, strict=True))
        width = next((int(value) for key, value in drawn.items() if key in ("width", "n_embd", "hidden_size")), 0)
        more = self.more.format(heads=width // 64, wide=4 * width)
        return ",".join([name, *(f"{key}={value}" for key, value in drawn.items())]) + more, int(batch), int(seq)


_HEADS = ",num_attention_heads={heads},intermediate_size={wide}"

FAMILIES: dict[str, Family] = {
    "zoo:inception": Family(5, {"blocks": (2, 3, 4, 6, 9), "width": (32, 64, 96), "branches": (4, 6, 8)}, (4, 8, 16, 32)),
    "zoo:lstm": Family(2, {"layers": (2, 4, 6, 8), "width": (512, 1024, 2048)}, (16, 64), (32, 64)),
    "zoo:transformer": Family(
        3, {"layers": (2, 3, 4, 6), "width": (256, 512, 1024)}, (8, 32), (64, 128, 256), ",feedforward={wide}"
    ),
    "zoo:moe_toy": Family(4, {"layers": (2, 3, 4, 6), "experts": (4, 6, 8, 12), "width": (256, 512, 1024)}, (1024, 4096, 8192)),
    "zoo:mlp": Family(1, {"layers": (6, 8, 12, 16), "width": (1024, 2048, 4096)}, (512, 4096)),
    "hf:gpt2": Family(
        3, {"n_layer": (2, 3, 4, 6, 8), "n_embd": (256, 512, 768, 1024)}, (2, 4, 8), (128, 256, 512), ",n_head={heads}"
    ),
    "hf:bert": Family(
        2, {"num_hidden_layers": (2, 4, 6, 8), "hidden_size": (256, 512, 768, 1024)}, (2, 4, 8), (128, 256, 512), _HEADS
    ),
    "hf:vit": Family(2, {"num_hidden_layers": (3, 4, 6, 8), "hidden_size": (384, 768, 1024)}, (4, 8, 16), more=_HEADS),
    "hf:resnet": Family(2, {"depths": ("2/2/2/2", "3/4/6/3", "3/4/9/3")}, (4, 8, 16, 32)),
}
"""Families of captured models that training sees."""


def variant(families: tuple[str, ...], seed: int, slot: int) -> tuple[str, Recipe]:
    """Returns family and recipe of a numbered variant; families take turns by their shares."""
    turns = [name for name in families for _ in range(FAMILIES[name].share)]
    family = turns[slot % len(turns)]
    return family, FAMILIES[family].draw(family, np.random.default_rng([seed, slot, 1]))


def priced(recipe: Recipe, cluster: Cluster | str, groups: int, *, on: str) -> Problem:
    """Returns a captured model, grouped and priced for a cluster, whose text is `on`; the problem does not keep where it came
    from.
    """
    from rlplace.cost.price import price

    spec, batch, seq = recipe
    problem = price(captured(recipe), cluster, groups=groups, name=f"{spec} b{batch} s{seq} on {on}")
    return dataclasses.replace(problem, source=None, group_ops=None, group_modules=None)


@lru_cache(maxsize=MOST_GRAPHS)
def captured(recipe: Recipe) -> OpGraph:
    """Returns the captured training step of a model, without its weights."""
    from rlplace.model.capture.capture import capture
    from rlplace.model.zoo import load_model

    spec, batch, seq = recipe
    loaded = load_model(spec, batch=batch, seq=seq)
    return capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=spec)
