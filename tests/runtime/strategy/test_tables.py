"""Embedding tables that replicas divide, by rows, by columns and whole, compared with the plain model."""

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rlplace
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.optimizers import make_optimizer
from rlplace.runtime.state.deferred import deferred_weights
from rlplace.runtime.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.state.whole import seen, whole_state_dict, whole_tensor
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.tables import table_reasons
from tests.runtime.job.launch import run

ROWS, WIDTH, SAMPLES = (3, 60, 41, 5), 6, 16


class Recommender(nn.Module):
    """Single ids, bags of three with a padding, means and weighted sums; of few rows, and of rows that do not divide."""

    def __init__(self, sparse):
        super().__init__()
        few, many, odd, last = ROWS
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(few, WIDTH, mode="mean", sparse=sparse, padding_idx=1),
                nn.Embedding(many, WIDTH, sparse=sparse, padding_idx=0),
                nn.EmbeddingBag(odd, WIDTH, mode="sum", sparse=sparse),
                nn.EmbeddingBag(last, WIDTH, mode="sum", sparse=sparse),
            ]
        )
        self.bottom, self.top = nn.Linear(4, WIDTH), nn.Linear(5 * WIDTH, 1)

    def forward(self, dense, ids, labels):
        few, one, odd, last = self.tables
        weights = dense.abs()[:, :3].contiguous()
        starts = torch.arange(0, 3 * len(ids), 3)
        columns = [
            few(ids % ROWS[0]),
            one(ids[:, 0] % ROWS[1]),
            odd(ids % ROWS[2], per_sample_weights=weights),
            last((ids % ROWS[3]).flatten(), starts),
            self.bottom(dense),
        ]
        made = self.top(torch.cat(columns, 1).tanh())[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(made, labels)


DRAW = torch.Generator().manual_seed(0)
BATCH = {
    "dense": torch.randn(SAMPLES, 4, generator=DRAW).double(),
    "ids": torch.randint(0, 200, (SAMPLES, 3), generator=DRAW),
    "labels": torch.rand(SAMPLES, generator=DRAW).round().double(),
}
BLOCKS = ["tables", "bottom", "top"]
WAYS = {
    "whole": ("table 3", "table 0", "table 2", "table 0"),
    "rows": ("rows",) * 4,
    "columns": ("columns",) * 4,
    "mixed": ("columns", "rows", "table 1", None),
}
CASES = {
    "replicas": ({"replicate": 4}, 0, "mixed", 2),
    "level 1": ({"shard": 4}, 1, "rows", 1),
    "level 2": ({"replicate": 2, "shard": 2}, 2, "whole", 2),
    "level 3": ({"shard": 4}, 3, "columns", 2),
}


def strategy(mesh, sharding, way, microbatches):
    words = {f"tables.{number}": word for number, word in enumerate(WAYS[way]) if word is not None}
    stage = {"blocks": BLOCKS, "devices": [0, 1, 2, 3], "mesh": mesh, "sharding": sharding, "tables": words}
    size = SAMPLES // 4 // microbatches
    return Strategy.from_dict({"batch": SAMPLES, "microbatch": [size], "microbatches": [microbatches], "stages": [stage]})


def plain(sparse=False):
    torch.manual_seed(0)
    return Recommender(sparse).double()


class Exchanged(TorchDispatchMode):
    """Counts all-to-alls by what travels: integers (numbers of ids, ids) or rows (and their gradients)."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "all_to_all" in func.__name__:
            self.count[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def advance(model, optimizer, clip=0.2):
    optimizer.zero_grad()
    loss = model(**BATCH)
    loss.backward()
    found = {"loss": loss.detach()}
    named = dict(model.named_parameters())
    found |= {f"{n} gradient": whole_tensor(seen(p, dense(p.grad))).clone() for n, p in named.items()}
    if hasattr(model, "clip_grad_norm_"):
        found["norm"] = model.clip_grad_norm_(clip)
    else:
        found["norm"] = torch.stack([dense(p.grad).norm() for p in named.values()]).norm()
        nn.utils.clip_grads_with_norm_(list(named.values()), clip, found["norm"], foreach=False)
    optimizer.step()
    return found | {n: whole_tensor(seen(p).detach()).clone() for n, p in named.items()}


def dense(gradient):
    return gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient


def made(case, sparse=False):
    """A prepared model; those with dense gradients are built without values."""
    plan = strategy(*case)
    with contextlib.nullcontext() if sparse else deferred_weights():
        model = plain(sparse)
    return prepare(model, plan, {name: value[: plan.pipelines[0].microbatch[0]] for name, value in BATCH.items()})


def trained(folder):
    """By case the step after one, saved and resumed under the next case's plan; with sparse gradients, too."""
    found, before, saved = {}, None, None
    for case, axes in CASES.items():
        model = made(axes)
        optimizer = torch.optim.AdamW(model.parameter_groups(), lr=0.1)
        first = advance(model, optimizer)
        if before is not None:
            load_checkpoint(before, model, optimizer)
        before = save_checkpoint(f"{folder}/{case}", model, optimizer, step=1)
        with Exchanged() as exchanged:
            found[case] = first, advance(model, optimizer)
        assert exchanged.count == dict.fromkeys((torch.int64, torch.float64), 2 * axes[3]), case  # of all tables at once
    for way in WAYS:
        words = {"mixed": ("columns", "rows", "table 1", "rows")}.get(way)
        model = made((*CASES["level 1"][:2], way if words is None else "rows", 2), sparse=True)
        optimizer = make_optimizer("sparse-adam", model, 0.1)
        first = advance(model, optimizer)
        if saved is not None:
            load_checkpoint(saved, model, optimizer)
        saved = save_checkpoint(f"{folder}/sparse {way}", model, optimizer, step=1)
        found[f"sparse {way}"] = [first, *(advance(model, optimizer) for _ in range(2))]
        assert set(dict(whole_state_dict(model))) in (set(), set(plain().state_dict()))
    return found


def same(found, wanted, at):
    for own, expected in zip(found, wanted, strict=True):
        for name, value in own.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-9, atol=1e-11, msg=lambda line, n=name: f"{at} {n}: {line}"
            )


