"""The graph network: it builds a plan group by group in `rlplace/Placement-v0`.

Messages along the edges of the group graph give every group a vector, once an episode. A device's score for the next group is
a network of its features (`CONSTRUCTION_FEATURES`), of their mean over the devices and of that vector, beside a linear function
whose weights the vector chooses, too. It starts as earliest finish, a list-scheduling heuristic. Devices have no numbers: what
permutes them permutes the scores. B observations, D devices, F features, G groups, H width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from rlplace.agents.policies import Policy, narrowed
from rlplace.envs.base import PLACEMENT, greedy_fit
from rlplace.envs.construction import CONSTRUCTION_FEATURES, RUNNING, construct, construction_bank, construction_state
from rlplace.envs.instance import PlacementInstance, make_instance, side_by_side
from rlplace.envs.observation import EDGE_FEATURES, NUM_NODE_FEATURES, GraphArrays, graph_arrays
from rlplace.problem.generate import random_problem

_TIMES = ("finish_delay", "imbalance_change", "work", "communication_after")
"""Columns that are seen in units of a mean group's time, too: then they look alike in small graphs and large ones."""

_EARLIEST = -2.5
"""Start of the weight of `finish_delay` in those units, on a logarithmic scale: a softmax has to be narrow to be sampled."""


class _Round(nn.Module):
    """One round of messages: gated sums along and against the edges, and the mean of the graph."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.along, self.against = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.gates = nn.Linear(len(EDGE_FEATURES), 2 * hidden)
        self.mix, self.out = nn.Linear(3 * hidden, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, groups: Tensor, graph: _Graphs) -> Tensor:
        along, against = torch.sigmoid(self.gates(graph.edge_features)).chunk(2, dim=1)
        empty = torch.zeros_like(groups)
        heard = torch.tanh(empty.index_add(0, graph.target, self.along(groups)[graph.source] * along))
        told = torch.tanh(empty.index_add(0, graph.source, self.against(groups)[graph.target] * against))
        mixed = self.mix(torch.cat([groups, heard, told], dim=1)) + graph.mean(groups)[graph.of_group]
        return self.norm(groups + self.out(torch.relu(mixed)))


class _Graphs:
    """Some graphs behind one another."""

    def __init__(self, graphs: Sequence[GraphArrays]) -> None:
        self.sizes = torch.tensor([len(graph.nodes) for graph in graphs])
        self.first = torch.cumsum(self.sizes, 0) - self.sizes
        self.of_group = torch.repeat_interleave(torch.arange(len(graphs)), self.sizes)
        nodes, source, target, values = zip(*graphs, strict=True)
        self.nodes, self.edge_features = torch.cat(nodes), torch.cat(values)
        self.source = torch.cat([ends + begin for ends, begin in zip(source, self.first, strict=True)])
        self.target = torch.cat([ends + begin for ends, begin in zip(target, self.first, strict=True)])

    def mean(self, groups: Tensor) -> Tensor:
        """Returns [graphs, H], means over the groups [G, H] of each."""
        return torch.zeros(len(self.sizes), groups.shape[1]).index_add(0, self.of_group, groups) / self.sizes[:, None]


class GraphNetwork(Policy):
    """Scores devices for the next group and values states; see the module.

    Shapes:
        candidates [B, D * F], candidate_group [B, D], graph [B, 1] to logits [B, D] and values [B, 1].
    """

    environment = PLACEMENT

    def __init__(self, *, features: Sequence[str], hidden: int = 48, second: int = 32, rounds: int = 3) -> None:
        """A network that is the heuristic.

        Args:
            features: Names of the columns of the candidates, all of `CONSTRUCTION_FEATURES` that are times or sizes among them.
            hidden: H, width of the groups' vectors.
            second: Width of the network of a device.
            rounds: Rounds of messages; 0: every group for itself.
        """
        super().__init__()
        self.features = tuple(features)
        self._sizes = {"hidden": hidden, "second": second, "rounds": rounds}
        self._times = torch.tensor([self.features.index(name) for name in _TIMES])
        self._groups_at, self._devices_at = self.features.index("plan_groups"), self.features.index("plan_devices")
        wide = len(self.features) + len(_TIMES)
        self.nodes = nn.Linear(NUM_NODE_FEATURES, hidden)
        self.rounds = nn.ModuleList(_Round(hidden) for _ in range(rounds))
        self.own, self.others, self.group = nn.Linear(wide, second), nn.Linear(wide, second), nn.Linear(hidden, second)
        self.second, self.score = nn.Linear(second, second), nn.Linear(second, 1, bias=False)
        self.linear, self.chosen = nn.Linear(wide, 1, bias=False), nn.Linear(hidden, wide)
        self.value = nn.Sequential(nn.Linear(hidden + wide, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        with torch.no_grad():
            for start_at_zero in (self.linear.weight, self.score.weight, self.chosen.weight, self.chosen.bias):
                start_at_zero.zero_()
            self.linear.weight[0, len(self.features) + _TIMES.index("finish_delay")] = _EARLIEST
        self._weights = tuple(self.parameters())  # asked for at every look, where walking through the modules takes longest
        self._known: list[GraphArrays] = []
        self._places = torch.zeros(0, dtype=torch.int64)  # of every number in `_known`
        self._kept: tuple[Any, Any] = (None, None)
        self._told: tuple[Tensor, ...] | None = None  # what `decide` computes once

    def settings(self) -> dict[str, Any]:
        """Returns its sizes."""
        return dict(self._sizes)

    def know(self, graphs: Sequence[GraphArrays]) -> None:
        """Keeps these graphs, tensors or arrays; one that stands there twice is encoded once."""
        distinct = {id(graph): graph for graph in graphs}
        places = {key: place for place, key in enumerate(distinct)}
        self._kept, self._told = (None, None), None
        self._known = [GraphArrays(*map(torch.as_tensor, graph)) for graph in distinct.values()]
        self._places = torch.tensor([places[id(graph)] for graph in graphs])

    def _groups(self) -> tuple[_Graphs, Tensor, Tensor]:
        """Returns all known graphs, the vectors of their groups and the mean vector of each; kept while weights and graphs
        stay.
        """
        version = sum(weight._version for weight in self._weights)
        if torch.is_grad_enabled() or self._kept[0] != version:
            graphs = _Graphs(self._known)
            groups = torch.relu(self.nodes(graphs.nodes))
            for messages in self.rounds:
                groups = messages(groups, graphs)
            self._kept = (None if torch.is_grad_enabled() else version, (graphs, groups, graphs.mean(groups)))
        found: tuple[_Graphs, Tensor, Tensor] = self._kept[1]
        return found

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns logits [B, D] and values [B, 1]."""
        devices, number = observation["candidate_group"], self._places[observation["graph"][:, 0].long()]
        graphs, groups, means = self._groups()
        rows = groups[graphs.first[number] + devices.amax(dim=1).long().clamp(min=0)]
        table = observation["candidates"].reshape(*devices.shape, -1)
        mean_groups = torch.exp2(8.0 * table[..., self._groups_at]) / (8.0 * table[..., self._devices_at]).clamp(min=1.0)
        table = torch.cat([table, torch.asinh(table[..., self._times] * mean_groups[..., None])], dim=-1)
        exist = (devices >= 0)[..., None].to(table.dtype)
        mean = (table * exist).sum(dim=1) / exist.sum(dim=1).clamp(min=1.0)
        seen = torch.relu(self.own(table) + (self.others(mean) + self.group(rows))[:, None])
        scores = self.score(torch.relu(self.second(seen))) + self.linear(table)
        scores = scores[..., 0] + (table * self.chosen(rows)[:, None]).sum(dim=-1)
        return scores, self.value(torch.cat([means[number], mean], dim=1))

    def decide(self, observation: Mapping[str, Tensor]) -> Tensor:
        """As `look`, in a third of its time: what a group adds is computed once, by the first call after `know`."""
        devices = observation["candidate_group"]
        table, rows = observation["candidates"].view(*devices.shape, -1), devices[:, 0]
        if self._told is None:
            groups, bias = self._groups()[1], self.group.bias + self.own.bias + self.others.bias
            chosen = functional.linear(groups, self.chosen.weight, self.chosen.bias + self.linear.weight[0])
            own = functional.linear(groups, self.group.weight, bias)
            weights = (
                self.own.weight.t(),
                self.others.weight.t(),
                self.second.weight.t(),
                self.second.bias,
                self.score.weight[0],
            )
            mean_groups = torch.exp2(8.0 * table[0, 0, self._groups_at]) / (8.0 * table[0, 0, self._devices_at]).clamp(min=1.0)
            self._told = mean_groups, own, chosen, *weights
        mean_groups, told, chosen, own, others, second, bias, score = self._told
        table = torch.cat([table, torch.asinh(table.index_select(2, self._times) * mean_groups)], dim=-1)
        told = torch.addmm(told.index_select(0, rows), table.mean(dim=1), others)
        seen = torch.relu(torch.matmul(table, own) + told[:, None])
        linear = torch.matmul(table, chosen.index_select(0, rows)[..., None])[..., 0]
        return linear + torch.matmul(torch.relu(torch.matmul(seen, second) + bias), score)


