"""What the tests of the sharded engine run in every process."""

from __future__ import annotations

import copy
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from equal import SINGLE_PRECISION, build, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from rlplace.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import Microbatch
from rlplace.runtime.distributed.graph.forward_graph import flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.same_graph import check_same_graph
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.sharded.engine import ShardedEngine
from rlplace.runtime.distributed.sharded.spaces import spaces_of

CPU = torch.device("cpu")


def plan_of(shards, ops=()):
    """A plan of one group on the first device."""
    groups = [{"name": "all", "modules": [""], "ops": list(ops)}]
    return PlacementPlan("0" * 64, "test", 0, np.zeros(1, dtype=np.int32), shards=shards, groups=groups)


def state_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def close(ours, theirs, what, tolerance):
    """Relative to the largest value."""
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    error = float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-2)
    assert error <= tolerance, f"{what}: differs by {error:.1e} of its largest value"


def close_gradients(engine, plain, tolerance, what=""):
    for key, parameter in plain.named_parameters():
        close(engine.parameters[key].grad, parameter.grad, f"{what}gradient of {key}", tolerance)


def compare(name, shards, tolerance=1e-5, steps=3):
    """Trains a sharded and a plain model on the same batch; losses, gradients, parameters and buffers are equal."""
    model, inputs, loss = build(name)
    graph = forward_graph(model, (), inputs, loss=loss)
    world = dist.get_world_size()
    check_same_graph(graph, Ranks(dist.get_rank(), world, CPU, (tuple(range(world)),)))
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    ours = torch.optim.AdamW(engine.parameters.values(), lr=1e-3, eps=1e-6)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-6)
    by_name = dict(plain.named_parameters())
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, step)
        expected = loss_of(plain(**inputs), loss)
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
    assert len(found) == len(graph.outputs) + (loss is not None)
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
        "ops": single_ops(),
        "models": models(cases),
        "batch norm": frozen_statistics(dict(cases)["resnet"]),
        "dropout": dropout(dict(cases)["gpt2"]),
        "micro-batches": microbatches(dict(cases)["gpt2"]),
        "mixed precision": mixed_precision(dict(cases)["gpt2"]),
        "block": against_parallelize(block_shards),
        "loss outside": outer_loss(),
        "checkpoint": checkpoint(block_shards),
    }


def _positive(*shape):
    return torch.rand(*shape, dtype=torch.float64) + 0.1


