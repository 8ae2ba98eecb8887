"""The captured graph of small modules: storages, ties, in-place writes, memory, fallbacks, errors."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rlplace.errors import CaptureError, InputError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import ACTIVATION, BACKWARD, BUFFER, FORWARD, GRADIENT, INPUT, PARAMETER, UPDATE


class Net(nn.Module):
    """A module whose forward is a function of it and its inputs."""

    def __init__(self, forward, **children):
        super().__init__()
        self.function = forward
        for name, child in children.items():
            if isinstance(child, nn.Module):
                self.add_module(name, child)
            else:
                self.register_parameter(name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def index_of(graph, name):
    return graph.op_names.index(name)


def consumers(graph, tensor):
    return graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]].tolist()


def tensors(graph, role, producer=None):
    return [
        t
        for t in range(graph.num_tensors)
        if graph.tensor_role[t] == role and (producer is None or graph.tensor_producer[t] == producer)
    ]


def live_peak(graph):
    """Returns the peak of activations and temporaries when the ops run one after the other in their order."""
    live = peak = 0
    frees = {}
    by_producer = {}
    for tensor in tensors(graph, ACTIVATION):
        by_producer.setdefault(int(graph.tensor_producer[tensor]), []).append(tensor)
    for op in range(graph.num_ops):
        for tensor in by_producer.get(op, ()):
            live += int(graph.tensor_bytes[tensor])
            frees.setdefault(consumers(graph, tensor)[-1], []).append(tensor)
        peak = max(peak, live + int(graph.op_temporary_bytes[op]))
        live -= sum(int(graph.tensor_bytes[t]) for t in frees.get(op, ()))
    return peak


def two_layers(**options):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return capture(net, torch.empty(8, 16), loss=lambda output: output.square().mean(), **options)


@pytest.mark.parametrize("method", ["export", "dispatch", "module"])
def test_a_step_has_forward_backward_and_update(method):
    graph = two_layers(method=method)
    assert graph.capture["method"] == method
    assert graph.samples == 8
    phases = graph.op_phase.tolist()
    assert phases == sorted(phases)
    assert {FORWARD, BACKWARD, UPDATE} == set(phases)
    assert phases.count(UPDATE) == 4
    assert [p.name for p in graph.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    # Each gradient runs from a backward op to the update of its parameter, and holds the parameter's bytes.
    gradients = tensors(graph, GRADIENT)
    assert sorted(graph.tensor_parameter[t] for t in gradients) == [0, 1, 2, 3]
    for t in gradients:
        update = index_of(graph, graph.parameters[graph.tensor_parameter[t]].name + "/update")
        assert consumers(graph, t) == [update]
        assert graph.op_phase[graph.tensor_producer[t]] == BACKWARD
        assert graph.tensor_bytes[t] == graph.parameters[graph.tensor_parameter[t]].size_bytes
    products = 2 * 8 * (16 * 32 + 32 * 4)
    forward = graph.op_flops[graph.op_phase == FORWARD].sum()
    assert products <= forward <= products + 2 * 8 * 32 + 8 * 4 * 8


def test_export_names_lead_back_to_nodes():
    graph = two_layers()
    assert graph.capture["method"] == "export"
    assert graph.op_names[:4] == ("0/linear", "1/relu", "2/linear_1", "loss_fn")
    assert graph.op_target[:3] == ("aten.linear.default", "aten.relu.default", "aten.linear.default")
    assert graph.op_module[:4] == ("0", "1", "2", "")
    backward = index_of(graph, "2/linear_1.backward")
    assert graph.op_forward[backward] == index_of(graph, "2/linear_1")
    assert graph.op_colocate[backward] == graph.op_colocate[index_of(graph, "2/linear_1")]
    assert graph.op_dims[0] == {"m": 8, "n": 32, "k": 16}


def test_saved_activations_are_consumed_by_backward():
    graph = two_layers()
    relu = index_of(graph, "1/relu")
    (output,) = tensors(graph, ACTIVATION, relu)
    assert graph.tensor_bytes[output] == 8 * 32 * 4
    users = {graph.op_names[op] for op in consumers(graph, output)}
    assert users == {"2/linear_1", "2/linear_1.backward", "1/relu.backward"}


def test_optimizer_states():
    elements = 16 * 32 + 32 + 32 * 4 + 4
    for optimizer, per_element in (("sgd", 0), ("momentum", 4), ("adam", 8), ("adamw", 8)):
        graph = two_layers(optimizer=optimizer)
        assert sum(p.optimizer_bytes for p in graph.parameters) == per_element * elements
        assert sum(p.gradient_bytes for p in graph.parameters) == 4 * elements
    graph = two_layers(dtype="bf16")
    assert sum(p.size_bytes for p in graph.parameters) == 2 * elements
    assert sum(p.optimizer_bytes for p in graph.parameters) == 4 * elements  # torch: state in the parameter's dtype
    master = two_layers(dtype="bf16", master_weights=True)
    assert sum(p.optimizer_bytes for p in master.parameters) == 12 * elements
    assert graph.capture["dtype"] == "bfloat16"
    assert graph.op_dtype[0] == "bfloat16"
    with pytest.raises(InputError, match="float32 already"):
        two_layers(master_weights=True)


def test_a_float32_weight_is_its_own_master():
    net = Net(lambda net, x: net.norm(net.layer(x).float()), layer=nn.Linear(4, 4).bfloat16(), norm=nn.LayerNorm(4))
    graph = capture(net, torch.empty(2, 4, dtype=torch.bfloat16), loss=torch.sum, master_weights=True)
    state = {p.name: p.optimizer_bytes for p in graph.parameters}
    assert state == {"layer.weight": 12 * 16, "layer.bias": 12 * 4, "norm.weight": 8 * 4, "norm.bias": 8 * 4}


def test_frozen_parameters_have_no_gradient_and_no_update():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    net[0].requires_grad_(False)
    graph = capture(net, torch.empty(8, 16), loss=torch.sum)
    frozen = [p for p in graph.parameters if not p.trainable]
    assert [p.name for p in frozen] == ["0.weight", "0.bias"]
    assert all(p.gradient_bytes == p.optimizer_bytes == 0 for p in frozen)
    assert sum(phase == UPDATE for phase in graph.op_phase) == 2
    assert "0/linear.backward" not in graph.op_names
    assert net[0].weight.grad is None and not net[0].weight.requires_grad


def test_unused_parameters_count_as_frozen_and_are_reported():
    net = Net(lambda self, x: self.used(x).sum(), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    graph = capture(net, torch.empty(2, 4))
    assert [p.name for p in graph.parameters if p.trainable] == ["used.weight", "used.bias"]
    assert any("2 parameters" in note and "unused.weight" in note for note in graph.capture["notes"])


def test_tied_parameters_are_one_with_aliases():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return functional.cross_entropy(self.head(self.embedding(tokens)), tokens)

    for method in ("export", "dispatch"):
        graph = capture(Tied(), torch.zeros(4, dtype=torch.long), method=method)
        (weight,) = graph.parameters
        assert (weight.name, weight.aliases, weight.size_bytes) == ("embedding.weight", ("head.weight",), 50 * 8 * 4)
        makers = {graph.op_names[graph.tensor_producer[t]] for t in tensors(graph, GRADIENT)}
        # Both uses contribute a gradient of their own; the sum belongs to the update.
        assert len(makers) == 2
        assert {graph.op_module[index_of(graph, name)] for name in makers} == {"embedding", "head"}
        (update,) = [op for op in range(graph.num_ops) if graph.op_phase[op] == UPDATE]
        assert graph.op_flops[update] > 12 * 50 * 8


def test_views_cost_nothing_and_alias_one_storage():
    net = Net(lambda self, x: self.last(self.first(x).view(4, 2, 8).transpose(0, 1)).sum(), first=nn.Linear(16, 16),
              last=nn.Linear(8, 8))  # fmt: skip
    graph = capture(net, torch.empty(4, 16))
    for name in ("view", "transpose"):
        op = index_of(graph, name)
        assert graph.op_kind[op] == "view"
        assert graph.op_flops[op] == graph.op_bytes[op] == graph.op_temporary_bytes[op] == 0
        assert graph.op_colocate[op] == graph.op_colocate[index_of(graph, "first/linear")]
        assert not tensors(graph, ACTIVATION, op)
    (made,) = tensors(graph, ACTIVATION, index_of(graph, "first/linear"))
    assert index_of(graph, "last/linear_1") in consumers(graph, made)
    assert graph.op_colocate[index_of(graph, "last/linear_1")] != graph.op_colocate[index_of(graph, "first/linear")]


def test_in_place_chain_is_one_storage_in_order():
    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden.add_(1.0).mul_(2.0)).sum()

    graph = capture(Net(forward, first=nn.Linear(16, 16), last=nn.Linear(16, 16)), torch.empty(4, 16))
    first, add, mul, last = (index_of(graph, name) for name in ("first/linear", "add_", "mul_", "last/linear_1"))
    assert len({graph.op_colocate[op] for op in (first, add, mul)}) == 1
    (storage,) = [t for t in tensors(graph, ACTIVATION, first) if graph.tensor_bytes[t]]
    assert {add, mul, last} <= set(consumers(graph, storage))
    edges = {
        int(graph.tensor_producer[t]): consumers(graph, t) for t in tensors(graph, ACTIVATION) if graph.tensor_bytes[t] == 0
    }
    assert edges[add] == [mul]
    assert last in edges[mul]
    # The write allocates nothing, so the three ops together hold one storage.
    assert sum(int(graph.tensor_bytes[t]) for op in (first, add, mul) for t in tensors(graph, ACTIVATION, op)) == 4 * 16 * 4


def test_batch_norm_statistics_are_buffers_that_stay_with_their_op():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    graph = capture(net, torch.empty(2, 3, 8, 8), loss=torch.sum)
    buffers = {p.name for p in graph.parameters if p.is_buffer}
    assert buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    norm = next(op for op in range(graph.num_ops) if graph.op_kind[op] == "norm")
    read = {graph.parameters[graph.tensor_parameter[t]].name for t in tensors(graph, BUFFER) if norm in consumers(graph, t)}
    assert read == {"1.running_mean", "1.running_var"}
    relu = next(op for op in range(graph.num_ops) if "relu_" in graph.op_names[op])
    assert graph.op_colocate[relu] == graph.op_colocate[norm]


def test_regions_without_gradient_are_not_lost():
    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            scale = torch.matmul(hidden, hidden.t()).abs().mean()
        return (self.last(hidden) * scale).sum()

    for method in ("export", "dispatch", "module"):
        graph = capture(Net(forward, first=nn.Linear(16, 16), last=nn.Linear(16, 16)), torch.empty(4, 16), method=method)
        products = 2 * 4 * 16 * 16 * 2 + 2 * 4 * 4 * 16
        assert graph.op_flops[graph.op_phase == FORWARD].sum() >= products


def test_peak_memory_equals_a_hand_count():
    """Four linear layers of width 64 without bias, batch 32, SGD: activations are 32 x 64 x 4 = 8192 bytes each."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    graph = capture(net, torch.empty(32, 64), loss=torch.sum, optimizer="sgd")
    size = 32 * 64 * 4
    # At the backward of the last layer: outputs of layers 1 to 3 are saved, its input gradient is made from the 4-byte
    # gradient of the sum; its own output, dropped after the loss, is gone.
    assert live_peak(graph) == 4 * size + 4


