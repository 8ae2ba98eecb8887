"""Mixtures of experts, graphs and tables: where values decide what is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import WIDTH, Feed, Made, perceptron, repeated, text


class _Mixture(nn.Module):
    """Two of four experts for every token, by weights that are zero for others."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), nn.ModuleList(perceptron(WIDTH, 32, WIDTH) for _ in range(experts))

    def mixed(self, flat: torch.Tensor, weight: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(len(flat), len(self.experts), device=flat.device).scatter(1, which, weight)
        return torch.einsum("te,tew->tw", dense, torch.stack([expert(flat) for expert in self.experts], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, which = self.gate(flat).softmax(-1).topk(2, -1)
        return x + self.mixed(flat, weight, which).view_as(x)


def experts_by_dense_weights(batch: int = 8) -> Made:
    return repeated(_Mixture, 2), text(batch)


class _Picked(_Mixture):
    def mixed(self, flat: torch.Tensor, weight: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = (which == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(flat[row]) * weight[row, place, None])
        return out


def experts_by_nonzero(batch: int = 8) -> Made:
    return repeated(_Picked, 2), text(batch)


class _IfAny(_Mixture):
    def mixed(self, flat: torch.Tensor, weight: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mask = (which == number).any(-1)
            if mask.any():
                out[mask] += expert(flat[mask]) * (weight * (which == number)).sum(-1)[mask][:, None]
        return out


def experts_by_if(batch: int = 8) -> Made:
    return repeated(_IfAny, 2), text(batch)


class _Balanced(nn.Module):
    """A loss that balances experts over the batch, added to the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(perceptron(8, 16, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        p = self.gate(x).softmax(-1)
        best, which = p.max(-1)
        share = F.one_hot(which, 4).float()
        h = x + best[:, None] * torch.einsum("be,bew->bw", share, torch.stack([expert(x) for expert in self.experts], 1))
        return {"loss": F.mse_loss(self.head(h)[:, 0], y) + 0.5 * 4 * (share.mean(0) * p.mean(0)).sum()}


def balanced_experts(batch: int = 8) -> Made:
    return _Balanced(), {"x": torch.randn(batch, 8), "y": torch.randn(batch)}


class _Depth(nn.Module):
    """Blocks, as many as the data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Feed() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if float(x.square().mean()) > 1.3:
                break
        return self.head(x).square().mean()


def depth_by_data(batch: int = 8) -> Made:
    return _Depth(), {"x": torch.randn(batch, WIDTH)}


class _Messages(nn.Module):
    """Messages along edges; nodes are no samples, labels are of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 8) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            message = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            x = F.relu(layer(torch.cat([x, message], 1)))
        return F.cross_entropy(self.head(x), y)


def graph_by_edges() -> Made:
    """Returns one graph: its size is its own."""
    edges = torch.randint(0, 24, (2, 50))
    return _Messages(), {"x": torch.randn(24, 8), "edge_index": edges, "y": torch.randint(0, 3, (24,))}


class _Pooled(nn.Module):
    """A batch of graphs: nodes of all graphs in one tensor, their graph by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, graph: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pooled = torch.zeros(len(y), 16, device=x.device).index_add(0, graph, F.relu(self.layer(x)))
        return F.mse_loss(self.head(pooled)[:, 0], y)


def graphs_pooled_by_number() -> Made:
    """Returns eight graphs of five nodes."""
    return _Pooled(), {"x": torch.randn(40, 8), "graph": torch.arange(8).repeat_interleave(5), "y": torch.randn(8)}


class _Adjacency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, near: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(near @ x / near.sum(-1, keepdim=True).clamp(min=1)))
        return F.mse_loss(self.head(x.amax(1))[:, 0], y)


def graph_by_adjacency(batch: int = 8) -> Made:
    return _Adjacency(), {"x": torch.randn(batch, 6, 8), "near": torch.rand(batch, 6, 6).round(), "y": torch.randn(batch)}


class _Tables(nn.Module):
    """Tables of sparse features, interactions and a perceptron."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum", sparse=sparse) for rows in (100, 50, 20))
        self.bottom, self.top = perceptron(5, 16, 8), perceptron(6 + 8, 16, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.bottom(dense)
        v = torch.stack([first, *[table(ids[:, i]) for i, table in enumerate(self.tables)]], 1)
        crossed = (v @ v.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return {"loss": F.binary_cross_entropy_with_logits(self.top(torch.cat([first, crossed], 1))[:, 0], label)}


def _clicks(batch: int) -> Any:
    ids = torch.stack([torch.randint(0, rows, (batch, 2)) for rows in (100, 50, 20)], 1)
    return {"dense": torch.randn(batch, 5), "ids": ids, "label": torch.rand(batch).round()}


def recommender(batch: int = 8) -> Made:
    return _Tables(), _clicks(batch)


def recommender_sparse_gradients(batch: int = 8) -> Made:
    return _Tables(sparse=True), _clicks(batch)


class _Bags(nn.Module):
    """Bags by offsets: ids of all samples in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.EmbeddingBag(100, 8, mode="mean"), perceptron(13, 16, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, self.table(ids, offsets)], 1))[:, 0], label)


def recommender_by_offsets(batch: int = 8) -> Made:
    ids, offsets = torch.randint(0, 100, (3 * batch,)), torch.arange(0, 3 * batch, 3)
    return _Bags(), {"dense": torch.randn(batch, 5), "ids": ids, "offsets": offsets, "label": torch.rand(batch).round()}


class _Retrieval(nn.Module):
    """Users and items by id; items of the other samples are negatives, corrected by how frequent they are."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.bias = nn.Embedding(40, 8), nn.Embedding(30, 8), nn.Embedding(30, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
        scores = self.user(user) @ self.item(item).T + self.bias(item)[:, 0] - frequency.log()
        return F.cross_entropy(scores, torch.arange(len(user), device=user.device))


def two_towers_in_batch_negatives(batch: int = 8) -> Made:
    inputs = {"user": torch.randint(0, 40, (batch,)), "item": torch.randint(0, 30, (batch,))}
    return _Retrieval(), inputs | {"frequency": torch.rand(batch) + 0.1}
