"""Memory of real steps: bytes of all storages alive, and what a layer saves."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key: int) -> None:
        self.now -= self.seen.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def step(module, inputs, autocast: torch.dtype | None = None) -> None:
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss = out["loss"] if isinstance(out, dict) else out.loss
        del out
    loss.backward()


def layer_bytes(spec: str, batch: int, seq: int, key: str, **how) -> float:
    """Returns activation bytes that one more layer holds when the backward begins."""
    held = []
    for layers in (2, 3):
        loaded = load_model(f"{spec},{key}={layers}", batch=batch, seq=seq)
        graph = capture(loaded.module, loaded.example_inputs, optimizer="sgd", **how)
        first = int(np.flatnonzero(graph.op_phase == 1)[0])
        tensor = graph.edge_tensor
        last = np.full(graph.num_tensors, -1)
        np.maximum.at(last, tensor, graph.consumers)
        saved = (graph.tensor_producer >= 0) & (graph.tensor_producer < first) & (last >= first) & (graph.tensor_role == 0)
        held.append(int(graph.tensor_bytes[saved].sum()))
    return held[1] - held[0]
