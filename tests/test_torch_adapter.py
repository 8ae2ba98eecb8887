"""Every private part of torch that is used is still needed: a test that fails names what can go."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rlplace.model import torch_adapter as model
from rlplace.runtime import torch_adapter as runtime
from rlplace.runtime.strategy.wrap import keep, recompute

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = {"rlplace/model/torch_adapter.py", "rlplace/runtime/torch_adapter.py"}
WRITES_CODE = {"rlplace/runtime/export/parts.py"}  # a template of a script holds the import


def private(tree: ast.AST) -> list[str]:
    """The private parts of torch that a file imports or reads."""
    roots, found = {"torch": "torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (alias for alias in node.names if alias.name.split(".")[0] == "torch"):
                roots[name.asname or "torch"] = name.name if name.asname else "torch"
                found += [name.name] if "._" in name.name else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                roots[name.asname or name.name] = whole
                found += [whole] if "._" in whole else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            whole = ast.unparse(node)
            head, _, rest = whole.partition(".")
            if roots.get(head, "").islower() and all(part.isidentifier() for part in rest.split(".")) and ".ops." not in whole:
                found.append(whole)
    return found


def test_private_parts_are_recognized():
    uses = "torch._C.x()\nnn.functional._f\ntorch.ops.aten._y()"
    text = f"import torch\nfrom torch import nn\nfrom torch.utils import _pytree\n{uses}"
    assert sorted(private(ast.parse(text))) == ["nn.functional._f", "torch._C", "torch.utils._pytree"]


@pytest.mark.slow
def test_one_file_of_a_room_imports_private_parts():
    for folder in ("rlplace", "envs", "agents"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in ADAPTERS | WRITES_CODE:
                assert not private(ast.parse(path.read_text())), f"{name}: import it from a torch_adapter"


@pytest.mark.parametrize(
    "public",
    [
        *("torch.utils.pytree", "torch.subclasses", "torch.utils.python_dispatch"),
        *("torch.distributed.replicate", "torch.distributed.functional_collectives"),
    ],
)
def test_no_public_module_has_it(public):
    assert importlib.util.find_spec(public) is None, f"{public} is there: use it and drop its entry in the adapter"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (torch.autograd, "get_sequence_nr"),
        (torch.autograd.graph, "current_node"),
        (torch.func, "functionalization"),
        (torch.cuda, "sleep"),
        (torch.distributed.tensor, "StridedShard"),
        (torch.fx.graph_module, "assign_attr"),
        (nn, "NormBase"),
        (nn.init, "truncated_normal_"),
        (nn, "BatchNorm"),
        (nn.parallel.DistributedDataParallel, "set_params_and_buffers_to_ignore_for_model"),
    ],
)
def test_no_public_name_has_it(where, name):
    assert not hasattr(where, name), f"{where.__name__}.{name} is there: use it and drop its entry in the adapter"


def test_shape_rule_of_grouped_products_takes_bfloat16_alone():
    with model.FakeTensorMode(), pytest.raises(Exception, match="BF16 type"):
        torch._grouped_mm(torch.ones(8, 16), torch.ones(2, 16, 16), offs=torch.tensor([4, 8], dtype=torch.int32))


def test_a_processor_has_no_synchronized_norm():
    layer = nn.SyncBatchNorm(2, process_group=object())
    with mock.patch("torch.distributed.is_available", return_value=True), pytest.raises(ValueError, match="on GPU"):
        with mock.patch("torch.distributed.is_initialized", return_value=True):
            layer(torch.ones(4, 2))


@pytest.mark.slow
def test_recurrent_layers_are_unrolled_over_time():
    class Count(model.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for steps in (4, 16):
        layer = nn.LSTM(8, 8)
        program = torch.export.export(layer, (torch.ones(steps, 2, 8),)).run_decompositions()
        counts.append(len(program.graph.nodes))
    assert counts[1] > 2 * counts[0]


class Inside(TorchFunctionMode):
    """Counts calls that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += function is torch.nn.functional.silu
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("run", "seen"), [(torch.Tensor.backward, 1), (model.run_backward, 2)])
def test_a_backward_switches_function_modes_off(run, seen):
    value = torch.ones(3, requires_grad=True)
    with Inside() as mode:
        made = torch.utils.checkpoint.checkpoint(torch.nn.functional.silu, value, use_reentrant=False)
        run(made.sum())
    assert mode.seen == seen


