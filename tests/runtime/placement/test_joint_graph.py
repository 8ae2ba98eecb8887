"""The joint graph computes what autograd does, and plans whose forward and backward ops are anywhere train like the model."""

import numpy as np
import pytest
import torch
from torch import fx, nn

from rlplace.model.capture.fake import tensors_in
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.placement import emit, wire
from rlplace.runtime.placement import placed_model as engines
from rlplace.runtime.placement.assign import joint_order, place_joint_graph
from rlplace.runtime.placement.forward_graph import flat_inputs, forward_graph, random_key, seeded
from rlplace.runtime.placement.joint_graph import base_of, joint_graph, results_of
from rlplace.runtime.state.whole import own_tree
from tests.runtime import small_models
from tests.runtime.equality import SINGLE_PRECISION, build, plan_for, split_plan
from tests.runtime.job import launch
from tests.runtime.placement import joint_worker

CASES = [*((name, "cpu") for name in ("gpt2", "t5", "resnet", "mixtral", "lstm", "awkward")), ("gpt2", "cuda"), ("t5", "cuda")]


def trace(model, inputs, loss=None, **options):
    source = forward_graph(model, (), inputs, loss=loss)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **source.constants}
    leaves = flat_inputs((), inputs)
    return source, joint_graph(source, held, leaves, **options), {n: t.detach().clone() for n, t in held.items()}, leaves


def evaluate(joint, held, leaves, tangents=None):
    env = {node: held[name] for name, node in joint.held.items()}
    env |= {node: leaf for node, leaf in zip(joint.inputs, leaves, strict=True) if node is not None}
    ones = {node: torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in joint.tangents.values()}
    env |= tangents or ones
    with torch.no_grad():
        for node in joint.graph.nodes:
            if node.op != "placeholder":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
    return env


def assert_same_gradients(joint, env, model):
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key not in joint.gradients)
        if parameter.grad is not None:
            found = sum(env[part] for part in joint.gradients[key])
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_same_loss_gradients_and_buffers_as_autograd(name, kind):
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS[name]()
    own = loss_of is small_models._own_loss
    source, joint, held, leaves = trace(model, inputs, None if own else loss_of, kind=kind)
    env = evaluate(joint, held, leaves)
    loss = loss_of(model(**inputs))
    loss.backward()
    torch.testing.assert_close(env[joint.outputs[source.loss]], loss.detach())
    assert_same_gradients(joint, env, model)
    assert set(joint.writes) == {key for key, buffer in model.named_buffers() if not torch.equal(buffer, held.get(key, buffer))}
    for key, buffer in model.named_buffers():
        if key in joint.writes:
            torch.testing.assert_close(env[joint.writes[key]], buffer)


def test_every_node_is_functional_and_knows_its_op():
    torch.manual_seed(0)
    model, inputs, loss_of = small_models.MODELS["awkward"]()
    source, joint, _, _ = trace(model, inputs, loss_of)
    work = [node for node in joint.graph.nodes if node.op != "placeholder"]
    assert not any(node.target._schema.is_mutable for node in work if isinstance(node.target, torch._ops.OpOverload))
    assert {node.meta["owner"] for node in work} <= set(source.op_of_node.values())
    of_linear = [node for node in work if (node.meta["owner"] or "").startswith("head/")]
    assert {node.meta["backward"] for node in of_linear} == {False, True}
    backward = {node for node in work if node.meta["backward"]}
    assert not any(other in backward for node in work if node not in backward for other in node.all_input_nodes)


@pytest.mark.slow
def test_gradients_are_made_by_the_modules_of_their_weights_of_a_tied_one_in_parts():
    torch.manual_seed(0)
    model, inputs, _ = small_models.MODELS["gpt2"]()
    _, joint, _, _ = trace(model, inputs)
    makers = {
        name: [base_of(part).meta["owner"].rpartition("/")[0] for part in parts] for name, parts in joint.gradients.items()
    }
    assert sorted(makers.pop("transformer.wte.weight")) == ["lm_head", "transformer.wte"]
    # A gradient is made by the module that holds the weight: an op of the backward that belonged to another would show here.
    assert makers == {name: [name.rpartition(".")[0]] for name in makers}


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


@pytest.mark.slow
def test_masks_are_those_of_the_forward_and_drawn_once():
    torch.manual_seed(0)
    model, inputs = Random(), {"x": torch.randn(3, 5, 8)}
    source, joint, held, leaves = trace(model, inputs)
    random = [node for node in joint.graph.nodes if node.target is seeded]
    assert {node.args[1] for node in random} == {0, 1, 2, 3}  # an LSTM draws twice
    assert len(random) == 5  # two between the layers, one after, one in attention, the noise
    assert not any(node.meta["backward"] for node in random)
    for key in [(1, 2), (1, 3)]:
        with random_key(*key):
            env = evaluate(joint, held, leaves)
            values = [{**dict(model.named_parameters()), **source.constants}[name] for name in source.held]
            loss = source.module(*values, *leaves)[0]
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close(env[joint.outputs[source.loss]], loss.detach())
        assert_same_gradients(joint, env, model)


def test_autocast_is_traced():
    torch.manual_seed(0)
    model, inputs, _ = small_models.MODELS["bert"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        source, joint, held, leaves = trace(model, inputs)
        loss = model(**inputs).loss
    loss.backward()
    env = evaluate(joint, held, leaves)
    products = [node for node in env if node.target is torch.ops.aten.mm.default]
    assert torch.bfloat16 in {env[node].dtype for node in products}
    torch.testing.assert_close(env[joint.outputs[source.loss]], loss.detach())
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
    env = evaluate(joint, held, leaves, {joint.tangents[0]: tangent})
    torch.testing.assert_close(env[joint.input_gradients[0]], tangent @ held["weight"])
    assert trace(model, inputs, differentiate=())[1].gradients == {}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["t5", "awkward"])
