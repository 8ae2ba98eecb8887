"""What the tests of the sharded engine run in every process."""

from __future__ import annotations

import copy
import tempfile

import numpy as np
import small_models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from rlplace.plan import PlacementPlan
from rlplace.runtime.distributed.engine import Microbatch
from rlplace.runtime.distributed.forward_graph import flat_inputs, forward_graph
from rlplace.runtime.distributed.randomness import random_key
from rlplace.runtime.distributed.sharded.engine import ShardedEngine

CPU = torch.device("cpu")
OWN_LOSS = {"gpt2", "bert", "llama", "mixtral", "t5", "vit", "swin", "resnet"}
SINGLE_PRECISION = {"mixtral"}
"""Its products of groups of experts have no kernel in double precision."""


def plan_of(shards, ops=()):
    """A plan of one group on the first device."""
    groups = [{"name": "all", "modules": [""], "ops": list(ops)}]
    return PlacementPlan("0" * 64, "test", 0, np.zeros(1, dtype=np.int32), shards=shards, groups=groups)


def make(name, **options):
    """A small model in double precision, its inputs, the loss of its output, and whether that is outside the model."""
    torch.manual_seed(0)
    model, inputs, loss = small_models.MODELS[name](**options)
    if name not in SINGLE_PRECISION:
        model = model.double()
        inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        if "batch" in inputs:
            inputs["batch"] = {**inputs["batch"], "dense": inputs["batch"]["dense"].double()}
    return model, inputs, loss, name not in OWN_LOSS


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def close(ours, theirs, what, tolerance):
    """Relative to the largest value."""
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    error = float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-2)
    assert error <= tolerance, f"{what}: differs by {error:.1e} of its largest value"


def compare(name, shards, tolerance=1e-5, steps=3, adjust=None):
    """Trains a sharded and a plain model on the same batch; losses, gradients, parameters and buffers are equal."""
    model, inputs, loss, outside = make(name)
    if adjust is not None:
        adjust(model)
    graph = forward_graph(model, (), inputs, loss=loss if outside else None)
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    ours = torch.optim.AdamW(engine.parameters.values(), lr=1e-3, eps=1e-6)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-6)
    by_name = dict(plain.named_parameters())
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, step)
        expected = loss(plain(**inputs))
        expected.backward()
        close(value, expected.detach(), "loss", tolerance)
        for key, parameter in engine.parameters.items():
            assert (parameter.grad is None) == (by_name[key].grad is None), key
            if parameter.grad is not None:
                assert parameter.grad.placements == parameter.placements
                close(parameter.grad, by_name[key].grad, f"gradient of {key}", tolerance)
        ours.step()
        theirs.step()
    for key, parameter in engine.parameters.items():
        close(parameter.detach(), by_name[key].detach(), key, tolerance)
    buffers = dict(plain.named_buffers())
    for key, buffer in engine.buffers.items():
        if key in buffers:
            close(buffer.double(), buffers[key].double(), key, tolerance)
    found = engine.evaluate([Microbatch(0, flat_inputs((), inputs), 1.0)])[0]
    assert len(found) == len(graph.outputs) + outside
    ways = [step.way for step in engine.program.steps]
    whole = sum(parameter.numel() for parameter in engine.parameters.values())
    local = sum(parameter.to_local().numel() for parameter in engine.parameters.values())
    return {"mesh": engine.mesh.shape, "cut": ways.count("cut"), "share": local / whole, "report": dict(engine.program.report)}


def models(cases):
    """One result per ``(model, shards)``."""
    return [compare(name, shards, 2e-4 if name in SINGLE_PRECISION else 5e-6) for name, shards in cases]


def all_checks(cases, block_shards):
    """The quick checks of two processes, in one job."""
    return {
        "models": models(cases),
        "batch norm": frozen_statistics(dict(cases)["resnet"]),
        "dropout": dropout(dict(cases)["gpt2"]),
        "micro-batches": microbatches(dict(cases)["gpt2"]),
        "mixed precision": mixed_precision(dict(cases)["gpt2"]),
        "block": against_parallelize(block_shards),
        "loss outside": outer_loss(),
        "checkpoint": checkpoint(block_shards),
    }


def frozen_statistics(shards):
    """Batch norm in evaluation mode, cut like in training mode."""
    model, inputs, loss, _ = make("resnet")
    model.eval()
    graph = forward_graph(model, (), inputs)
    engine = ShardedEngine(graph, plan_of(shards), state_of(copy.deepcopy(model)), CPU)
    value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
    expected = loss(model(**inputs))
    expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    for key, parameter in model.named_parameters():
        close(engine.parameters[key].grad, parameter.grad, key, 1e-6)


def dropout(shards):
    """The graph in one process, with the streams of the same key, draws what the sharded one draws."""
    model, inputs, _, _ = make("gpt2", dropout=0.3)
    graph = forward_graph(model, (), inputs)
    assert graph.random_ops
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    drawn = [step for step in engine.program.steps if step.way == "random"]
    assert len(drawn) == graph.random_ops
    state, values = state_of(plain), []
    for step in range(2):
        value = engine.train([Microbatch(7, flat_inputs((), inputs), 1.0)], 3, step)
        with random_key(3, step, 7):
            flat = graph.module(*(state[name] for name in graph.held), *flat_inputs((), inputs))
        expected = flat[graph.outputs.index(graph.loss)]
        expected.backward()
        close(value, expected.detach(), "loss", 1e-6)
        values.append(float(value))
    for key, parameter in plain.named_parameters():
        close(engine.parameters[key].grad, parameter.grad, key, 1e-6)
    assert values[0] != values[1]


