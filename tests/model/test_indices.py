"""Along which dimensions captured ops can be cut, and the axes that tensors get from it."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from rlplace.model.axes.access import IterationSpace
from rlplace.model.axes.access_rules import RULES, elementwise
from rlplace.model.capture.capture import capture
from rlplace.model.graph.indices import StrideCuts
from rlplace.model.graph.opgraph import BACKWARD

torch.manual_seed(0)
R = torch.randn
CASES = {
    "linear": (RULES["linear"], functional.linear, [R(4, 6, 8), R(10, 8), R(10)], []),
    "addmm": (RULES["addmm"], torch.addmm, [R(10), R(4, 8), R(8, 10)], []),
    "mm": (RULES["mm"], torch.mm, [R(4, 8), R(8, 10)], []),
    "matmul of batches": (RULES["matmul"], torch.matmul, [R(4, 2, 6, 8), R(4, 2, 8, 10)], []),
    "matmul that broadcasts": (RULES["matmul"], torch.matmul, [R(4, 2, 6, 8), R(1, 2, 8, 10)], []),
    "bmm": (RULES["bmm"], torch.bmm, [R(4, 6, 8), R(4, 8, 10)], []),
    "attention": (
        RULES["scaled_dot_product_attention"], functional.scaled_dot_product_attention,
        [R(4, 2, 6, 8), R(4, 2, 10, 8), R(4, 2, 10, 8)], [],
    ),
    "convolution": (RULES["conv2d"], functional.conv2d, [R(4, 6, 5, 5), R(8, 6, 3, 3), R(8)], []),
    "depthwise": (RULES["conv2d"], lambda x, w: functional.conv2d(x, w, None, groups=6), [R(4, 6, 5, 5), R(6, 1, 3, 3)], []),
    "pooling": (RULES["max_pool2d"], lambda x: functional.max_pool2d(x, 2), [R(4, 6, 8, 8)], []),
    "layer norm": (RULES["layer_norm"], lambda x, w, b: functional.layer_norm(x, (8,), w, b), [R(4, 6, 8), R(8), R(8)], ["c"]),
    "batch norm": (
        RULES["batch_norm"],
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), [R(4, 6, 8), R(6), R(6)], ["b", "h"],
    ),
    "softmax": (RULES["softmax"], lambda x: torch.softmax(x, 1), [R(4, 6, 8)], ["d1"]),
    "mean": (RULES["sum"], lambda x: torch.sum(x, [1]), [R(4, 6, 8)], []),
    "cat": (RULES["cat"], lambda x, y: torch.cat([x, y], 1), [R(4, 6), R(4, 2)], []),
    "stack": (RULES["stack"], lambda x, y: torch.stack([x, y], 1), [R(4, 6), R(4, 6)], []),
    "pad": (RULES["pad"], lambda x: functional.pad(x, (0, 2)), [R(4, 6)], []),
    "addition": (elementwise, torch.add, [R(4, 6, 8), R(6, 1)], []),
    "loss": (RULES["mse_loss"], lambda x, y: functional.mse_loss(x, y, reduction="sum"), [R(4, 6), R(4, 6)], []),
}  # fmt: skip
ARGUMENTS = {
    "layer norm": lambda x, w, b: [x, (8,), w, b],
    "batch norm": lambda x, w, b: [x, w, b, None, None, True],
    "softmax": lambda x: [x, 1],
    "mean": lambda x: [x, [1]],
    "cat": lambda x, y: [[x, y], 1],
    "stack": lambda x, y: [[x, y], 1],
    "convolution": lambda x, w, b: [x, w, b],
    "depthwise": lambda x, w: [x, w, None],
}


def cut_of(tensor, names, name, part):
    """Returns one of two halves of a tensor along the dimension, the whole where it has none."""
    return tensor.chunk(2, names.index(name))[part] if name in names else tensor


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_cut_dimension_make_up_the_result(case):
    """What a rule names is true: halves of the inputs give halves of the output, or halves of a sum."""
    rule, function, inputs, statistics = CASES[case]
    whole = function(*inputs)
    space = IterationSpace()
    assert rule(space, ARGUMENTS.get(case, lambda *tensors: list(tensors))(*inputs), whole)
    names_of = {id(tensor): names for tensor, names in space.tensors}
    dims = [name for name, size in space.dims.items() if size > 1]
    assert dims
    over = {name for names, _ in space.statistics for name in dims if name not in names}
    assert over == set(statistics)
    made = names_of[id(whole)]
    for name in dims:
        if name in over:
            continue  # needs the statistics of the other part
        halves = []
        for part in (0, 1):
            own = [cut_of(tensor, names_of.get(id(tensor), ()), name, part) for tensor in inputs]
            if name not in made and case in ("linear", "addmm", "convolution"):  # the bias is added once
                bias = 0 if case == "addmm" else 2
                own[bias] = own[bias] * (1 - part)
            halves.append(function(*own))
        joined = torch.cat(halves, made.index(name)) if name in made else halves[0] + halves[1]
        torch.testing.assert_close(joined, whole)


@pytest.mark.parametrize("name", ["batch", "heads", "group", "queries"])
def test_grouped_queries_are_cut_by_heads_of_keys_or_inside_groups(name):
    query, key, value = R(2, 8, 6, 4), R(2, 4, 6, 4), R(2, 4, 6, 4)
    whole = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    space = IterationSpace()
    assert RULES["scaled_dot_product_attention"](space, [query, key, value], whole)
    assert {dim: size for dim, size in space.dims.items() if size > 1} == {"batch": 2, "heads": 4, "group": 2, "queries": 6}
    (seen, names), *others, (keys, key_names), (values, value_names) = space.tensors
    assert [n for _, n in others] == [names]  # the output is seen as the queries are
    halves = []
    for part in (0, 1):
        q, k, v = (cut_of(*tensor, name, part) for tensor in ((seen, names), (keys, key_names), (values, value_names)))
        made = functional.scaled_dot_product_attention(q.flatten(1, 2), k, v, enable_gqa=True)
        halves.append(made.unflatten(1, q.shape[1:3]))
    torch.testing.assert_close(torch.cat(halves, names.index(name)).flatten(1, 2), whole)


def test_cuts_of_a_number_line_divide_each_other():
    cuts = StrideCuts(24)
    assert cuts.add(4) and cuts.add(12) and cuts.add(4)
    assert not cuts.add(6) and not cuts.add(48) and not cuts.add(5)
    assert cuts.ranges() == [(12, 24), (4, 12), (1, 4)]


class Block(nn.Module):
    """Attention with one product for queries, keys and values, and a residual."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x, y):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).split(w, 2)
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in (q, k, v))
        z = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w)
        x = x + self.out(z)
        return functional.cross_entropy(self.head(x).view(b * s, 10), y.view(-1))


