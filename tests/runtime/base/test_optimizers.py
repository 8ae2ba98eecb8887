"""Optimizers by name: the state that they are said to keep, and their updates of parts beside those of the whole model."""

import copy
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError, MissingError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.optimizers import OPTIMIZERS, apart
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base import turns
from rlplace.runtime.base.optimizers import make_optimizer, optimizer_of_groups
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.why_not import why_not
from rlplace.strategy.blocks.price import PricedBlocks
from tests.runtime.equality import strategy_plan
from tests.runtime.job.launch import run
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import chain, flat

CASES = {
    "copies": flat("short", {"replicate": 2}, 0, devices=(0, 1), microbatch=2),
    "shared": flat("short", {"shard": 2}, 3, devices=(0, 1), microbatch=2),
    "tensor": flat("short", {"tensor": 2}, 0, devices=(0, 1), microbatch=2),
    "chain": chain("short", [(0,), (1,)], "1f1b", mesh={}, sharding=0, microbatch=2),
}
RUNS = [("lion", case) for case in ("shared", "tensor")] + [("muon", case) for case in ("shared", "tensor", "chain")]
RUNS += [("adafactor", case) for case in ("copies", "chain")]


class Words(nn.Module):
    """A table, a matrix of odd sizes, one of more than 4,096 elements, vectors and a head."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(7, 33, sparse=sparse), nn.Linear(33, 65), nn.Linear(65, 128)
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 7)

    def forward(self, ids):
        return self.head(self.norm(self.second(self.first(self.table(ids)).tanh())))


def held_bytes(value):
    """Bytes of a state; of a quantized one those of codes and scales, without the table of the code."""
    return value.codes.nbytes + value.scale.nbytes if hasattr(value, "codes") else value.nbytes if value.dim() else 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_the_real_optimizer(name):
    if OPTIMIZERS[name].path.startswith("torchao"):
        pytest.importorskip("torchao")
    model, ids = Words().to(torch.bfloat16 if OPTIMIZERS[name].rounds else torch.float32), torch.arange(6)
    graph = capture(model, (ids,), loss=lambda y: y.square().mean(), optimizer=name)
    optimizer = make_optimizer(name, model, 1e-3)
    model(ids).square().mean().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {names[id(p)]: sum(map(held_bytes, map(torch.as_tensor, s.values()))) for p, s in optimizer.state.items()}
    said = {parameter.name: parameter.optimizer_bytes for parameter in graph.parameters}
    assert {path: held.get(path, 0) for path in said} == said


def test_random_rounding_is_right_on_average():
    """An update of an eighth of the distance between two weights: rounded to the nearest, nothing ever moves."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    count, steps = 1 << 16, 8
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = optimizer_of_groups("adamw-bf16", [{"params": [weight]}], (), rate := 2.0**-11)
    wanted = 1.0
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        wanted = wanted * (1 - rate * 0.01) - rate  # the first moment over the root of the second is 1
    found = weight.detach().double()
    assert (found.mean() - wanted).abs() < 4 * found.std() / count**0.5 and found.std() > 0
    plain = torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(plain - rate, plain)
    with pytest.raises(InputError, match="rounds weights in bfloat16 at random; take --dtype bf16"):
        make_optimizer("adamw-bf16", Words(), rate)
    with pytest.raises(InputError, match="rounds weights in bfloat16 at random"):
        capture(Words(), (torch.arange(6),), loss=lambda y: y.square().mean(), optimizer="adamw-bf16")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingError, match="adamw8bit needs torchao; pip install torchao"):
        make_optimizer("adamw8bit", Words(), 1e-3)


def test_matrices_are_neither_tables_nor_the_head():
    assert apart(Words(), "muon") == {"first.weight", "second.weight"}
    assert OPTIMIZERS["muon"].of(False) is OPTIMIZERS["adamw"]
    # five steps of two products of [3, 3] and [3, 8], and of [3, 3] and [3, 3]
    assert OPTIMIZERS["muon"].update_flops((8, 3)) - 6 * 24 == 5 * (2 * 2 * 3 * 3 * 8 + 2 * 3**3)


