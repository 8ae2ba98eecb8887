"""What a checkpoint holds: a run that is cut goes on as if nothing had happened; files that lie are refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.nn import functional

from rlplace.errors import InputError
from rlplace.runtime.job.distribute import distribute
from rlplace.runtime.state.optimizer_state import load_whole_optimizer_state, whole_optimizer_state
from rlplace.runtime.state.training_state import latest_checkpoint, load_checkpoint, save_checkpoint
from rlplace.runtime.state.untrusted import _Unpickler
from tests.runtime.equality import plan_of
from tests.runtime.job.launch import run

SAVED, STEPS = 3, 7


class Model(nn.Module):
    """Names that are not in order of the alphabet, shapes that tell parameters apart, and dropout."""

    def __init__(self, seed, dropout=0.4):
        super().__init__()
        torch.manual_seed(seed)
        self.wide, self.narrow, self.dropout = nn.Linear(4, 8), nn.Linear(8, 3), dropout

    def forward(self, x):
        return self.narrow(functional.dropout(self.wide(x).relu(), self.dropout, self.training)).square().mean()


class Counting(torch.optim.Optimizer):
    """Steps that shrink with their number, which its state holds as a plain number."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                parameter.data -= group["lr"] * state["sum"] / state["count"] ** 2


def adam(model, rates, **settings):
    groups = [
        {"params": list(part.parameters()), "lr": rate} for part, rate in zip((model.wide, model.narrow), rates, strict=True)
    ]
    return torch.optim.AdamW(groups, **settings)