SINGLE_OPS = {
    "linear k": (lambda x, w, b: F.linear(x, w, b), [(4, 6, 8), (10, 8), (10,)], {"k": 2}),
    "linear m1": (lambda x, w, b: F.linear(x, w, b), [(4, 6, 8), (10, 8), (10,)], {"m1": 2}),
    "linear n": (lambda x, w, b: F.linear(x, w, b), [(4, 6, 8), (10, 8), (10,)], {"n": 2}),
    "addmm k": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), [(10,), (4, 8), (8, 10)], {"k": 2}),
    "baddbmm k": (lambda b, x, w: torch.baddbmm(b, x, w), [(2, 4, 10), (2, 4, 8), (2, 8, 10)], {"k": 2}),
    "matmul b0": (lambda x, w: x @ w, [(4, 2, 6, 8), (4, 2, 8, 6)], {"b0": 2}),
    "matmul k": (lambda x, w: x @ w, [(4, 2, 6, 8), (4, 2, 8, 6)], {"k": 2}),
    "bmm m": (torch.bmm, [(2, 4, 8), (2, 8, 10)], {"m": 2}),
    "mm k": (torch.mm, [(4, 8), (8, 10)], {"k": 2}),
    "conv2d c": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 4, 6, 6), (6, 4, 3, 3), (6,)], {"c": 2}),
    "conv2d n": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 4, 6, 6), (6, 4, 3, 3), (6,)], {"n": 2}),
    "conv1d b": (lambda x, w, b: F.conv1d(x, w, b), [(2, 4, 6), (6, 4, 3), (6,)], {"b": 2}),
    "mean over d1": (lambda x: x.mean(1), [(4, 6, 8)], {"d1": 2}),
    "mean of all": (lambda x: x.mean(), [(4, 6)], {"d0": 2}),
    "mean kept": (lambda x: x.mean((0, 2), keepdim=True), [(4, 6, 8)], {"d1": 2}),
    "sum over d0": (lambda x: x.sum(0), [(4, 6)], {"d0": 2}),
    "mse": (F.mse_loss, [(4, 6), (4, 6)], {"d1": 2}),
    "l1 summed": (lambda x, y: F.l1_loss(x, y, reduction="sum"), [(4, 6), (4, 6)], {"d0": 2}),
    "smooth l1": (F.smooth_l1_loss, [(4, 6), (4, 6)], {"d0": 2}),
    "huber": (F.huber_loss, [(4, 6), (4, 6)], {"d0": 2}),
    "layer norm c": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(4, 6, 8), (8,), (8,)], {"c": 2}),
    "layer norm m1": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(4, 6, 8), (8,), (8,)], {"m1": 2}),
    "layer norm c1": (lambda x, w, b: F.layer_norm(x, (6, 8), w, b), [(4, 6, 8), (6, 8), (6, 8)], {"c1": 2}),
    "rms norm c": (lambda x, w: F.rms_norm(x, (8,), w), [(4, 6, 8), (8,)], {"c": 2}),
    "softmax d1": (lambda x: F.softmax(x, 1), [(4, 6)], {"d1": 2}),
    "log softmax d1": (lambda x: F.log_softmax(x, 1), [(4, 6)], {"d1": 2}),
    "softmax d0": (lambda x: F.softmax(x, 1), [(4, 6)], {"d0": 2}),
    "attention batch": (F.scaled_dot_product_attention, [(2, 4, 6, 8)] * 3, {"batch": 2}),
    "attention heads": (F.scaled_dot_product_attention, [(2, 4, 6, 8)] * 3, {"heads": 2}),
    "attention queries": (F.scaled_dot_product_attention, [(2, 4, 6, 8)] * 3, {"queries": 2}),
    "causal queries": (lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), [(2, 4, 6, 8)] * 3, {"queries": 2}),
    "masked queries": (F.scaled_dot_product_attention, [*[(2, 4, 6, 8)] * 3, (2, 1, 6, 6)], {"queries": 2}),
    "cat": (lambda x, y: torch.cat([x, y], 1), [(4, 6), (4, 2)], {"d0": 2}),
    "pad": (lambda x: F.pad(x, (1, 1)), [(4, 6)], {"d0": 2}),
    "broadcast": (lambda x, y: x * y, [(4, 6), (6,)], {"d0": 2}),
    "broadcast d1": (lambda x, y: x * y, [(4, 1), (6,)], {"d1": 2}),
    "embedding v": (lambda w: F.embedding(_rows(8), w, padding_idx=3), [(8, 6)], {"v": 2}),
    "embedding n": (lambda w: F.embedding(_rows(8), w), [(8, 6)], {"n": 2}),
    "cross entropy m": (lambda x: F.cross_entropy(x, _targets(8), label_smoothing=0.1), [(6, 8)], {"m.1": 2}),
    "cross entropy v": (lambda x: F.cross_entropy(x, _targets(8)), [(6, 8)], {"v": 2}),
    "cross entropy summed v": (lambda x: F.cross_entropy(x, _targets(8), reduction="sum"), [(6, 8)], {"v": 2}),
    "cross entropy each v": (lambda x: F.cross_entropy(x, _targets(8), reduction="none"), [(6, 8)], {"v": 2}),
    "weighted cross entropy m": (lambda x: F.cross_entropy(x, _targets(8), weight=_weights(8)), [(6, 8)], {"m.1": 2}),
    "nll m": (lambda x: F.nll_loss(x, _targets(8), ignore_index=-100), [(6, 8)], {"m.1": 2}),
    "batch norm h": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(2, 4, 6, 6), (4,), (4,)], {"h": 2}),
    "batch norm c": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(2, 4, 6, 6), (4,), (4,)], {"c": 2}),
    "max pool c": (lambda x: F.max_pool2d(x, 2), [(2, 4, 6, 6)], {"c": 2}),
}


def _rows(count):
    return torch.arange(12).view(3, 4) % count


def _targets(count):
    targets = torch.arange(6) % count
    targets[1:3] = -100
    return targets