def test_programs_follow_one_order_and_every_message_has_two_ends(name, training, monkeypatch):
    built = joint_worker.build(name, 3, seed=2)
    placement, cpu = built.placement, torch.device("cpu")
    order = joint_order(placement, placement.device_of if training else placement.forward)
    position = {value: number for number, node in enumerate(order) for value in results_of(node)}
    assert len(set(order)) == len(order)
    for node in order:
        assert all(position[value] < position[results_of(node)[0]] for value in placement.reads[node] if value in position)
    messages, left = [], {}
    for device in range(3):
        owners = {name: placement.owners.get(name, (0,)) for name in tensors_in(built.model)}
        own = own_tree(built.model, owners, device, cpu)
        made = []

        class Noting(emit.Emitter):
            def _leave(self, value, made=made):
                made.append(value)
                super()._leave(value)

        monkeypatch.setattr(engines, "Emitter", Noting)
        program = engines.Engine(placement, Ranks(device, cpu, ((0, 1, 2),)), tensors_in(own))._program(training)
        wanted = [value for node in order if placement.device_of[node] == device for value in results_of(node)]
        assert [value for value in made if value in placement.device_of] == wanted
        nodes = list(program.module.graph.nodes)
        assert all(len(node.users) == 1 for node in nodes if node.target is wire.post)  # nothing stays on the wire
        posts, sends = ([n.args[-1] for n in nodes if n.target is target] for target in (wire.post, wire.send))
        assert sorted([*posts, *sends]) == sorted(program.messages)
        assert all(program.messages[tag].destination == device for tag in posts)
        assert all(program.messages[tag].source == device for tag in sends)
        messages += [(tag, m.source, m.destination, m.value) for tag, m in program.messages.items()]
        # NCCL has no tags: both ends of a direction must issue its messages in one order.
        assert sends == sorted(sends)
        for source in range(3):
            tags = [tag for tag in posts if program.messages[tag].source == source]
            assert tags == sorted(tags)
        steps = [(n.target, n.args[1].args[1] if n.target is wire.arrive else n.args[-1]) for n in nodes if n.target in MOVES]
        left[device] = steps
    assert len(messages) == 2 * len(set(messages)) > 0  # one at each end
    gone = set()
    while any(left.values()):  # every process runs blindly, and none waits for ever
        before = sum(map(len, left.values()))
        for steps in left.values():
            while steps and (steps[0][0] is not wire.arrive or steps[0][1] in gone):
                target, tag = steps.pop(0)
                gone |= {tag} if target is wire.send else set()
        assert sum(map(len, left.values())) < before


MOVES = (wire.post, wire.send, wire.arrive)


def trained(cases):
    """Trains on this rank; a case is a model's name, an optimizer and options."""
    for name, optimizer, options in cases:
        joint_worker.train_and_compare(name, optimizer, **options)


def bundle(world):
    """Several short checks in one start of processes: the engine, names of own parameters, outputs in evaluation of both."""
    trained([("resnet", "sgd", {"world": world, "seed": 3})])
    placed, *_ = joint_worker.train_and_compare("gpt2", "adamw", world, seed=2, dropout=0.3)
    *models, inputs = joint_worker.train_and_compare("bert", "adamw", world, seed=6)
    small, outputs = {key: value[:3] for key, value in inputs.items()}, []  # another signature
    for model in models:
        with torch.no_grad():
            output = model.eval()(**small)
        outputs.append([output.loss, output.logits])
    return placed.report, {name for name, _ in placed.named_parameters()}, outputs


@pytest.mark.slow
def test_distributed_by_such_a_plan():
    """Each process holds parameters of its own only; evaluation returns all outputs on every rank."""
    results = launch.run(2, bundle, 2)
    for engine, _, (found, expected) in results:
        assert engine == "joint_graph"
        torch.testing.assert_close(found, expected)
    first, second = (own for _, own, _ in results)
    assert first and second and not first & second
    assert first | second == {name for name, _ in build("gpt2", double=False)[0].named_parameters()}


@pytest.mark.long
@pytest.mark.slow
def test_models_train_on_random_places():
    world, cases = 3, []
    for number, name in enumerate(["t5", "resnet", "mixtral", "lstm", "awkward", "dlrm", "vit"]):
        options = {"world": world, "seed": 10 * world + number, "double": name not in SINGLE_PRECISION}
        cases.append((name, ["sgd", "adamw"][number % 2], options))
    launch.run(world, trained, cases)


def test_owners_are_where_the_weight_is_updated():
    built = joint_worker.build("bert", 3, seed=1)
    placement, graph = built.placement, built.graph
    backward = {op: int(built.plan.device_of_group[2 * i + 1]) for i, op in enumerate(graph.op_of_node.values())}
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    op = next(op for op in backward if op.startswith("bert.encoder.layer.0.intermediate.dense/"))
    assert placement.owners[name] == (backward[op],)
    for node, plan_device in placement.device_of.items():
        op = node.meta["owner"]
        if op is not None:
            index = 2 * list(graph.op_of_node.values()).index(op) + node.meta["backward"]
            assert plan_device == built.plan.device_of_group[index]


def test_a_plan_without_backward_groups_runs_backward_with_forward():
    built = joint_worker.build("bert", 1)
    ops = list(built.graph.op_of_node.values())
    devices = np.arange(len(ops)) % 3
    plans = split_plan(ops, devices, devices), plan_for(ops, devices)
    apart, same = (place_joint_graph(built.placement.joint, plan) for plan in plans)
    assert apart.device_of == same.device_of and apart.owners == same.owners