def batch(step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def falling(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)


def equal(model, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


RIGHT = {"betas": (0.6, 0.7), "weight_decay": 0.3, "eps": 1e-3, "amsgrad": True}
OTHERS = {"betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-8, "amsgrad": True}


def test_settings_moments_and_schedule_go_on(tmp_path):
    """The run that is not cut is the oracle, bit for bit; its rate falls after the cut."""
    model = Model(0).eval()
    optimizer = adam(model, (0.1, 0.02), **RIGHT)
    scheduler = falling(optimizer)
    train(model, optimizer, scheduler, range(SAVED))
    save_checkpoint(tmp_path, model, optimizer, step=SAVED, scheduler=scheduler, extra={"note": [1, None]})
    expected = train(model, optimizer, scheduler, range(SAVED, STEPS))
    again = Model(1).eval()
    other = adam(again, (9.0, 5.0), **OTHERS)
    then = falling(other)
    found = load_checkpoint(tmp_path, again, other, scheduler=then)
    assert (found.step, found.extra) == (SAVED, {"note": [1, None]})
    assert train(again, other, then, range(SAVED, STEPS)) == expected
    assert equal(again, model) and then.get_last_lr() == scheduler.get_last_lr() == pytest.approx([0.01, 0.002])
    for group, wanted in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {key: group[key] for key in RIGHT} == {key: wanted[key] for key in RIGHT} == RIGHT


def test_numbers_of_an_optimizer_go_on(tmp_path):
    model = Model(0).eval()
    optimizer = Counting(model.parameters(), 0.1)
    train(model, optimizer, None, range(SAVED))
    save_checkpoint(tmp_path, model, optimizer, step=SAVED)
    expected = train(model, optimizer, None, range(SAVED, STEPS))
    again = Model(1).eval()
    other = Counting(again.parameters(), 5.0)
    load_checkpoint(tmp_path, again, other)
    assert train(again, other, None, range(SAVED, STEPS)) == expected and equal(again, model)


def test_a_loader_goes_on(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    model = Model(0)
    loader, again = (stateful(range(20), batch_size=4, shuffle=True) for _ in range(2))
    rows = iter(loader)
    seen = [next(rows), next(rows)]
    save_checkpoint(tmp_path, model, step=2, loader=loader)
    load_checkpoint(tmp_path, model, loader=again)
    rest = [*again]
    assert [row.tolist() for row in rest] == [row.tolist() for row in rows]
    assert sorted(torch.cat(seen + rest).tolist()) == [*range(20)]
    (tmp_path / "step-00000002" / "loader.pt").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError, match=r"loader\.pt: .*take an earlier checkpoint"):
        load_checkpoint(tmp_path, model, loader=again)
    save_checkpoint(tmp_path, model, step=3)
    with pytest.raises(InputError, match="saved without a data loader"):
        load_checkpoint(tmp_path, model, loader=again)


def test_a_loader_whose_position_is_of_one_process_is_refused(tmp_path):
    model, rows = Model(0), torch.arange(8)
    loader = torch.utils.data.DataLoader(rows)
    with pytest.raises(InputError, match="DataLoader has no state_dict; use torchdata"):
        save_checkpoint(tmp_path, model, step=1, loader=loader)
    loader.state_dict = loader.load_state_dict = dict
    save_checkpoint(tmp_path, model, step=1, loader=loader)
    own = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=0)
    for options, reason in (
        ({"sampler": own}, "number of replicas"),
        ({"batch_sampler": torch.utils.data.BatchSampler(own, 2, False)}, "number of replicas"),
        ({"generator": torch.Generator()}, "leave generator out"),
    ):
        other = torch.utils.data.DataLoader(rows, **options)
        other.state_dict = other.load_state_dict = dict
        for call in (lambda other=other: save_checkpoint(tmp_path, model, step=1, loader=other),
                     lambda other=other: load_checkpoint(tmp_path, model, loader=other)):  # fmt: skip
            with pytest.raises(InputError, match=reason):
                call()


def test_random_numbers_go_on(one_rank, tmp_path):
    """With dropout the losses of the run that is not cut come again; they differ from those of a run that begins anew."""
    plain = Model(0)
    plan = plan_of(plain, {"x": batch(0)}, 1, groups=2)
    model, again, anew = (distribute(Model(seed), plan, {"x": batch(0)}, seed=seed) for seed in (0, 1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, None, range(SAVED))
    path = save_checkpoint(tmp_path, model, optimizer, step=SAVED)
    expected = train(model, optimizer, None, range(SAVED, STEPS))
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    load_checkpoint(path, again, other)
    assert train(again, other, None, range(SAVED, STEPS)) == expected
    anew.load_state_dict(plain.state_dict())
    assert train(anew, torch.optim.AdamW(anew.parameters(), lr=0.1), None, range(SAVED, STEPS)) != expected


def test_the_whole_state_is_that_of_the_plain_model(one_rank):
    plain = Model(0, dropout=0.0)
    plan = plan_of(plain, {"x": batch(0)}, 1, groups=2)
    model = distribute(copy.deepcopy(plain), plan, {"x": batch(0)})
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        train(one, optimizer, None, range(SAVED))
    wanted, found = optimizers[0].state_dict(), whole_optimizer_state(model, optimizers[1])
    assert found["param_groups"] == wanted["param_groups"] and found["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        torch.testing.assert_close(found["state"][number], state)
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_whole_optimizer_state(model, again, wanted)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(again.state[parameter], optimizers[0].state[plain.get_parameter(name)])


class Twice(nn.Module):
    """Reads one table on the first device and on the last."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x):
        return functional.linear(functional.linear(x * self.scale, self.table).relu(), self.table).square().mean()


def held():
    """What each process holds, which began with values of its own."""
    model = Twice(dist.get_rank())
    placed = distribute(model, plan_of(model, {"x": batch(0)}, 2, groups=None, deal="chain"), {"x": batch(0)})
    return {name: value.clone() for name, value in placed.state_dict().items()}


def test_processes_that_hold_the_same_tensor_agree():
    first, second = run(2, held, timeout_s=120)
    assert "table" in first.keys() & second.keys()
    assert torch.equal(first["table"], second["table"]) and torch.equal(first["table"], Twice(0).table)


def test_a_crash_while_saving_leaves_the_last_one(tmp_path):
    model = torch.nn.Linear(2, 2)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, model, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]  # two, unless told otherwise
    (tmp_path / ".step-00000004.partial").mkdir()
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000009")
    os.remove(tmp_path / "step-00000009" / "rlplace.json")
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert load_checkpoint(tmp_path, model).step == 3
    save_checkpoint(tmp_path, model, step=4)
    assert not list(tmp_path.glob(".step*"))


class ByName:
    """Pickles as the getattr of something, as Python 3.11.0 to 3.11.3 pickle members of enums."""

    def __init__(self, owner, name):
        self.pair = owner, name

    def __reduce__(self):
        return getattr, self.pair


def test_an_index_may_name_members_of_enums_and_nothing_else():
    def load(found):
        return _Unpickler(io.BytesIO(pickle.dumps(found))).load()

    encoding = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert load(ByName(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")) is encoding
    for owner, name in ((_MEM_FORMAT_ENCODING, "__init__"), (torch.Size, "__init__"), (dict, "fromkeys")):
        with pytest.raises(InputError, match="getattr"):
            load(ByName(owner, name))


class Harm:
    """Unpickling it would run code."""

    def __reduce__(self):
        return os.system, ("touch /tmp/rlplace-harm",)


def test_an_index_with_code_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, model, step=1)
    good = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError, match=r"names (posix|nt)\.system"):
        load_checkpoint(path, model)
    (path / ".metadata").write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(path, model)


def test_a_model_of_another_shape_is_refused(tmp_path):
    save_checkpoint(tmp_path, torch.nn.Linear(2, 2), step=1)
    with pytest.raises(InputError, match=r"'weight' is \[2, 2\] there and \[2, 3\] in the model"):
        load_checkpoint(tmp_path, torch.nn.Linear(3, 2))
    with pytest.raises(InputError, match="saved without an optimizer"):
        model = torch.nn.Linear(2, 2)
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
