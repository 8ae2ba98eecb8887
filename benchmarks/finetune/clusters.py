"""Emulated clusters whose true behaviour is not what their description says.

All have four hosts with a slow processor each; ops sleep as long as they would take, tensors cross shaped links for real.
What is believed is the description alone: equal hosts, equal links, datasheet times.

* `slow_host`: ops on host 2 take 1.8 times as long.
* `slow_link`: between hosts 0 and 1, both ways, links have a fifth of their rate.
* `unlike_speeds`: ops take 1, 1.4, 0.75 and 2 times as long by host, and by group and host up to 30 % more or less.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np

from rlplace.cluster.parse import Cluster
from rlplace.cluster.presets import DeviceKind, cpu_kind
from rlplace.problem import Problem
from tools.hosts import HostsSpec, cluster_of

HOSTS = 4
RATE = 250e6
MEMORY_BYTES = 8 << 30
_SLOW = 0.25  # of a core


@dataclass(frozen=True)
class Emulated:
    """One cluster.

    Attributes:
        name: The cluster's name.
        spec: Its hosts as they really are.
        believed_spec: As they are described.
        host_factor: True over believed op times by host.
        scatter: Standard deviation of the log of a further factor by group and host.
    """

    name: str
    spec: HostsSpec
    believed_spec: HostsSpec
    host_factor: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    scatter: float = 0.0

    def believed(self) -> Cluster:
        """What plans are priced for."""
        return cluster_of(self.believed_spec, kinds=[kind()] * HOSTS, memory_bytes=MEMORY_BYTES)

    def slept(self, problem: Problem) -> Problem:
        """The problem with the times that ops really take."""
        rng = np.random.default_rng(7)
        factor = np.exp(self.scatter * rng.uniform(-1.7, 1.7, size=(problem.num_groups, HOSTS))) * np.array(self.host_factor)
        return dataclasses.replace(problem, name=f"{problem.name}, truth", time_s=problem.time_s * factor[problem.op_group])


def kind() -> DeviceKind:
    """The processor that every host is described to have."""
    whole = cpu_kind(1, MEMORY_BYTES)
    return msgspec.structs.replace(
        whole,
        peak_flops={name: _SLOW * value for name, value in whole.peak_flops.items()},
        memory_bandwidth_bytes_per_s=_SLOW * whole.memory_bandwidth_bytes_per_s,
    )


def _matrix(slow: dict[tuple[int, int], float]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(0.0 if i == j else RATE * slow.get((i, j), 1.0) for j in range(HOSTS)) for i in range(HOSTS))


_CARDS = HostsSpec(HOSTS, RATE)

CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Emulated("slow_host", _CARDS, _CARDS, host_factor=(1.0, 1.0, 1.8, 1.0)),
        Emulated(
            "slow_link", HostsSpec(HOSTS, _matrix({(0, 1): 0.2, (1, 0): 0.2})), HostsSpec(HOSTS, _matrix({})),
        ),
        Emulated("unlike_speeds", _CARDS, _CARDS, host_factor=(1.0, 1.4, 0.75, 2.0), scatter=0.15),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model to place.

    Attributes:
        text: MODEL.
        batch: Samples of a step.
        seq: Sequence length.
        groups: To place.
    """

    text: str
    batch: int
    seq: int
    groups: int = 40


MODELS = {
    "gpt2": Model("hf:gpt2,n_layer=4,n_embd=384,n_head=6,vocab_size=512", 4, 16),
    "t5": Model("hf:t5,num_layers=4,num_decoder_layers=4,d_model=384,d_ff=1536,vocab_size=512", 1, 16),
    "moe": Model("zoo:moe_toy,width=256,layers=6", 16, 1),
    "mixtral": Model(
        "hf:mixtral,num_hidden_layers=4,hidden_size=256,intermediate_size=512,num_local_experts=8,vocab_size=512,"
        "num_attention_heads=4,num_key_value_heads=4", 1, 16,
    ),
}  # fmt: skip
"""What is reported on."""