_PROBE, _HOPE = 64, 0.7
"""Groups after which the pace is known, and the share of that pace at which the others are hoped to take."""


def built(
    policy: Policy, instance: PlacementInstance, count: int, *, seed: int = 0, deadline_s: float = math.inf
) -> NDArray[np.int32]:
    """Builds plans; the first two are the likeliest of either order, the others are drawn.

    Args:
        policy: Of `rlplace/Placement-v0`.
        instance: What to place.
        count: N, number of plans.
        seed: Of the draws.
        deadline_s: Moment on the monotonic clock by which the plans are needed: where all would be late, only the first two are
            built, and none where these would be, too.

    Returns:
        int32 [N, G], or [2, G] or [0, G] where the time was too short; what no legal device was left for sits where it fills
        devices least.
    """
    both = (instance, side_by_side(instance))
    policy.know([graph_arrays(instance)] * 2)
    bank, state = tuple(construction_bank(both)), construction_state(count, *instance.allowed.shape)
    state.instance[:] = np.arange(count) % 2
    rows, actions, changed = np.arange(count), np.zeros(count, dtype=np.int64), tuple(state)
    construct(bank, changed, rows, actions, True)
    shown = {"candidates": state.table, "candidate_group": state.group, "context": state.context, "legal": state.legal}
    seen = {name: torch.from_numpy(value) for name, value in shown.items()}  # they follow what `construct` writes
    seen["graph"] = torch.from_numpy(state.instance)[:, None]
    random = torch.Generator().manual_seed(seed % (1 << 63))
    begin_s, since, groups, made = time.monotonic(), 0, instance.problem.num_groups, count
    with torch.inference_mode():
        for placed in range(groups):
            now_s = time.monotonic()
            if placed <= 1:  # the first decision pays for the messages
                begin_s, since = now_s, placed
            left_s = _HOPE * (groups - placed) * (now_s - begin_s) / (placed - since) if placed - since >= _PROBE else 0.0
            if now_s + left_s > deadline_s:
                if made <= 2 or now_s > deadline_s:
                    return state.plan[:0]
                rows, made, begin_s, since = rows[rows < 2], 2, now_s, placed
            if not len(rows):
                break
            if placed % _PROBE == 0 and made > 2:
                noise = _gumbel(_PROBE, state.legal.shape, random)
            now = slice(None) if len(rows) == count else torch.from_numpy(rows)
            shown_now = seen if len(rows) == count else {name: value[now] for name, value in seen.items()}
            logits = policy.decide(narrowed(shown_now, policy.features, CONSTRUCTION_FEATURES))
            if made > 2:
                logits = logits + noise[placed % _PROBE, now]
            actions[rows] = torch.where(shown_now["legal"], logits, -torch.inf).argmax(dim=1).numpy()
            construct(bank, changed, rows, actions, False)
            rows = rows[state.status[rows] == RUNNING]
    return np.where(state.plan >= 0, state.plan, greedy_fit(instance))[:made].astype(np.int32)


def _gumbel(times: int, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draws noise [times, plans, devices] whose largest sum with logits is a draw; none for the first two plans."""
    noise = -torch.log(-torch.log(torch.rand(times, *shape, generator=random).clamp(1e-7, 1 - 1e-7)))
    noise[:, :2] = 0.0
    return noise


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, the kernel of construction, so that time limits do not include it."""
    instance = make_instance(random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2), compute_floor=False)
    built(GraphNetwork(features=CONSTRUCTION_FEATURES), instance, 2)
