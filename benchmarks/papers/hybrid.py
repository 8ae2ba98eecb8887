"""Replicas of several devices each (Pal et al.): what follows from the paper's inputs, and what our model says of its models.

    python -m benchmarks.papers.hybrid            both, some minutes
    python -m benchmarks.papers.hybrid --algebra  what follows alone

The paper prints the speed-up SU of two devices that run one replica, takes the scaling efficiency of replicas as 1, and
measures the epochs that a batch needs; these it does not print. So gains are given for every batch, in units of the critical
batch B_crit of E(B) = E_min (1 + B / B_crit), and nothing is fitted: with x = B / B_crit for the batch of the hybrid, whose
data-parallel rival on as many devices has 2 x, the gain is SU (1 + 2 x) / (2 (1 + x)) - 1, and SU - 1 where batches go beyond
all bounds, or where epochs double with every doubling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rlplace
from benchmarks.harness import arguments, markdown
from rlplace.cluster.parse import parse
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space


@dataclass(frozen=True)
class Published:
    """The paper's figures of a model.

    Attributes:
        speedup: Of two devices over one, at the same batch.
        gain: At least this much over the best data-parallel run at scale.
    """

    speedup: float
    gain: float


PAPER = {"Inception-V3": Published(1.32, 0.265), "GNMT": Published(1.15, 0.08), "BigLSTM": Published(1.22, 0.22)}


def gain(speedup: float, over: float, degree: int = 2) -> float:
    """Returns gain of hybrids of `degree` devices over data parallelism on as many devices.

    Args:
        speedup: Of `degree` devices over one.
        over: Batch of the hybrid over the critical batch; inf is the limit.
        degree: Devices of a replica.
    """
    if math.isinf(over):
        return speedup - 1.0
    return speedup * (1.0 + degree * over) / (degree * (1.0 + over)) - 1.0


def batch_for(speedup: float, wanted: float, degree: int = 2) -> float:
    """Returns batch over the critical one at which hybrids gain this much; inf where only the limit does."""
    short = degree * (speedup - 1.0 - wanted)
    return math.inf if short <= 1e-12 else max(0.0, (degree * (1.0 + wanted) - speedup) / short)


def algebra() -> None:
    """Gains by batch, and the batch that each published figure needs."""
    columns = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
    names = ["model", "SU of two", "hybrids win from x =", *(f"x = {x:g}" for x in columns), "published", "needs x ="]
    rows = []
    for name, said in PAPER.items():
        for speedup in (said.speedup - 0.05, said.speedup, said.speedup + 0.05):
            own = speedup == said.speedup
            row = [name if own else "", f"{speedup:.2f}", f"{batch_for(speedup, 0.0):.2f}"]
            row += [f"{gain(speedup, x):+.1%}" for x in columns]
            needed = f"{batch_for(speedup, said.gain):.1f}" if speedup - 1 >= said.gain - 1e-12 else "never"
            rows.append([*row, f"{said.gain:.1%}" if own else "", needed])
    print(markdown(names, rows))


class Gnmt(nn.Module):
    """GNMT: eight layers on either side, the first of the encoder in both directions, attention from the decoder's first.

    Wu et al., "Google's neural machine translation system", 2016 (arXiv 1609.08144), as NVIDIA's example has it.
    """

    def __init__(self, hidden: int = 1024, layers: int = 8, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.embed, self.target = nn.Embedding(vocabulary, hidden), nn.Embedding(vocabulary, hidden)
        self.both = nn.LSTM(hidden, hidden, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(hidden * (2 if number == 0 else 1), hidden, batch_first=True) for number in range(layers - 1)
        )
        self.first = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.decoder = nn.ModuleList(nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(layers - 1))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.both(self.embed(source))[0]
        for number, layer in enumerate(self.encoder):
            made = layer(x)[0]
            x = made if number == 0 else x + made
        y = self.first(self.target(target))[0]
        seen = torch.softmax(self.query(y) @ x.transpose(1, 2), dim=-1) @ x
        for number, layer in enumerate(self.decoder):
            made = layer(torch.cat([y, seen], dim=-1))[0]
            y = made if number == 0 else y + made
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(y).flatten(0, 1), target.flatten())
        return loss


class BigLstm(nn.Module):
    """Two layers of 8,192 cells projected to 1,024 over a vocabulary of 793,471, with a sampled softmax of 8,192 words.

    Jozefowicz et al., "Exploring the limits of language modeling", 2016 (arXiv 1602.02410).
    """

    def __init__(self, vocabulary: int = 793_471, cells: int = 8192, width: int = 1024, sampled: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, sparse=False)
        self.layers = nn.ModuleList(nn.LSTM(width, cells, proj_size=width, batch_first=True) for _ in range(2))
        self.sampled = nn.Linear(width, sampled)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0]
        loss: torch.Tensor = torch.logsumexp(self.sampled(x), dim=-1).mean()
        return loss


def inception(batch: int) -> tuple[nn.Module, Any, Any]:
    """Returns inception-V3."""
    from rlplace.model.zoo import load_model

    loaded = load_model("zoo:inception", batch=batch, device="meta")
    return loaded.module, loaded.example_inputs, loaded.loss


def gnmt(batch: int) -> tuple[nn.Module, Any, Any]:
    """Returns GNMT with sentences of 25 words."""
    with torch.device("meta"):
        words = torch.zeros(batch, 25, dtype=torch.long)
        return Gnmt(), {"source": words, "target": words}, None


def big_lstm(batch: int) -> tuple[nn.Module, Any, Any]:
    """Returns bigLSTM, unrolled for 20 words."""
    with torch.device("meta"):
        return BigLstm(), {"ids": torch.zeros(batch, 20, dtype=torch.long)}, None


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Any, Any]], int]] = {
    "Inception-V3": (inception, 64), "GNMT": (gnmt, 128), "BigLSTM": (big_lstm, 128),
}  # fmt: skip
"""What makes each, and the batch of a device."""

PLANNERS = ("dlplacer", "best")


def measured(cluster: str, limit_s: float) -> None:
    """Prints the speed-up of two devices over one on our graphs, by our cost model."""
    print("\n" + markdown([f"model on {cluster}", "ops", "one device ms", *PLANNERS, "pipeline of two", "published"], []))
    for name, (make, batch) in MODELS.items():
        graphs = [rlplace.capture(module, inputs, loss=loss) for module, inputs, loss in (make(batch), make(batch // 8))]
        problem = rlplace.price(graphs[0], cluster)
        one_s = rlplace.place(problem, planner="single").predicted.step_time_s
        ours = [rlplace.place(problem, planner=planner, time_limit_s=limit_s).predicted.step_time_s for planner in PLANNERS]
        space = Space.parse("pipeline=2 replicate=1 shard=1 tensor=1")
        question = ask(graphs[0], parse(cluster), batch, other=graphs[1], space=space)
        piped_s = search(question, calls=400).ranked[0].step_s
        figures = [f"{one_s / step_s:.2f}" for step_s in (*ours, piped_s)]
        row = [f"{name}, batch {batch}", f"{problem.num_ops:,}", f"{1e3 * one_s:.1f}", *figures, str(PAPER[name].speedup)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    options = arguments(
        __doc__,
        algebra="what follows from the paper's inputs alone",
        cluster=("v100:2", "two devices"),
        time_limit=(60.0, "seconds of each planner"),
    )
    algebra()
    if not options.algebra:
        measured(options.cluster, options.time_limit)
