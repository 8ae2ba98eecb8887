"""train_plain_distributed.py under a watch: it tells when steps change their pace, and has a better plan looked for.

Started with `torchrun --nproc-per-node 2 examples/watch_training.py`, see docs/runtime/watch.md.
"""

import sys

import torch
from train_plain_distributed import Model, text

import rlplace


def main():
    """As many epochs as the command line says."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.distributed.init_process_group()
    plan = rlplace.PlacementPlan.load("train_plain.plan.json")
    model = rlplace.distribute(Model(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = rlplace.StepWatch(plan, model=model)
    loader = torch.utils.data.DataLoader(text(128), batch_size=16, shuffle=True)
    for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
        for tokens, labels in loader:
            with watch.step():
                loss = model(tokens=tokens, labels=labels)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
    watch.close()


if __name__ == "__main__":
    main()
