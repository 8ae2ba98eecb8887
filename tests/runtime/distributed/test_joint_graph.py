"""The joint graph computes what autograd does, draws what the forward drew, and knows whom each node belongs to."""

import joint_worker
import pytest
import small_models
import torch
from torch import fx, nn

from rlplace.runtime.distributed.graph.forward_graph import flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.randomness import random_key, seeded
from rlplace.runtime.distributed.joint.assign import joint_order
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.joint.views import base_of

SEVEN = ["gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm"]


def trace(model, inputs, loss=None, **options):
    source = forward_graph(model, (), inputs, loss=loss)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **source.constants}
    leaves = flat_inputs((), inputs)
    return source, joint_graph(source, held, leaves, **options), {n: t.detach().clone() for n, t in held.items()}, leaves


def evaluate(joint, held, leaves):
    env = {node: held[name] for name, node in joint.held.items()}
    env |= {node: leaf for node, leaf in zip(joint.inputs, leaves, strict=True) if node is not None}
    with torch.no_grad():
        for node in joint.graph.nodes:
            if node.op != "placeholder":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
    return env


@pytest.mark.parametrize(("name", "kind"), [*((name, "cpu") for name in [*SEVEN, "awkward"]), ("gpt2", "cuda"), ("t5", "cuda")])
def test_same_loss_gradients_and_buffers_as_autograd(name, kind):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    own = loss_of is small_models._own_loss
    source, joint, held, leaves = trace(model, inputs, None if own else loss_of, kind=kind)
    env = evaluate(joint, held, leaves)
    loss = loss_of(model(**inputs))
    loss.backward()
    torch.testing.assert_close(env[joint.loss], loss.detach())
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key not in joint.gradients)
        if parameter.grad is not None:
            found = sum(env[part] for part in joint.gradients[key])
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
    assert set(joint.writes) == source.writes
    for key, buffer in model.named_buffers():
        if key in joint.writes:
            torch.testing.assert_close(env[joint.writes[key]], buffer)


def test_every_node_is_functional_and_knows_its_op():
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS["awkward"]()
    source, joint, _, _ = trace(model, inputs, loss_of)
    work = [node for node in joint.graph.nodes if node.op != "placeholder"]
    assert not any(node.target._schema.is_mutable for node in work if isinstance(node.target, torch._ops.OpOverload))
    unknown = [node for node in work if node.meta["owner"] not in source.op_of_node]
    # Only the gradient of the loss itself belongs to nobody.
    assert [str(node.target) for node in unknown if node.meta["owner"] is None] == ["aten.ones_like.default"]
    of_linear = [node for node in work if source.op_of_node.get(node.meta["owner"], "").startswith("head/")]
    assert {node.meta["backward"] for node in of_linear} == {False, True}
    backward = {node for node in work if node.meta["backward"]}
    assert not any(other in backward for node in work if node not in backward for other in node.all_input_nodes)


def test_a_tied_weight_has_its_gradient_in_parts():
    torch.manual_seed(0)
    model, inputs, _ = small_models.MODELS["gpt2"]()
    source, joint, _, _ = trace(model, inputs)
    owners = [source.op_of_node[base_of(part).meta["owner"]] for part in joint.gradients["transformer.wte.weight"]]
    assert sorted(op.rpartition("/")[0] for op in owners) == ["lm_head", "transformer.wte"]


class Random(nn.Module):
    """Dropout, attention with dropout, and a recurrent layer that draws several times."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=3, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(self.lstm(x)[0])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return (x + 0.1 * torch.randn_like(x)).square().mean()


def test_masks_are_those_of_the_forward_and_drawn_once():
    torch.manual_seed(0)
    model, inputs = Random(), {"x": torch.randn(3, 5, 8)}
    source, joint, held, leaves = trace(model, inputs)
    random = [node for node in joint.graph.nodes if node.target is seeded]
    assert {node.args[1] for node in random} == set(range(source.random_ops))
    assert len(random) == 5  # two between the layers, one after, one in attention, the noise
    assert not any(node.meta["backward"] for node in random)
    for key in [(1, 2, 3), (1, 2, 4)]:
        with random_key(*key):
            env = evaluate(joint, held, leaves)
            values = [{**dict(model.named_parameters()), **source.constants}[name] for name in source.held]
            loss = source.module(*values, *leaves)[0]
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close(env[joint.loss], loss.detach())
        for name, parameter in model.named_parameters():
            found = sum(env[part] for part in joint.gradients[name])
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


def test_autocast_is_traced():
    torch.manual_seed(0)
    model, inputs, _ = small_models.MODELS["bert"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, joint, held, leaves = trace(model, inputs)
        loss = model(**inputs).loss
    loss.backward()
    env = evaluate(joint, held, leaves)
    assert any(
        node.target is torch.ops.aten.mm.default and env[node].dtype is torch.bfloat16
        for node in joint.graph.nodes
        if node in env
    )
    torch.testing.assert_close(env[joint.loss], loss.detach())
    weight = "bert.encoder.layer.0.output.dense.weight"
    found = sum(env[part] for part in joint.gradients[weight])
    torch.testing.assert_close(found, dict(model.named_parameters())[weight].grad)


def test_outputs_to_differentiate():
    model = nn.Linear(3, 2)
    inputs = {"input": torch.randn(4, 3, requires_grad=True)}
    _, joint, held, leaves = trace(model, inputs, differentiate=(0,))
    assert list(joint.tangents) == [0] and joint.differentiable == (0,)
    assert set(joint.gradients) == {"weight", "bias"} and set(joint.input_gradients) == {0}
    tangent = torch.randn(4, 2)
    env = {joint.tangents[0]: tangent, **{node: held[name] for name, node in joint.held.items()}, joint.inputs[0]: leaves[0]}
    for node in joint.graph.nodes:
        if node.op != "placeholder":
            env[node] = node.target(*fx.node.map_arg(node.args, env.__getitem__), **node.kwargs)
    torch.testing.assert_close(env[joint.input_gradients[0]], tangent @ held["weight"])
    assert trace(model, inputs, differentiate=())[1].gradients == {}


def test_order_runs_producers_first_and_carries_buffers():
    built = joint_worker.build("resnet", 3, microbatches=3)
    placement = built.placement
    order = joint_order(placement, placement.device_of, 3, "list")
    position = {(task.node, task.microbatch): number for number, task in enumerate(order)}
    assert len(position) == len(order)
    made = {}
    for (node, number), at in position.items():
        for value in (node, *node.users):
            if value is node or value.target.__name__ == "getitem":
                made[value, number] = at
    for (node, number), at in position.items():
        for value in placement.reads[node]:
            if value in placement.device_of:
                assert made[value, number] < at
    for name, node in placement.joint.writes.items():
        readers = [n for n in placement.device_of if placement.joint.held[name] in placement.reads[n] and (n, 1) in position]
        assert all(made[base_of(node), 0] < position[reader, 1] for reader in readers)