def test_the_public_switch_of_mkldnn_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.backends.mkldnn.flags(enabled=False):
            pass
    before = torch.backends.mkldnn.enabled
    with runtime.without_mkldnn():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before and caught


def test_function_modes_see_no_losses_of_modules_in_c():
    """`torch.nn.functional.cross_entropy` is seen; what calls its kernel itself is not."""

    class Losses(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            Losses.seen += function is torch.nn.functional.cross_entropy
            return function(*args, **(kwargs or {}))

    values, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with Losses():
        torch._C._nn.cross_entropy_loss(values, targets)
    assert Losses.seen == 0
    called = []
    with runtime.counted_losses(lambda kernel, *args: called.append(len(args)) or kernel(*args)):
        torch.nn.functional.cross_entropy(values, targets)
        torch._C._nn.cross_entropy_loss(values, targets)
    assert len(called) == 2


def query_and_value():
    """A step in which queries and values read one table of positions."""
    torch.manual_seed(0)
    table, first, second = (nn.Parameter(torch.randn(3, 3)) for _ in range(3))
    value = torch.randn(3, 3, requires_grad=True)
    inner = value.tanh()
    loss = (torch.addmm(table, inner, first).tanh() * torch.addmm(table, inner, second).tanh()).sum()
    return value, loss, [first, second, table]


def split_gradient() -> torch.Tensor:
    """Gradient of the table by the two halves of torch's split backward."""
    from torch.distributed.pipelining import _backward

    value, loss, parameters = query_and_value()
    _, groups = _backward.stage_backward_input([loss], None, [value], iter(parameters))
    _backward.stage_backward_weight(iter(parameters), groups)
    return parameters[2].grad


def plain_gradient() -> torch.Tensor:
    _, loss, parameters = query_and_value()
    loss.backward()
    return parameters[2].grad


def test_a_split_backward_counts_shared_weights_twice():
    with pytest.raises((RuntimeError, AssertionError)):
        torch.testing.assert_close(split_gradient(), plain_gradient())
    with runtime.joined_parameter_groups():
        torch.testing.assert_close(split_gradient(), plain_gradient())


def test_replacing_parameters_leaves_the_forward_of_the_module_alone():
    """`functional_call` would call the replaced forward again, without end."""
    module = nn.Linear(2, 2)
    plain = module.forward

    def replaced(value):
        with runtime.with_parameters(module, {"weight": torch.zeros(2, 2), "bias": torch.ones(2)}):
            return plain(value)

    module.forward = replaced
    assert module(torch.randn(3, 2)).tolist() == [[1.0, 1.0]] * 3


class Written(nn.Module):
    """Writes in place to a product, and to parts of one, which have versions of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        gate, value = self.second(self.first(x).relu_()).unsafe_chunk(2, -1)
        return self.last(torch.cat([gate.sigmoid_(), value.tanh_()], -1))


def test_selective_recomputation_keeps_a_product_that_is_written_to():
    torch.manual_seed(0)
    module, x = Written().double(), torch.randn(3, 4, dtype=torch.float64)

    def gradients(call):
        module.zero_grad()
        call(x).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    wanted, forward = gradients(module), module.forward
    torchs = partial(checkpoint, forward, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep))
    with pytest.raises(RuntimeError, match="mutated"):
        gradients(torchs)
    recompute(module, "selective")
    for own, expected in zip(gradients(module), wanted, strict=True):
        assert torch.equal(own, expected)