def test_data_dependent_forward_falls_back_to_modules():
    def forward(self, x):
        hidden = self.first(x)
        if hidden.sum().item() > 0:
            hidden = self.last(hidden)
        return hidden[hidden > 0].sum()

    graph = capture(Net(forward, first=nn.Linear(16, 16), last=nn.Linear(16, 16)), torch.empty(4, 16))
    assert graph.capture["method"] == "module"
    notes = graph.capture["notes"]
    assert [note.partition(" ")[0] for note in notes[:2]] == ["export", "dispatch"]
    assert any("guessed" in note for note in notes)
    assert {"first/forward", "last/forward", "first/forward.backward"} <= set(graph.op_names)
    assert set(graph.op_kind) == {"module", "optimizer"}


def test_layers_that_chance_may_drop_are_captured():
    def forward(self, x):
        hidden = self.first(x)
        if torch.rand([]) < 0.1:
            return hidden.sum()
        return self.last(hidden).sum() if torch.rand([]) > 0.9 else self.other(hidden).sum()

    net = Net(forward, first=nn.Linear(16, 16), last=nn.Linear(16, 16), other=nn.Linear(16, 16))
    graph = capture(net, torch.empty(4, 16))
    assert {"first/forward", "other/forward"} <= set(graph.op_names) and "last/forward" not in graph.op_names
    assert any("guessed: rand x2" in note for note in graph.capture["notes"])