@pytest.mark.slow
def test_divided_tables_train_and_resume_as_the_plain_model(tmp_path):
    model, other = plain(), plain(sparse=True)
    optimizer, sparse = torch.optim.AdamW(model.parameters(), lr=0.1), make_optimizer("sparse-adam", other, 0.1)
    wanted = advance(model, optimizer), advance(model, optimizer)
    lazily = [advance(other, sparse) for _ in range(3)]
    for rank, found in enumerate(run(4, trained, str(tmp_path))):
        for case, steps in found.items():
            same(steps, lazily if case.startswith("sparse") else wanted, f"{case}, rank {rank}")
    again = plain()
    state = torch.optim.AdamW(again.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "level 3" / "step-00000001", again, state)
    same([advance(again, state)], wanted[1:], "one process")


def test_tables_that_cannot_be_divided_are_named():
    class Own(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 1)

    model = nn.ModuleDict({"own": Own(3, 2), "norm": nn.Embedding(3, 2, max_norm=1.0), "fine": nn.EmbeddingBag(3, 2)})
    model["tied"] = nn.Linear(2, 3)
    model["tied"].weight = model["fine"].weight
    found = dict(table_reasons(model))
    assert "forward of its own" in found["own"] and "max_norm" in found["norm"] and "shares" in found["fine"]
    assert set(dict(table_reasons(plain())).values()) == {None}


def test_loops_of_others_get_no_divided_tables():
    plan = PlacementPlan("0" * 64, "mine", 0, [], strategy=strategy(*CASES["replicas"]))
    with pytest.raises(InputError, match=r"checkpoints of another's loop would not join; .* plan with tables=1"):
        rlplace.parallelize(plain(), plan, BATCH, device="cpu")
