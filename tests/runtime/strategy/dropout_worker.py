"""What runs in the processes of the dropout test: every mask that is drawn is noted, and can be put in place of a draw."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.batches import share_of
from rlplace.runtime.strategy.run import prepare
from tests.runtime import small_models
from tests.runtime.strategy import native_worker

P = 0.2


class Masks:
    """Notes the masks of forwards, or takes those that are given."""

    def __init__(self, given=None):
        self.noted, self._given, self._draw = [], None if given is None else iter(given), F.dropout

    def __enter__(self):
        F.dropout = self._drop
        return self.noted

    def __exit__(self, *args):
        F.dropout = self._draw

    def _drop(self, value, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return value
        mask = self._draw(torch.ones_like(value), p) if self._given is None else next(self._given)
        assert mask.shape == value.shape
        if torch._C._current_graph_task_id() == -1:  # not again for a backward
            self.noted.append(mask.detach())
        return value * mask


def make(attention="eager"):
    torch.manual_seed(0)
    return small_models.gpt2(P, n_head=4, attn_implementation=attention)[0].double().train()


def prepared(strategy, attention="eager"):
    batch, size = native_worker.batch("gpt2"), strategy.pipelines[0].microbatch[0]
    return prepare(make(attention), strategy, {k: v[:size] for k, v in batch.items()})


def step(native, strategy, seed=0):
    for parameter in native.parameters():
        parameter.grad = None
    native.random_state = seed, 0
    torch.rand(native.place.mesh.get_rank())  # where a process's own stream stands does not matter
    with Masks() as noted:
        loss = native.step(native_worker.batch("gpt2"), native_worker.loss).item()
    return {
        "loss": loss, "gradients": native_worker.own_gradients(native), "masks": noted, "place": native.place.index,
        "passes": len(share_of(strategy, 0).sizes),
    }  # fmt: skip


def run(cases, again, same):
    """A step of each case; of some the losses of two more, the last with another seed; steps of others with fused attention."""
    results = {}
    for name, data in {**cases, **same}.items():
        strategy = Strategy.from_dict(data)
        native = prepared(strategy, "sdpa" if name in same else "eager")
        results[name] = step(native, strategy)
        if name in again:
            results[name]["again"] = step(native, strategy)["loss"]
            results[name]["other"] = step(native, strategy, seed=1)["loss"]
    return results