def test_transforms_of_functions_fall_back_to_the_dispatch_trace():
    """The exported nodes of a transform only run as a whole, and what is left of a broken-off run spoils the process."""

    def rows(self, x):
        return torch.vmap(self.first)(x).square().mean()

    net = Net(rows, first=nn.Linear(16, 8))
    graph = capture(net, torch.empty(4, 16))
    assert graph.capture["method"] == "dispatch" and "torch.vmap" in graph.capture["notes"][0]
    whole = capture(Net(lambda self, x: self.first(x).square().mean(), first=nn.Linear(16, 8)), torch.empty(4, 16))
    assert whole.capture["method"] == "export"  # nothing of the transform is left behind
    products = [float(graph.op_flops[graph.op_phase == phase].max()) for phase in (FORWARD, BACKWARD)]
    assert products == [2.0 * 4 * 16 * 8] * 2
    with pytest.raises(CaptureError, match="use method 'dispatch'"):
        capture(net, torch.empty(4, 16), method="export")


def test_custom_autograd_function_is_attributed():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    net = Net(lambda self, x: Double.apply(self.first(x)).sum(), first=nn.Linear(8, 8))
    for method in ("export", "dispatch"):
        graph = capture(net, torch.empty(4, 8), method=method)
        assert sum(graph.op_phase == UPDATE) == 2
        assert graph.op_flops[graph.op_phase == BACKWARD].sum() > 2 * 4 * 8 * 8


