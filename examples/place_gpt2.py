"""Captures a small GPT-2, plans it for two GPUs, applies the plan, and trains a few steps.

Runs anywhere: without two GPUs both devices of the plan are the processor. Needs the extra `transformers`.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rlplace

config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, use_cache=False)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 1000, (4, 64))
inputs = {"input_ids": tokens, "labels": tokens}

graph = rlplace.capture(model, inputs)
problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:2"))
plan = rlplace.place(problem, time_limit_s=2)
print(f"{graph.num_ops} ops, {problem.num_groups} groups, predicted {plan.predicted.step_time_s * 1e3:.2f} ms a step")

devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
model = rlplace.apply(model, plan, devices, example_inputs=inputs)
print(model.report)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
