"""A person's own function: the samples that it gives, what it may return, and what its file may import."""

import argparse
import sys
import textwrap
import warnings
from collections import UserDict

import pytest
import torch

from rlplace.cli.main import main
from rlplace.cli.models import asked_batch, microbatch
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.model.zoo.functions import fixed_samples

NET = """
    import dataclasses
    from collections import OrderedDict, UserDict

    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)

        def forward(self, x):
            return {"loss": self.last(self.first(x).relu()).square().mean()}

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    rows = torch.arange(24.0).reshape(4, 6)

    def fixed():
        return Net(), {"x": rows}

    def ignores(batch):
        return Net(), {"x": rows}

    def follows(batch):
        return Net(), {"x": torch.zeros(batch, 6)}

    def late(batch):
        return Net(), {"scale": torch.ones(()), "x": torch.zeros(batch, 6)}

    def tensor():
        return Net(), rows

    def positional():
        return Net(), [rows]

    def ordered():
        return Net(), OrderedDict(x=rows)

    def like_a_dict():
        return Net(), UserDict(x=rows)

    def dataclass():
        return Net(), Batch(rows)

    def bare():
        return Net()

    def no_model():
        return [rows, rows]

    def loss_tensor():
        return Net(), {"x": rows}, torch.zeros(())
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "net_of_a_user.py"
    path.write_text(textwrap.dedent(NET))
    return path


def test_a_function_without_batch_is_never_asked_for_another(net):
    assert load_model(f"{net}:fixed").example_inputs["x"].shape == (4, 6)
    assert load_model(f"{net}:fixed", batch=4).fixed == 4
    with pytest.raises(InputError, match=r"gives 4 samples whatever is asked: .*parameter batch .*docs/quickstart.md"):
        load_model(f"{net}:fixed", batch=8)
    assert load_model(f"{net}:follows").example_inputs["x"].shape == (8, 6)
    assert fixed_samples(f"{net}:follows", 16) is None
    assert fixed_samples(f"{net}:follows,batch=3", 16) == 3  # an option decides it


def test_its_samples_are_cut_and_repeated_where_a_micro_batch_needs_it(net):
    rows = torch.arange(24.0).reshape(4, 6)
    cut = load_model(f"{net}:fixed", batch=2, resize=True)
    assert torch.equal(cut.example_inputs["x"], rows[:2])
    more = load_model(f"{net}:fixed", batch=6, resize=True)
    assert torch.equal(more.example_inputs["x"], torch.cat([rows, rows[:2]]))


@pytest.mark.parametrize("name", ["ignores", "late"])
def test_a_function_that_ignores_its_batch_is_refused(net, name):
    with pytest.raises(InputError, match=r"asked for batch=8 it gives [41] samples, the rows of the first tensor"):
        load_model(f"{net}:{name}")


def test_the_command_line_plans_with_those_samples_or_refuses_another_batch(net, capsys):
    model = f"{net}:fixed"
    options = argparse.Namespace(batch=None, microbatch=None, seq=16)
    assert asked_batch(model, options) == (4, 4) and microbatch(model, options) == 4
    assert "gives 4 samples whatever is asked: a step has 4" in capsys.readouterr().err
    options.batch = 8
    with pytest.raises(InputError, match=r"whatever is asked: leave --batch 8 out; give the function a parameter batch"):
        asked_batch(model, options)
    assert asked_batch(f"{net}:follows", options) == (8, 8)


GRAPHS = """
import torch

class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))

    def forward(self, nodes, target):
        return {"loss": (self.layers(nodes).unflatten(0, (-1, 5)).mean(1) - target).square().mean()}

def graphs():
    return Graphs(), {"nodes": torch.randn(20, 4), "target": torch.randn(4, 8)}
"""


@pytest.mark.slow
def test_a_function_whose_samples_cannot_be_cut_is_planned_as_one_micro_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "graphs.py").write_text(GRAPHS)
    assert main(["place", f"{tmp_path / 'graphs.py'}:graphs", "--cluster", "cpu:2", "--calls", "20"]) == 0
    said = capsys.readouterr()
    assert "planning micro-batches of 20 samples only: the model runs with 20 samples" in said.err
    assert "1 micro-batch of 20" in said.out


def test_place_says_it_and_numpy_says_nothing(net, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["place", f"{net}:fixed", "--cluster", "cpu:2", "--space", "tensor=1"]) == 0
    said = capsys.readouterr()
    assert "for 4 samples a step" in said.out and "2 replicas, 1 micro-batch of 2" in said.out
    assert "gives 4 samples whatever is asked" in said.err
    assert main(["place", f"{net}:fixed", "--cluster", "cpu:2", "--batch", "8"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensor", "positional", "ordered", "like_a_dict"])
def test_what_inputs_may_be(net, name):
    model = load_model(f"{net}:{name}")
    assert not isinstance(model.example_inputs, UserDict)
    assert capture(model.module, model.example_inputs).samples == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dataclass", r"hold no tensor, found Batch; return a dict of tensors by the names of the forward's arguments"),
        ("bare", r"must return \(module, example_inputs\) .*, found Net"),
        ("no_model", r"must return .*, found a list of Tensor, Tensor"),
        ("loss_tensor", r"the loss must be a function of the module's output, found Tensor"),
    ],
)
def test_what_is_refused(net, name, words):
    with pytest.raises(InputError, match=words):
        load_model(f"{net}:{name}")


def _write(folder, number):
    folder.mkdir()
    (folder / "helper_beside.py").write_text(f"WIDTH = {number}\n")
    (folder / "late_beside.py").write_text(f"FACTOR = {number}\n")
    (folder / "mine.py").write_text(
        "import torch\nfrom helper_beside import WIDTH\n\n"
        "class Late(torch.nn.Linear):\n    def forward(self, x):\n        import late_beside\n"
        "        return super().forward(x).sum() * late_beside.FACTOR\n\n"
        "def net():\n    return Late(WIDTH, 1), {'x': torch.zeros(4, WIDTH)}\n"
    )
    return f"{folder / 'mine.py'}:net"


def test_a_file_sees_its_neighbours_when_it_is_imported_and_when_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number in (3, 5):  # files of one name in two folders
        model = load_model(_write(tmp_path / str(number), number))
        assert model.module.in_features == number
        assert capture(model.module, model.example_inputs).samples == 4
        assert sys.modules["late_beside"].FACTOR == number