@pytest.fixture(scope="module")
def block():
    return capture(Block(), (torch.randn(6, 8, 32), torch.zeros(6, 8, dtype=torch.int64)))


def dims(graph, name):
    return graph.traced.indices.dims[graph.op_names.index(name)]


def test_heads_cut_the_products_around_them(block):
    assert dims(block, "qkv/linear") == {"m0": 6, "m1": 8, "k": 32, "n.0": 3, "n.1": 4, "n.2": 8}
    assert dims(block, "scaled_dot_product_attention") == {"batch": 6, "heads": 4, "queries": 8}
    assert dims(block, "out/linear_1") == {"m0": 6, "m1": 8, "k.0": 4, "k.1": 8, "n": 32}
    assert dims(block, "head/linear_2") == {"m0": 6, "m1": 8, "k": 32, "n": 10}
    assert dims(block, "cross_entropy_loss") == {"m.0": 6, "m.1": 8, "v": 10}


def test_weights_and_statistics_follow(block):
    found = block.traced.indices
    op = block.op_names.index("qkv/linear")
    number = [parameter.name for parameter in block.parameters].index("qkv.weight")
    weight = next(t for t in found.axes if block.tensor_parameter[t] == number and block.tensor_producer[t] < 0)
    assert found.axes[weight] == (3, 4, 8, 32)
    assert found.access[weight][op] == ("n.0", "n.1", "n.2", "k")
    assert found.statistics[block.op_names.index("norm/layer_norm")] == ((("m0", "m1"), 8 * 48),)
    assert found.statistics[block.op_names.index("cross_entropy_loss")] == ((("m.0", "m.1"), 8 * 48),)


def test_gradients_between_ops_have_the_axes_of_what_they_belong_to(block):
    found = block.traced.indices
    passed = 0
    for tensor in range(block.num_tensors):
        maker = int(block.tensor_producer[tensor])
        users = block.consumers[block.consumer_ptr[tensor] : block.consumer_ptr[tensor + 1]].tolist()
        users = [user for user in users if block.op_phase[user] == BACKWARD]
        if maker < 0 or block.op_phase[maker] != BACKWARD or not users or not block.tensor_bytes[tensor]:
            continue
        passed += 1
        sizes = found.dims[int(block.op_forward[maker])]  # the batch is never lost
        assert any(name and sizes[name] == 6 for name in found.access[tensor][maker]), block.op_names[maker]
    assert passed >= 6


class Odd(nn.Module):
    """A slice that does not divide its storage, and ops that no rule knows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)[:, :-1]
        return (torch.cumsum(y.tanh(), 1).flip(0) ** 2).sum()


def test_what_cannot_be_proved_is_not_cut():
    graph = capture(Odd(), (torch.randn(4, 6, 8),))
    known = {graph.op_names[op]: found for op, found in graph.traced.indices.dims.items()}
    assert known["tanh"] == {"d0": 4, "d2": 8}  # five of six rows
    assert known["inner/linear"] == {"m0": 4, "m1": 6, "k": 8, "n": 8}
    assert "cumsum" not in known and "flip" not in known


def test_every_dimension_runs_along_something(block):
    found = block.traced.indices
    seen = {(op, name) for access in found.access.values() for op, names in access.items() for name in names}
    for op, name in itertools.chain.from_iterable(((op, name) for name in sizes) for op, sizes in found.dims.items()):
        assert (op, name) in seen or block.op_kind[op] == "view", (block.op_names[op], name)


def test_a_loss_function_is_cut_through_all_that_it_runs():
    graph = capture(
        nn.Sequential(nn.Linear(8, 12)),
        (torch.randn(6, 8),),
        loss=lambda out: 0.5 * functional.cross_entropy(out, out.new_zeros(6, dtype=torch.int64)) + out.square().mean(),
    )
    op = graph.op_names.index("loss_fn")
    found = graph.traced.indices
    assert sorted(found.dims[op].values()) == [6, 12]
    rows, columns = sorted(found.dims[op], key=found.dims[op].__getitem__)
    output = next(t for t in found.access if graph.op_names[graph.tensor_producer[t]] == "0/linear")
    assert found.access[output][op] == (rows, columns)
    assert ((rows,), 8 * 6) in found.statistics[op]  # the softmax needs sums over the classes


def test_eager_traces_know_as_much():
    inputs = (torch.randn(6, 8, 32), torch.zeros(6, 8, dtype=torch.int64))
    graph = capture(Block(), inputs, method="dispatch")
    sizes = [found for op, found in graph.traced.indices.dims.items() if graph.op_kind[op] == "gemm"]
    assert len(sizes) == 3 and all(6 in found.values() for found in sizes)
    module = capture(Block(), inputs, method="module")
    assert module.traced is None