def microbatches(shards):
    """Two micro-batches of different weight; one reduction of each gradient for both."""
    model, inputs, loss, _ = make("gpt2")
    graph = forward_graph(model, (), inputs)
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    other = {key: value.flip(0).roll(1, 1) for key, value in inputs.items()}
    parts = [Microbatch(0, flat_inputs((), inputs), 0.25), Microbatch(1, flat_inputs((), other), 0.75)]
    value = engine.train(parts, 0, 0)
    expected = 0.25 * loss(plain(**inputs)) + 0.75 * loss(plain(**other))
    expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    for key, parameter in plain.named_parameters():
        close(engine.parameters[key].grad, parameter.grad, key, 1e-6)


def mixed_precision(shards):
    """Under autocast, as near to the plain model as two orders of summation in bfloat16 are."""
    torch.manual_seed(0)
    model, inputs, loss = small_models.gpt2()
    graph = forward_graph(model, (), inputs)
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
        expected = loss(plain(**inputs))
    expected.backward()
    assert abs(float(value) - float(expected)) < 1e-2 * float(expected)
    for key, parameter in plain.named_parameters():
        assert engine.parameters[key].grad.dtype == parameter.dtype
        close(engine.parameters[key].grad, parameter.grad, key, 5e-2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


def block():
    """The block and a batch, the same in every process."""
    torch.manual_seed(1)
    return Block().double(), {"x": torch.randn(4, 6, 16, dtype=torch.float64)}


def block_loss(output):
    return output.square().mean()


def against_parallelize(shards):
    """The same values, pieces of parameters and collectives as torch's own tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

    model, inputs = block()
    graph = forward_graph(model, (), inputs, loss=block_loss)
    engine = ShardedEngine(graph, plan_of(shards), state_of(copy.deepcopy(model)), CPU)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    layers |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    layers["attention"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    theirs = parallelize_module(model, mesh, layers)
    ours_mode, theirs_mode = CommDebugMode(), CommDebugMode()
    with ours_mode:
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
    with theirs_mode:
        expected = block_loss(theirs(**inputs))
        expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    for key, parameter in theirs.named_parameters():
        own = engine.parameters[key]
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            assert own.placements == parameter.placements, key
            gradient = gradient.full_tensor()
        close(own.grad, gradient, key, 1e-6)
    counts = [{str(op): n for op, n in mode.get_comm_counts().items()} for mode in (ours_mode, theirs_mode)]
    return counts


def outer_loss():
    """A cross entropy outside the model runs on the pieces of the batch; the logits are never gathered."""
    model, inputs, _, _ = make("lstm")
    tokens = inputs["tokens"].clone()
    tokens[0, 1:] = -100  # the devices' parts of the mean are of different size

    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    graph = forward_graph(model, (), inputs, loss=loss, target=tokens)
    shards = {op: {"m0": 2} for op in graph.op_of_node.values() if op.startswith(("embed/", "head/"))}
    shards |= {op: {"b": 2} for op in graph.op_of_node.values() if "/lstm" in op}
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    leaves = flat_inputs((), inputs, tokens)
    mode = CommDebugMode()
    with mode:
        value = engine.train([Microbatch(0, leaves, 1.0)], 0, 0)
    expected = loss(plain(**inputs), tokens)
    expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    for key, parameter in plain.named_parameters():
        close(engine.parameters[key].grad, parameter.grad, key, 1e-6)
    outputs = engine.evaluate([Microbatch(0, leaves, 1.0)])[0]
    close(outputs[0], plain(**inputs).detach(), "logits", 1e-6)
    close(outputs[1], expected.detach(), "loss", 1e-6)
    return {"gathers": sum(n for op, n in mode.get_comm_counts().items() if "gather" in str(op)), **engine.program.report}


def checkpoint(shards):
    """Saved as DTensors, loaded into the plain model and into a plan with other pieces."""
    from torch.distributed import checkpoint as dcp

    model, inputs = block()
    graph = forward_graph(model, (), inputs, loss=block_loss)
    engine = ShardedEngine(graph, plan_of(shards), state_of(copy.deepcopy(model)), CPU)
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=1e-2)
    engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
    optimizer.step()
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    dcp.save({key: value.detach() for key, value in engine.parameters.items()}, checkpoint_id=path[0])
    plain = block()[0]
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=path[0])
    plain.load_state_dict(state)
    for key, parameter in plain.named_parameters():
        close(engine.parameters[key].detach(), parameter.detach(), key, 0.0)
    other = ShardedEngine(graph, plan_of({"up/linear_4": {"m0": 2}}), state_of(block()[0]), CPU)
    dcp.load({key: value.detach() for key, value in other.parameters.items()}, checkpoint_id=path[0])
    for key, parameter in plain.named_parameters():
        close(other.parameters[key].detach(), parameter.detach(), key, 0.0)
