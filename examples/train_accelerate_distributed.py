"""Trains the model of train_plain.py with accelerate, on as many devices as a plan says, with gradient accumulation.

train_accelerate.py is the same script on one device. Started with `torchrun --nproc-per-node N`, see docs/runtime.md.
"""

import torch
from accelerate import Accelerator
from train_plain import Model, text

import rlplace


def main():
    """Two epochs; saves the model."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Model()
    plan = rlplace.PlacementPlan.load("train_plain.plan.json")
    model = rlplace.distribute_accelerator(accelerator, model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    loader = torch.utils.data.DataLoader(text(124), batch_size=16, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for epoch in range(2):
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                loss = model(tokens=tokens, labels=labels)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}")
    accelerator.save_model(model, "train_accelerate")


if __name__ == "__main__":
    main()
