"""A training script with one rank that does something wrong; its stderr goes to a file."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from plans import plan_of
from torch import nn

from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.job import faults

WRONG_STEP = 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return (self.layers(x) ** 2).mean()


def no_memory(gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def kill(gradient):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(gradient):
    time.sleep(1000)


IN_BACKWARD = {"memory": no_memory, "kill": kill, "hang": hang}


def go_wrong(mode, model):
    if mode in IN_BACKWARD:
        next(model.parameters()).register_hook(IN_BACKWARD[mode])
    elif mode == "raise":
        raise ValueError("my own mistake")
    elif mode == "loop":
        while True:
            pass
    elif mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def process(rank, world, path, mode, who, timeout_s):
    torch.set_num_threads(1)
    os.dup2(os.open(f"{path}/stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    with faults.guard(timeout_s=timeout_s):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(4, 8)
        model = distribute(net, plan_of(net, {"x": x}, world, deal="chain", groups=world), {"x": x})
        for step in range(3):
            if step == WRONG_STEP and rank == who:
                if mode == "leave":
                    break
                go_wrong(mode, model)
            model(x=x).backward()
    if mode != "leave":
        dist.barrier()
        dist.destroy_process_group()
