"""Split points by the real torch.distributed.pipelining: stages hold what the plan puts there, and compute the same."""

import copy
import tomllib
import warnings

import equality
import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.integrations import split_points, split_spec


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self, layers=4, *, tied=False, skip=False):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(8) for _ in range(layers)])
        self.head = nn.Linear(8, 16, bias=False)
        self.skip = skip
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        first = x = self.embed(tokens) * 2.0
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first if self.skip else x)


TOKENS = torch.arange(12).reshape(3, 4)


def net(**options):
    torch.manual_seed(0)
    model = Net(**options)
    return model, equality.op_names(model, {"tokens": TOKENS})


def by_module(names, device_of_prefix):
    """A plan that puts ops on the device of the longest prefix of their module."""
    devices = []
    for name in names:
        prefixes = [p for p in device_of_prefix if not p or f"{name.rpartition('/')[0]}.".startswith(f"{p}.")]
        devices.append(device_of_prefix[max(prefixes, key=len)])
    return equality.plan_for(names, devices)


def parameters_of(modules, model):
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in modules}


def assert_pipe_is(model, split, inputs):
    """Cuts a copy with torch and compares stages, output and gradients with the model's."""
    from torch.distributed.pipelining import pipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipeline(copy.deepcopy(model), (), inputs, split_spec=split.spec)
    assert pipe.num_stages == len(split.modules)
    gradients = {}
    # A call of the pipe itself detaches between stages.
    ours, theirs = torch.fx.Interpreter(pipe.split_gm).run(*inputs.values()), model(**inputs)
    ours = ours[0] if isinstance(ours, tuple) else ours
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for number, modules in enumerate(split.modules):
        stage = dict(pipe.get_stage_module(number).named_parameters())
        assert set(stage) == parameters_of(modules, model)
        gradients |= {name: value.grad for name, value in stage.items()}
    for name, value in model.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad)


def test_stages_of_whole_layers_in_any_order_of_devices():
    model, names = net()
    plan = by_module(names, {"": 2, "layers.1": 0, "layers.2": 0, "layers.3": 1, "head": 1})
    split = split_points(plan, model, (TOKENS,))
    assert split.cuts == (("layers.1", "BEGINNING"), ("layers.3", "BEGINNING"))
    assert (split.devices, split.moved_ops) == ((2, 0, 1), 0)
    assert_pipe_is(model, split, {"tokens": TOKENS})
    assert split.module_fqns() == [["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "head"]]
    written = tomllib.loads(split.torchtitan_toml())["parallelism"]
    assert written == {"pipeline_parallel_degree": 3, "module_fqns_per_model_part": split.module_fqns()}


def test_a_stage_may_begin_inside_a_layer_and_after_a_module():
    model, names = net(layers=2)
    plan = by_module(names, {"": 0, "layers.0.norm": 1, "layers.1": 1, "head": 1})
    plan.device_of_group[names.index("layers.0/add")] = 1
    split = split_points(plan, model, {"tokens": TOKENS})
    assert split.cuts == (("layers.0.down", "END"),) and split.moved_ops == 0
    assert_pipe_is(model, split, {"tokens": TOKENS})
    with pytest.raises(InputError, match=r"keeps or drops 'layers.0' as a whole"):
        split.module_fqns()
    plan.device_of_group[names.index("mul")] = 1  # no parameter: it goes with its neighbours
    assert split_points(plan, model, (TOKENS,)).moved_ops == 1


@pytest.mark.slow
def test_a_pipeline_planned_for_four_devices():
    model, _ = net(layers=6)
    graph = rlplace.capture(model, {"tokens": TOKENS}, loss=lambda y: y.square().mean())
    plan = rlplace.place(graph, "h100:4", planner="gpipe", microbatches=4)
    if len(np.unique(plan.device_of_group)) < 2:  # so small a model is quickest on one device: cut it evenly
        devices = np.arange(len(plan.groups)) * 3 // len(plan.groups)
        plan = rlplace.plan.make_plan(rlplace.price(graph, "h100:4"), devices, planner="even")
    split = split_points(plan, model, (TOKENS,))
    assert_pipe_is(model, split, {"tokens": TOKENS})
    assert list(split_spec(plan, model, (TOKENS,))) == [path for path, _ in split.cuts]


def test_refusals():
    model, names = net()
    back = by_module(names, {"": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1, "head": 1})
    with pytest.raises(
        InputError, match=r"no chain: 'layers.2.up/linear_4' of stage 0 runs after 'layers.1.norm/layer_norm_1'"
    ):
        split_points(back, model, (TOKENS,))
    with pytest.raises(InputError, match="one stage; there is nothing to cut"):
        split_points(by_module(names, {"": 1}), model, (TOKENS,))
    with pytest.raises(InputError, match="the plan is for another model or other inputs"):
        split_points(equality.plan_for(names[:-1], [0] * (len(names) - 1)), model, (TOKENS,))
    tied, names = net(tied=True)
    with pytest.raises(InputError, match=r"'embed.weight' is read in stages 0 and 1: torch would train two copies"):
        split_points(by_module(names, {"": 0, "layers.2": 1, "layers.3": 1, "head": 1}), tied, (TOKENS,))
    skipping, names = net(skip=True)
    with pytest.raises(InputError, match=r"reads 'mul' of stage 0: torch's pipelines pass gradients to the stage before only"):
        split_points(by_module(names, {"": 0, "layers.2": 1, "layers.3": 2, "head": 2}), skipping, (TOKENS,))
    two = by_module(names, {"": 0, "layers.3": 1, "head": 1})
    assert split_points(two, skipping, (TOKENS,)).cuts == (("layers.3", "BEGINNING"),)
    looped = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = looped

        def forward(self, x):
            return self.body(self.body(x))

    names = equality.op_names(Twice(), {"x": torch.ones(2, 4)})
    plan = equality.plan_for(names, [0] * (len(names) // 2) + [1] * (len(names) - len(names) // 2))
    with pytest.raises(InputError, match=r"is read in stages|no module begins or ends"):
        split_points(plan, Twice(), (torch.ones(2, 4),))


@pytest.mark.slow
def test_attention_layers_of_torch():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 16)
            self.layers = nn.ModuleList(
                [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
            )
            self.head = nn.Linear(16, 16)

        def forward(self, tokens):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, src_mask=mask)
            return self.head(x)

    torch.manual_seed(0)
    model = Encoder()
    inputs = {"tokens": TOKENS}
    plan = by_module(equality.op_names(model, inputs), {"": 0, "layers.1": 1, "layers.2": 2, "head": 2})
    split = split_points(plan, model, inputs)
    assert split.cuts == (("layers.1", "BEGINNING"), ("layers.2", "BEGINNING"))
    assert_pipe_is(model, split, inputs)