def test_nothing_is_allocated_and_the_module_is_untouched():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU())
    before = {name: (id(p), p.device.type, p._version) for name, p in net.named_parameters()}
    graph = capture(net, torch.empty(4, 1 << 16, device="meta"), loss=torch.sum)
    assert graph.parameters[0].size_bytes == 1 << 34
    assert {name: (id(p), p.device.type, p._version) for name, p in net.named_parameters()} == before
    assert not net._forward_hooks and not net[0]._forward_pre_hooks
    assert all(p.grad is None for p in net.parameters())


def test_inputs_are_tensors_of_their_own_role():
    net = Net(lambda self, x, extra: (self.first(x) + extra["bias"]).sum(), first=nn.Linear(8, 8))
    graph = capture(net, {"x": torch.empty(4, 8), "extra": {"bias": torch.empty(8)}})
    assert sorted(graph.tensor_bytes[tensors(graph, INPUT)].tolist()) == [8 * 4, 4 * 8 * 4]
    graph = capture(net, (torch.empty(4, 8), {"bias": torch.empty(8)}))
    assert graph.samples == 4
    weight = tensors(graph, PARAMETER)[0]
    assert {graph.op_names[op] for op in consumers(graph, weight)} == {"first/linear", "first.weight/update"}


def test_capture_is_deterministic():
    assert two_layers().fingerprint == two_layers().fingerprint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"method": "exprt"}, "did you mean 'export'"),
        ({"dtype": "bf17"}, "did you mean 'bf16'"),
        ({"loss": lambda output: output}, "scalar"),
        ({"loss": None}, "scalar"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(InputError, match=words):
        capture(nn.Linear(4, 4), torch.empty(2, 4), **{"loss": torch.sum, **arguments})


def test_inputs_without_tensor_and_missing_loss():
    with pytest.raises(InputError, match="no tensor"):
        capture(nn.Linear(4, 4), {"x": 3})
    with pytest.raises(InputError, match="expected a dict"):
        capture(nn.Linear(4, 4), "text")
    with pytest.raises(InputError, match="no loss: the model returns a dict of logits without one"):
        capture(Net(lambda self, x: {"logits": self.a(x)}, a=nn.Linear(4, 4)), torch.empty(2, 4))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(InputError, match="unfreeze"):
        capture(frozen, torch.empty(2, 4), loss=torch.sum)


def test_a_forward_that_raises_shows_its_own_error_and_place():
    def forward(self, x):
        return self.first(x).sum()

    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError) as caught:
        capture(Net(forward, first=nn.Linear(16, 16)), torch.empty(4, 17))
    message = str(caught.value)
    assert "\n" not in message
    assert "mat1 and mat2" in message or "a and b must have same reduction dim" in message
    assert f"{__file__}:{line}" in message


@pytest.mark.parametrize("batch", [2, 64])
def test_the_backward_of_a_product_is_a_product_beside_larger_sums(batch):
    def forward(net, x):
        x = net.first(x)
        return (net.left(x) * net.right(x)).sum()  # the gradients of x are added up beside one of the products

    graph = capture(Net(forward, **{name: nn.Linear(4, 4) for name in ("first", "left", "right")}), torch.empty(batch, 4))
    kinds = {name: kind for name, kind in zip(graph.op_names, graph.op_kind, strict=True) if "/linear" in name}
    assert len(kinds) == 6 and set(kinds.values()) == {"gemm"}
