"""Copies between CUDA devices: which streams they use and who waits for whom, on stand-ins for devices and streams."""

import contextlib

import equality
import pytest
import torch
from torch import nn

from rlplace.runtime import streams
from rlplace.runtime.apply import apply

LOG = []


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


CURRENT = []


@pytest.fixture
def cuda(monkeypatch):
    LOG.clear()

    @contextlib.contextmanager
    def stream(s):
        CURRENT.append(s.name)
        yield
        CURRENT.pop()

    made = {}

    def side_stream(source, destination):
        return made.setdefault((source, destination), (Stream(f"side of {source}"), Stream(f"side of {destination}")))

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"compute of {device}"))
    monkeypatch.setattr(streams, "side_stream", side_stream)


def test_a_copy_holds_up_neither_device_until_it_is_read(cuda):
    moving = streams.start_copy(Tensor("cuda:0"), torch.device("cuda:1"))
    assert LOG == [
        "side of cuda:0 waits for compute of cuda:0",
        "copy to cuda:1, async, under side of cuda:0 and side of cuda:1",
        "event on side of cuda:1",
        "memory on cuda:0 is used by side of cuda:0",
    ]
    LOG.clear()
    assert streams.finish(moving).device == torch.device("cuda:1")
    assert LOG == [
        "compute of cuda:1 waits for event of side of cuda:1",
        "memory on cuda:1 is used by compute of cuda:1",
    ]


@pytest.mark.parametrize(
    ("source", "destination"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0"), ("sim:0", "sim:1")]
)
def test_other_copies_are_plain(cuda, sim, source, destination):
    tensor = Tensor(source)
    moved = streams.finish(streams.start_copy(tensor, torch.device(destination)))
    assert moved.device == torch.device(destination)
    assert LOG == [f"copy to {destination}, not async, under "]


def test_copies_start_where_their_values_are_made(sim):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            first = self.body[1](self.body[0](x))
            return self.body[3](self.body[2](first)) + first

    net = Skip()
    names = equality.op_names(net, ((x,), {}))
    places = {"body.0/linear": 0, "body.1/relu": 0, "body.2/linear_1": 0, "body.3/linear_2": 0, "/add": 1, "add": 1}
    apply(net, equality.plan_for(names, [places[name] for name in names]), sim(2), example_inputs=(x,))
    nodes = list(net.forward.first.module.graph.nodes)
    order = [node.name for node in nodes]
    starts = [node for node in nodes if node.target is streams.start_copy and node.args[0].name == "relu"]
    assert len(starts) == 1
    finish = next(iter(starts[0].users))
    assert finish.target is streams.finish
    assert order.index("relu") + 1 == order.index(starts[0].name) < order.index("linear_1")
    assert order.index("linear_2") < order.index(finish.name) < order.index("add")