def test_muon_is_that_of_torch():
    torch.manual_seed(0)
    ours, ids = Words(), torch.arange(6)
    theirs = copy.deepcopy(ours)
    optimizer = make_optimizer("muon", ours, 1e-2)
    chosen = [dict(theirs.named_parameters())[name] for name in sorted(apart(theirs, "muon"))]
    others = [torch.optim.Muon(chosen, lr=1e-2, adjust_lr_fn="match_rms_adamw")]
    others += [torch.optim.AdamW([p for p in theirs.parameters() if not any(p is one for one in chosen)], lr=1e-2)]
    for _ in range(3):
        for model, own in ((ours, [optimizer]), (theirs, others)):
            model.zero_grad()
            model(ids).square().mean().backward()
            for one in own:
                one.step()
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients_are_refused_or_updated_as_by_torch(name):
    torch.manual_seed(0)
    ours, ids = Words(sparse=True), torch.tensor([1, 4, 4])
    given = {"loss": lambda y: y.square().mean(), "dtype": "bf16" if OPTIMIZERS[name].rounds else None, "optimizer": name}
    if not OPTIMIZERS[name].sparse:
        with pytest.raises(InputError, match=r"the gradient of table.weight is sparse.* sgd or sparse-adam, .* sparse=False"):
            capture(ours, (ids,), **given)
        return
    graph, theirs = capture(ours, (ids,), **given), copy.deepcopy(ours)
    optimizers = {"sgd": [torch.optim.SGD(theirs.parameters(), lr=1e-2)], "sparse-adam": lazy(theirs)}[name]
    own, before = make_optimizer(name, ours, 1e-2), ours.table.weight.detach().clone()
    for _ in range(3):
        for model, steps in ((ours, [own]), (theirs, optimizers)):
            model.zero_grad()
            given["loss"](model(ids)).backward()
            for one in steps:
                one.step()
    for parameter, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
    assert (ours.table.weight != before).any(1).nonzero().flatten().tolist() == [1, 4]
    whole = capture(Words(), (ids,), **given)  # three rows of 33 values are made, copied and moved, and no table is
    made, moved = 3 * (4 * 33 + 8), {"sgd": 3, "sparse-adam": 7 * 24 / 7}[name] * 3 * 4 * 33
    bytes_of = dict(zip(graph.op_names, graph.op_bytes.tolist(), strict=True))
    assert bytes_of["table/embedding.backward"] == 4 * made + moved and bytes_of["table.weight/update"] == 0
    assert graph.parameters[0].sparse and not whole.parameters[0].sparse
    assert graph.parameters[0].optimizer_bytes == whole.parameters[0].optimizer_bytes


def lazy(model):
    return [torch.optim.SparseAdam([model.table.weight], lr=1e-2), torch.optim.Adam([*model.parameters()][1:], lr=1e-2)]


def turned():
    """Collectives of an update by shares, with bytes that are sent."""
    from torch.distributed.tensor.debug import CommDebugMode

    sent, ids = [], torch.arange(6)
    strategy = {"batch": 6, "microbatch": [3], "stages": [{"devices": [0, 1], "mesh": {"shard": 2}, "sharding": 3}]}
    strategy["stages"][0]["blocks"] = ["table", "first", "second", "norm", "head"]
    model = rlplace.distribute(Words(), strategy_plan(strategy), {"ids": ids[:3]}, loss=lambda y: y.square().mean())
    optimizer = make_optimizer("muon", model, 1e-3)
    model(ids).backward()
    real = turns.dist.all_to_all_single

    def noted(output, given, *sizes, group):
        sent.append(given.nbytes)
        return real(output, given, *sizes, group=group)

    with mock.patch.object(turns.dist, "all_to_all_single", noted), CommDebugMode() as mode:
        optimizer.step()
    return sent, mode.get_total_counts(), {str(op) for op in mode.get_comm_counts()}


@pytest.mark.slow
def test_what_muon_moves_is_what_is_priced():
    graph = capture(Words(), (torch.arange(6),), loss=lambda y: y.square().mean(), optimizer="muon")
    blocks = PricedBlocks(graph, "a100-80g:2")
    count, size = blocks.held().turns.sum(axis=1)
    assert (count, size) == (2, 2 * (33 * 65 + 65 * 128))
    found = run(2, turned)
    assert sum(sum(sent) for sent, _, _ in found) == 2 * size  # each matrix comes together once, and is cut again once
    for sent, calls, kinds in found:
        assert len(sent) == calls == 2 * count / 2 and len(kinds) == 1, kinds


def test_an_optimizer_of_whole_parameters_refuses_parts():
    for case in ("copies", "chain"):
        assert why_not(Strategy.from_dict(CASES[case]), optimizer="adafactor") is None
    for case in ("shared", "tensor"):
        assert "takes norms of whole parameters" in why_not(Strategy.from_dict(CASES[case]), optimizer="adafactor")
        assert why_not(Strategy.from_dict(CASES[case]), optimizer="muon") is None
        once = CASES[case] | {"microbatch": [4 if case == "shared" else 8], "microbatches": [1]}
        assert "come one by one" in why_not(Strategy.from_dict(once), optimizer="muon", release=True)
    both = Strategy.from_dict(flat("short", {"shard": 2, "tensor": 2}, 3, microbatch=2))
    assert "shard=1 or tensor=1" in why_not(both, optimizer="muon") and why_not(both, optimizer="adamw") is None


def trained():
    """By optimizer and case the largest difference of a parameter from the plain model's, where its gradient is known."""
    batch, found = native_worker.batch("short"), {}
    for name, case in RUNS:
        plain = native_worker.make("short")
        model = rlplace.distribute(copy.deepcopy(plain), strategy_plan(CASES[case]), {k: v[:2] for k, v in batch.items()})
        ours, theirs = (make_optimizer(name, one, 1e-3, exact=True) for one in (model, plain))
        known = {}
        for _ in range(3):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            model.step(batch, native_worker.loss)
            native_worker.loss(plain(**batch), batch).backward()
            for path, parameter in plain.named_parameters(remove_duplicate=False):
                known[path] = known.get(path, True) & (parameter.grad.abs() > 1e-9)
            for optimizer in (ours, theirs):
                optimizer.step()
        wanted = {path: p * known[path] for path, p in plain.named_parameters(remove_duplicate=False)}
        own = {path: whole_tensor(p.detach()) * known[path] for path, p in model.named_parameters()}
        found[name, case] = native_worker.difference(own, wanted)
    return found


@pytest.mark.slow
def test_updates_of_parts_are_those_of_the_whole():
    for found in run(2, trained):
        assert max(found.values()) < 1e-8, found
