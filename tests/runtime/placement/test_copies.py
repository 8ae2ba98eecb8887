"""Copies on streams of their own, started as soon as their values are made."""

import contextlib

import pytest
import torch
from torch import nn

from rlplace.runtime.placement import wire
from rlplace.runtime.placement.apply import apply
from tests.runtime import equality

LOG, CURRENT = [], []


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        LOG.append(f"{self.name} waits for {event}")

    def record_event(self):
        LOG.append(f"event on {self.name}")
        return f"event of {self.name}"


class Tensor:
    def __init__(self, device):
        self.device = torch.device(device)

    def to(self, device, non_blocking=False):
        LOG.append(f"copy to {device}, {'' if non_blocking else 'not '}async, under {' and '.join(sorted(CURRENT))}")
        return Tensor(device)

    def record_stream(self, stream):
        LOG.append(f"memory on {self.device} is used by {stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    LOG.clear()

    @contextlib.contextmanager
    def stream(s):
        CURRENT.append(s.name)
        yield
        CURRENT.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"compute of {device}"))
    monkeypatch.setattr(wire, "side_stream", lambda *ends: tuple(Stream(f"side of {end}") for end in ends))


def test_a_copy_holds_up_neither_device_until_it_is_read(cuda):
    moving = wire.start_copy(Tensor("cuda:0"), torch.device("cuda:1"))
    assert LOG == [
        "side of cuda:0 waits for compute of cuda:0",
        "copy to cuda:1, async, under side of cuda:0 and side of cuda:1",
        "event on side of cuda:1",
        "memory on cuda:0 is used by side of cuda:0",
    ]
    LOG.clear()
    assert wire.finish(moving).device == torch.device("cuda:1")
    assert LOG == ["compute of cuda:1 waits for event of side of cuda:1", "memory on cuda:1 is used by compute of cuda:1"]


@pytest.mark.parametrize("ends", [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0"), ("sim:0", "sim:1")])
def test_other_copies_are_plain(cuda, sim, ends):
    source, destination = ends
    moved = wire.finish(wire.start_copy(Tensor(source), torch.device(destination)))
    assert moved.device == torch.device(destination)
    assert LOG == [f"copy to {destination}, not async, under "]


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        first = self.body[1](self.body[0](x))
        return self.body[3](self.body[2](first)) + first


def test_copies_start_where_their_values_are_made(sim):
    net, x = Skip(), torch.randn(2, 4)
    names = equality.op_names(net, ((x,), {}))
    apply(net, equality.plan_for(names, [int("add" in name) for name in names]), sim(2), example_inputs=(x,))
    (parts,) = net.forward._parts.values()
    nodes = list(parts.forward.module.graph.nodes)
    relu, last = (next(n for n in nodes if n.target is op) for op in (torch.ops.aten.relu.default, torch.ops.aten.add.Tensor))
    (start,) = [node for node in nodes if node.target is wire.start_copy and node.args[0] is relu]
    finish = next(iter(start.users))
    assert finish.target is wire.finish
    products = [number for number, node in enumerate(nodes) if node.target is torch.ops.aten.addmm.default]
    assert nodes.index(relu) + 1 == nodes.index(start) < products[1] < products[2] < nodes.index(finish) < nodes.index(last)