def _weights(count):
    return torch.arange(1, count + 1, dtype=torch.float64)


class Single(nn.Module):
    """One op between parameters and a loss that tells all elements apart."""

    def __init__(self, call, shapes):
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.values = nn.ParameterList([nn.Parameter(_positive(*shape)) for shape in shapes])

    def forward(self, scale):
        made = self.call(*[value * scale for value in self.values])
        weights = torch.arange(1, made.numel() + 1, dtype=torch.float64).view(made.shape)
        return (made.sin() * weights).sum()


def single_ops():
    """Every op that can be cut, cut along one dimension: loss and gradients of all arguments."""
    for what, (call, shapes, cut) in SINGLE_OPS.items():
        model, inputs = Single(call, shapes), {"scale": torch.ones((), dtype=torch.float64)}
        graph = forward_graph(model, (), inputs)
        spaces = spaces_of(graph)
        mine = [n for n in spaces.pieces if set(cut) <= set(spaces.pieces[n]) and not is_elementwise(graph, n, what)]
        assert mine, f"{what}: {dict(spaces.pieces)}"
        engine = ShardedEngine(graph, plan_of({graph.op_of_node[mine[0]]: cut}), state_of(copy.deepcopy(model)), CPU)
        told = engine.program.report[graph.op_of_node[mine[0]]]
        assert told.startswith("cut:") and "whole" not in told, f"{what}: {told}"
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
        expected = model(**inputs)
        expected.backward()
        close(value, expected.detach(), f"loss of {what}", 1e-10)
        close_gradients(engine, model, 1e-10, f"{what}: ")
    return len(SINGLE_OPS)


def is_elementwise(graph, name, what):
    """Whether a node is only there to make the arguments and the loss."""
    target = str(graph.node(name).target)
    around = ("mul", "sin", "arange", "view", "sum")
    return any(f"aten.{kind}." in target for kind in around) and not what.startswith(("broadcast", "sum"))


def frozen_statistics(shards):
    """Batch norm in evaluation mode, cut like in training mode."""
    model, inputs, _ = build("resnet")
    model.eval()
    graph = forward_graph(model, (), inputs)
    engine = ShardedEngine(graph, plan_of(shards), state_of(copy.deepcopy(model)), CPU)
    value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
    expected = model(**inputs).loss
    expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    close_gradients(engine, model, 1e-6)


def dropout(shards):
    """The graph in one process, with the streams of the same key, draws what the sharded one draws."""
    model, inputs, _ = build("gpt2", dropout=0.3)
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
    close_gradients(engine, plain, 1e-6)
    assert values[0] != values[1]


def microbatches(shards):
    """Two micro-batches of different weight; one reduction of each gradient for both."""
    model, inputs, _ = build("gpt2")
    graph = forward_graph(model, (), inputs)
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    other = {key: value.flip(0).roll(1, 1) for key, value in inputs.items()}
    parts = [Microbatch(0, flat_inputs((), inputs), 0.25), Microbatch(1, flat_inputs((), other), 0.75)]
    mode = CommDebugMode()
    with mode:
        value = engine.train(parts, 0, 0)
    # Per micro-batch the sums of the loss, of its targets and of the gradient of the positions, which are embedded once for all
    # samples; then one sum of the gradients of all parameters.
    assert sum(mode.get_comm_counts().values()) == 7, mode.get_comm_counts()
    expected = 0.25 * plain(**inputs).loss + 0.75 * plain(**other).loss
    expected.backward()
    close(value, expected.detach(), "loss", 1e-6)
    close_gradients(engine, plain, 1e-6)


def mixed_precision(shards):
    """Under autocast, as near to the plain model as two orders of summation in bfloat16 are."""
    model, inputs, _ = build("gpt2", double=False)
    graph = forward_graph(model, (), inputs)
    plain = copy.deepcopy(model)
    engine = ShardedEngine(graph, plan_of(shards), state_of(model), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = engine.train([Microbatch(0, flat_inputs((), inputs), 1.0)], 0, 0)
        expected = plain(**inputs).loss
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
    model, inputs, _ = build("lstm")
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
    close_gradients(engine, plain, 1e-6)
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
