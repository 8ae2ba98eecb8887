"""What tracing says of values is what running them makes, under autocast too."""

import contextlib

import pytest
import torch
from small_models import MODELS

from rlplace.runtime.distributed.graph.forward_graph import flat_inputs, forward_graph


def values_of(graph, model, inputs):
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers()), **graph.constants}
    seen = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and n.op != "output":
                seen[n.name] = value
            return value

    Recorder(graph.module).run(*(held[name] for name in graph.held), *flat_inputs((), inputs))
    return seen


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "lstm", "awkward", "swin"])
def test_layouts_are_those_of_the_run(name, autocast):
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name]()
    region = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with region:
        graph = forward_graph(model, (), inputs)
        values = values_of(graph, model, inputs)
    assert set(values) == set(graph.layout)
    for key, value in values.items():
        layout = graph.layout[key]
        assert (tuple(value.shape), value.dtype, value.requires_grad) == (layout.shape, layout.dtype, layout.requires_grad), key
    assert any(value.dtype == torch.bfloat16 for value in values.values()) == autocast


def test_autocast_of_a_gpu_is_followed_without_one():
    torch.manual_seed(0)
    model, inputs, _ = MODELS["gpt2"]()
    with torch.autocast("cuda", torch.bfloat16, enabled=True) if torch.cuda.is_available() else _pretend_cuda_autocast():
        graph = forward_graph(model, (), inputs)
    kinds = {str(graph.node(name).target): graph.layout[name].dtype for name in graph.layout}
    assert kinds["aten.layer_norm.default"] == torch.float32  # the processor's own rules would keep bfloat16
    assert torch.bfloat16 in kinds.values()


@contextlib.contextmanager
def _pretend_cuda_autocast():
    """Switches CUDA's autocast on in a build without CUDA, where `torch.autocast` refuses."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
