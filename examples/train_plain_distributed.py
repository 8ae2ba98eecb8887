"""Trains a small language model on made-up text, on as many devices as a plan says.

train_plain.py is the same script on one device. Started with `torchrun --nproc-per-node N`, see docs/runtime.md.
"""

import torch
from torch import nn
from torch.nn import functional as F

import rlplace

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 4, 16


class Block(nn.Module):
    """Attention and two dense layers, each around a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dense(self.norm_2(x))


class Model(nn.Module):
    """Predicts the next token; returns the loss in training, loss and scores otherwise."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, labels):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        scores = self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def example(batch=8):
    """The model and one batch, for `rlplace place examples/train_plain.py:example`."""
    tokens = torch.zeros(batch, LENGTH, dtype=torch.long)
    return Model(), {"tokens": tokens, "labels": tokens}


def text(samples):
    """Token t+1 is three times token t, plus one, now and then disturbed."""
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1))
    for t in range(LENGTH):
        known = torch.rand(samples) < 0.9
        tokens[known, t + 1] = (3 * tokens[known, t] + 1) % VOCABULARY
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main():
    """Two epochs, a checkpoint and an evaluation."""
    torch.manual_seed(0)
    model = Model()
    torch.distributed.init_process_group()
    model = rlplace.distribute(model, rlplace.PlacementPlan.load("train_plain.plan.json"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    loader = torch.utils.data.DataLoader(text(124), batch_size=16, shuffle=True)
    for epoch in range(2):
        for tokens, labels in loader:
            loss = model(tokens=tokens, labels=labels)["loss"]
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
    rlplace.save_checkpoint("train_plain", model, optimizer, step=16)
    model.eval()
    with torch.no_grad():
        tokens, labels = text(32).tensors
        output = model(tokens=tokens, labels=labels)
    right = (output["scores"].argmax(-1).cpu() == labels).float().mean()
    print(f"evaluation: loss {output['loss'].item():.6f}, {100 * right.item():.2f} % right")


if __name__ == "__main__":
    main()
