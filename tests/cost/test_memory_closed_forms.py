"""Textbook formulas of training memory against what is captured and replayed."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from rlplace.cost import price
from rlplace.cost.footprint import MemoryOptions, footprint
from rlplace.graph.capture import capture
from rlplace.graph.opgraph import ACTIVATION, BACKWARD
from rlplace.plan import PlacementPlan
from rlplace.zoo import load_model

S, B, H, A = 256, 2, 96, 6
GPT2 = f"hf:gpt2,vocab_size=500,n_embd={H},n_head={A},activation_function=gelu"


def saved_per_layer(spec, key="n_layer", **options):
    """Bytes that one more layer keeps from the forward for the backward, in units of s b h."""
    saved = []
    for layers in (2, 3):
        loaded = load_model(f"{spec},{key}={layers}", batch=B, seq=S)
        graph = capture(loaded.module, loaded.example_inputs, optimizer="sgd", **options)
        begin = int(np.flatnonzero(graph.op_phase == BACKWARD)[0])
        last = np.full(graph.num_tensors, -1)
        np.maximum.at(last, graph.edge_tensor, graph.consumers)
        kept = (
            (graph.tensor_role == ACTIVATION) & (graph.tensor_producer >= 0) & (graph.tensor_producer < begin) & (last >= begin)
        )
        saved.append(int(graph.tensor_bytes[kept].sum()))
    return (saved[1] - saved[0]) / (S * B * H)


def test_activations_of_a_layer_with_unfused_attention():
    """Korthikanti et al. (2022): s b h (34 + 5 a s / h); the norms' statistics (2 x 2 x 4 bytes a token) are not in it."""
    found = saved_per_layer(f"{GPT2},attn_implementation=eager", dtype="bf16")
    assert found == pytest.approx(34 + 5 * A * S / H, abs=16 / H + 0.01)


def test_activations_of_a_layer_with_fused_attention():
    """No scores and masks; instead the log-sum-exp, and the attention mask that is made when the model is traced."""
    found = saved_per_layer(GPT2, dtype="bf16")
    assert found == pytest.approx(34 + 4 * A / H + 2 * S / H, abs=16 / H + 0.01)


def test_activations_of_a_checkpointed_layer():
    """Full recomputation: the layer's input, 2 s b h; plus what the library hands to every layer."""
    found = saved_per_layer(f"{GPT2},gradient_checkpointing=true", dtype="bf16")
    assert 2.0 <= found <= 2.0 + 2 * S / H


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


def states(plan=None, devices=1, **options):
    """Bytes per parameter of weights, gradients and optimizer state on the first device."""
    graph = capture(Weights(), (torch.zeros(1, 512),), loss=lambda y: y.float().sum(), **options)
    problem = price(graph, f"a100-80g:{devices}", groups=4)
    whole = PlacementPlan(problem.fingerprint, "test", 0, np.zeros(problem.num_groups, dtype=np.int32))
    settings = MemoryOptions(optimizer_kernel="foreach", gradient_as_bucket_view=True)
    item = footprint(problem, dataclasses.replace(whole, **(plan or {})), options=settings)[0]
    count = sum(int(np.prod(p.shape)) for p in graph.parameters)
    return [item.parts[part] / count for part in ("weights", "gradients", "optimizer")]


def test_model_states():
    """16 bytes a parameter, however they are divided (Rajbhandari et al. 2020)."""
    slack = {"rel": 2e-3}
    assert states() == pytest.approx([4, 4, 8], **slack)  # fp32 Adam
    assert states(autocast="bf16") == pytest.approx([4, 4, 8], **slack)
    assert states(dtype="bf16", master_weights=True) == pytest.approx([2, 2, 12], **slack)
    assert states(dtype="bf16") == pytest.approx([2, 2, 4], **slack)  # torch.optim on bfloat16 parameters
    # ZeRO stage 1 on 4 replicas: 2 + 2 + 12 / 4.
    sharded = {"replicas": [[0], [1], [2], [3]], "optimizer_sharding": True}
    assert states(sharded, 4, dtype="bf16", master_weights=True) == pytest.approx([2, 2, 3], **slack)
