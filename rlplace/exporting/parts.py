"""What of a training script is the same in every one that has it; a part is written only where the strategy needs it."""

from __future__ import annotations

import re

HEAD = '''"""Trains {model}: {words}.

Start it with: torchrun --nproc-per-node {processes} SCRIPT [STEPS]
Written by rlplace for plan {plan}; plain torch{also}.
"""
'''

MICRO_BATCHES = '''
def micro_batches(batch, replica, device):
    """A replica's samples of the whole batch, in micro-batches."""
    mine = {name: value.chunk(REPLICAS)[replica].to(device) for name, value in batch.items()}
    return [{name: value.chunk(MICROBATCHES)[n] for name, value in mine.items()} for n in range(MICROBATCHES)]
'''

KEEP = '''
def keep(context, op, *args, **kwargs):
    """Selective recomputation keeps what products with weights, attention and collectives made."""
    name, namespace = getattr(op, "__name__", "").partition(".")[0], getattr(op, "namespace", "")
    products = ("mm", "addmm", "linear", "convolution", "_grouped_mm", "embedding_bag")
    kept = name in products or "scaled_dot_product" in name or "c10d_functional" in namespace
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
'''

STAGE = '''
class Stage(nn.Module):
    """The model with the blocks of one stage: takes what the stage before made where the model takes {first}."""

    def __init__(self, model, last):
        super().__init__()
        self.model, self.last = model, last

    def forward(self, hidden=None, **inputs):
        if hidden is not None:
            del inputs["{first}"]
            inputs["{hidden}"] = hidden
{drop}        output = self.model(**inputs)
        if self.last:
            return {loss}.reshape(1).double()
        return output{value}.clone()  # a split backward cannot detach a view
'''

TIES = '''
def groups_of_ties(mesh):
    """For every weight that stages share, the processes that hold the same part of it."""
    groups = []
    for names in TIED:
        places = sorted({place for place, held in enumerate(HELD) if set(names) & set(held)})
        columns = mesh.mesh[places].reshape(len(places), -1).T.tolist()
        made = [dist.new_group(ranks) for ranks in columns]
        groups.append(next((group for ranks, group in zip(columns, made) if dist.get_rank() in ranks), None))
    return groups


def sum_tied_gradients(stages, groups):
    """Every stage has a copy of a weight that it shares; the copies' gradients are summed."""
    for names, group in zip(TIED, groups):
        grads = [stages[n].model.get_parameter(name).grad for n, name in names.items() if n in stages]
        if grads:
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            total = torch.stack(local).sum(0)
            dist.all_reduce(total, group=group)
            for grad in local:
                grad.copy_(total)
'''

START = """
def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
"""

END = """            print(f"step {step + 1}  loss {loss:.12g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

_IMPORTS = (
    ("import contextlib", "contextlib"),
    ("import os", "os"),
    ("import sys", "sys"),
    ("from functools import partial", "partial"),
    ("", ""),
    ("import torch", "torch"),
    ("import torch.distributed as dist", "dist"),
    ("from torch import nn", "nn"),
    ("from torch.distributed._composable.replicate_with_fsdp import {}", "replicate"),
    ("from torch.distributed.device_mesh import {}", "DeviceMesh init_device_mesh"),
    ("from torch.distributed.fsdp import {}", "CPUOffloadPolicy fully_shard"),
    ("from torch.distributed.pipelining import {}", "PipelineStage Schedule\\w+"),
    ("from torch.distributed.tensor import {}", "DTensor Replicate Shard"),
    (
        "from torch.distributed.tensor.parallel import {}",
        "ColwiseParallel PrepareModuleInput PrepareModuleOutput RowwiseParallel SequenceParallel parallelize_module",
    ),
    ("from torch.nn.parallel import {}", "DistributedDataParallel"),
    ("from torch.utils.checkpoint import {}", "CheckpointPolicy checkpoint create_selective_checkpoint_contexts"),
)


def imports_of(body: str) -> str:
    """The import lines of what a script uses."""
    lines = []
    for line, names in _IMPORTS:
        used = [match.group() for name in names.split() if (match := re.search(rf"(?<![\w.\"]){name}(?=[(.,)\]])", body))]
        if used or not names:
            lines.append(line.format(", ".join(used)))
    return "\n".join(lines) + "\n"
