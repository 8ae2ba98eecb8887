"""torch.compile(model, backend="rlplace"): same outputs, gradients and training as eager, with ops on several devices."""

import copy
import logging
import subprocess
import sys

import equality
import pytest
import sim_device
import small_models
import torch
from own_backward import Triple
from torch import nn

from rlplace.errors import InputError, MissingError
from rlplace.integrations import dynamo_backend
from rlplace.integrations.dynamo import Settings


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """The compiled model behind the interface of the model itself."""

    def __init__(self, model, **options):
        self.model, self.call = model, torch.compile(model, backend=dynamo_backend, options=options)

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


class Small(nn.Module):
    """A counter, running statistics, a tie and a branch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.side = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.body(x) + self.side(x))


def small():
    torch.manual_seed(0)
    model = Small()
    return model, copy.deepcopy(model), {"tokens": torch.randint(0, 12, (6,))}


def mean_of_squares(y):
    return y.square().mean()


def backends(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rlplace"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awkward", "inception"])
def test_a_plan_of_the_whole_model_trains_like_eager(sim, caplog, name):
    caplog.set_level(logging.INFO, "rlplace")
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    reference = copy.deepcopy(model)
    names = equality.op_names(model, inputs)
    compiled = Compiled(model, plan=equality.random_plan(names, 3, seed=1), devices=sim(3))
    equality.train_both(compiled, reference, inputs, loss_of, equality.adam)
    assert {copied.destination for copied in sim_device.copies} >= {"sim:0", "sim:1", "sim:2", "cpu"}
    (line,) = backends(caplog)
    placed = int(line.split(" ops placed by the plan, ")[0].rpartition(" ")[2])
    assert placed >= len(names) - 1 and f"{placed} of them by name" in line  # awkward makes a tensor that it never uses


def test_without_a_plan_every_graph_is_planned(sim, caplog, tmp_path):
    caplog.set_level(logging.INFO, "rlplace")
    model, reference, inputs = small()
    compiled = Compiled(model, cluster="h100:2,pcie", devices=sim(2), planner="round_robin")
    equality.train_both(compiled, reference, inputs, mean_of_squares, equality.sgd)
    assert {copied.destination for copied in sim_device.copies} == {"sim:0", "sim:1", "cpu"}
    assert "ops placed by round_robin" in backends(caplog)[0]


def test_new_shapes_and_inference(sim):
    model, reference, _ = small()
    plan = equality.random_plan(equality.op_names(model, {"tokens": torch.zeros(6, dtype=torch.long)}), 2, seed=3)
    compiled = Compiled(model, plan=plan, devices=sim(2), keep_weights=True)
    for size in (6, 4, 9, 5):
        inputs = {"tokens": torch.randint(0, 12, (size,))}
        model.zero_grad()
        reference.zero_grad()
        equality.assert_same_step(compiled, reference, inputs, mean_of_squares)
    model.eval()
    reference.eval()
    with torch.no_grad():
        weight = model.side.weight.numel() * 4
        for round_number in range(3):
            sim_device.copies.clear()
            torch.testing.assert_close(compiled(**inputs), reference(**inputs))
            moved = [copied for copied in sim_device.copies if copied.source == "cpu" and copied.size_bytes == weight]
            assert bool(moved) == (round_number != 1), "weights are copied at first, and again when they have changed"
            if round_number == 1:
                for net in (model, reference):
                    net.side.weight.mul_(1.5)
                    net.body[0].weight.mul_(0.5)


def test_graph_breaks_are_placed_one_by_one(sim, caplog):
    caplog.set_level(logging.INFO, "rlplace")
    model, reference, inputs = small()

    def broken(net):
        def run(tokens):
            x = net.body(net.embed(tokens)) + net.side(net.embed(tokens))
            torch._dynamo.graph_break()
            return net.head(x)

        return run

    plan = equality.random_plan(equality.op_names(model, inputs), 2, seed=0)
    ours = torch.compile(broken(model), backend=dynamo_backend, options={"plan": plan, "devices": sim(2)})(**inputs)
    theirs = broken(reference)(**inputs)
    torch.testing.assert_close(ours, theirs)
    mean_of_squares(ours).backward()
    mean_of_squares(theirs).backward()
    equality.assert_same_gradients(model, reference, 2e-6)
    lines = backends(caplog)
    assert len(lines) == 2 and all("the others are in further graphs" in line for line in lines)


def test_autocast_follows_the_processor_and_is_refused_elsewhere(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    options = {"cluster": "h100:2", "planner": "round_robin"}
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, backend=dynamo_backend, options={**options, "devices": ["cpu", "cpu"]})
        torch.testing.assert_close(compiled(x), model(x))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=dynamo_backend, options={**options, "devices": sim(2)})
        with pytest.raises(InputError, match="autocast is on for cpu and not for sim"):
            compiled(x)


def test_autocast_inside_of_the_compiled_code():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return y.float() + 1

    options = {"cluster": "h100:2", "planner": "round_robin", "devices": ["cpu", "cpu"]}
    ours = torch.compile(run, backend=dynamo_backend, options=options)(x)
    torch.testing.assert_close(ours, run(x), rtol=0, atol=0)
    assert not torch.equal(ours, model(x) + 1) and not torch.is_autocast_enabled("cpu")


def test_what_cannot_be_placed_is_refused(sim):
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    options = {"cluster": "h100:2", "planner": "round_robin", "devices": sim(2)}
    for run, message in (
        (lambda x: Triple.apply(layer(x)), r"a torch\.autograd\.Function, whose own backward would be lost"),
        (lambda x: checkpoint(layer, x, use_reentrant=False), "checkpoints activations"),
    ):
        torch._dynamo.reset()
        with pytest.raises(InputError, match=message):
            torch.compile(run, backend=dynamo_backend, options=options)(x)
    compiled = torch.compile(lambda x: (layer(x) > 0).sum(), backend=dynamo_backend, options=options)
    assert int(compiled(x)) == int((layer(x) > 0).sum())  # nothing to train: it stays where it is


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plans": 1}, "unknown option of backend rlplace 'plans'; did you mean 'plan'"),
        ({"plan": 3}, "it must be a PlacementPlan or a file"),
        ({"devices": "cpu"}, "it must be a list"),
        ({"devices": ["cpu"], "cluster": "h100:2"}, "the cluster has 2 devices, 1 are there"),
        ({"keep_weights": 1}, "True or False"),
        ({"devices": ["nowhere:0"]}, "is not a device"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        Settings.of(options)


def test_options_that_do_not_go_together(sim, tmp_path):
    plan = equality.plan_for(["a/linear", "b/linear"], [0, 1])
    with pytest.raises(InputError, match="a plan needs no planner"):
        Settings.of({"plan": plan, "planner": "best"})
    with pytest.raises(InputError, match="the plan uses 2 devices, there are 1"):
        Settings.of({"plan": plan, "devices": ["cpu"]})
    with pytest.raises(InputError, match="what sim:0 can do is not known"):
        Settings.of({"devices": sim(2)})
    plan.save(tmp_path / "p.plan.json")
    assert Settings.of({"plan": tmp_path / "p.plan.json", "devices": sim(2)}).plan.fingerprint == plan.fingerprint
    assert len(Settings.of({"devices": ["cpu", "cpu"]}).cluster.devices) == 2
    if not torch.cuda.is_available():
        with pytest.raises(MissingError, match="not usable on this machine"):
            Settings.of({"devices": ["cuda:0"]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="has no modes"):
        torch.compile(nn.Linear(2, 2), backend=dynamo_backend, mode="reduce-overhead")(torch.ones(1, 2))


def test_a_plan_for_another_model_is_refused(sim):
    plan = equality.plan_for(["encoder.0/linear", "encoder.1/linear"], [0, 1])
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend=dynamo_backend, options={"plan": plan, "devices": sim(2)})
    with pytest.raises(InputError, match="the plan knows no module of this graph"):
        compiled(torch.ones(1, 2))


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_entry_point(tmp_path):
    code = (
        "import sys, torch\n"
        "assert 'rlplace' in torch._dynamo.list_backends(), 'install the package again: its entry points are missing'\n"
        "assert 'rlplace' not in sys.modules\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))\n"
        "x = torch.ones(2, 3)\n"
        "options = {'devices': ['cpu', 'cpu'], 'planner': 'balanced'}\n"
        "print(torch.equal(torch.compile(model, backend='rlplace', options=options)(x), model(x)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr[-2000:]
