"""A rank that fails ends the job: all processes gone, one line, no traceback. There is no launcher here that would end them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.runtime.base import faults
from rlplace.runtime.job.distribute import distribute
from tests.runtime.equality import plan_of, strategy_plan
from tests.runtime.job.launch import forked, forks, start, start_and_end, torchrun

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


def pipeline():
    """A strategy of two stages for `Net`."""
    stages = [{"blocks": ["layers.0", "layers.1"], "devices": [0]}, {"blocks": ["layers.2"], "devices": [1]}]
    strategy = {"batch": 4, "microbatch": [2], "microbatches": [2], "schedule": "1f1b", "stages": stages}
    return strategy_plan(strategy)


def run_script(rank, world, path, mode, who, by_strategy):
    torch.set_num_threads(1)
    os.dup2(os.open(f"{path}/stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    with faults.guard():
        torch.manual_seed(0)
        net, x = Net(), torch.randn(4, 8)
        plan = pipeline() if by_strategy else plan_of(net, {"x": x}, world, deal="chain", groups=world)
        model = distribute(net, plan, {"x": x[:2] if by_strategy else x})
        for step in range(3):
            if step == WRONG_STEP and mode in HANGS:
                for group in c10d._world.pg_map:  # only now: nobody knows how long a start-up takes
                    c10d._set_pg_timeout(timedelta(seconds=6), group)
            if step == WRONG_STEP and rank == who:
                if mode == "leave":
                    break
                go_wrong(mode, model)
            model(x=x).backward()
    if mode != "leave":
        dist.barrier()
        dist.destroy_process_group()


HOST = r"host [\w.-]+"


HANGS = ("hang", "loop", "stop")


def job(tmp_path, mode, who=1, world=2, limit_s=120, by_strategy=False):
    """Exit codes by rank, None for one that did not end; the lines on stderr."""
    arguments = (world, str(tmp_path), mode, who, by_strategy)
    processes = [forks().Process(target=run_script, args=(rank, *arguments)) for rank in range(world)]
    unended = {who} if mode in HANGS else set()  # nobody ends that one but a launcher
    hung = start_and_end(processes, limit_s, unended)
    codes = [None if rank in hung else process.exitcode for rank, process in enumerate(processes)]
    return codes, (tmp_path / "stderr").read_text().splitlines()


def test_nothing_wrong(tmp_path):
    assert job(tmp_path, "none") == ([0, 0], [])


MORE = [pytest.mark.long, pytest.mark.slow]
HANG = rf"rank {{who}} \(stage {{who}}, {HOST}\) hangs: rank \d \(stage \d, .*\) waited \d+ s for .*"
GONE = rf"rank 1 \(stage 1, {HOST}\) is gone: it was killed or has crashed.*"
ENDS = {
    "raise": (
        {}, [1, 1], rf"rank 1 \(stage 1, {HOST}\) failed in the training script, outside of the model "
        r"\(test_faults.py:\d+ in go_wrong\): ValueError: my own mistake",
    ),
    "memory": (
        {"who": 0}, [1, 1],
        rf"rank 0 \(stage 0, {HOST}\) ran out of memory in the gradients of its parameters: .*allocate 2.00 GiB.*",
    ),
    "kill": ({}, [1, -9], GONE),
    "kill, a strategy": ({"by_strategy": True}, [1, -9], GONE),
    "hang": ({}, [1, None], HANG.format(who=1)),
    "stop": ({}, [1, None], HANG.format(who=1)),
    "loop": ({"who": 2, "world": 3}, [1, 1, None], HANG.format(who=2)),
    "leave": ({}, [1, 0], rf"rank 1 \(stage 1, {HOST}\) has ended its script while rank 0 \(stage 0, {HOST}\) wait.*"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=MORE if n in (*HANGS, "leave") else []) for n in ENDS])
def test_every_end_has_one_line(tmp_path, name):
    options, codes, line = ENDS[name]
    found, lines = job(tmp_path, name.partition(",")[0], **options)
    assert found == codes and len(lines) == 1
    assert re.fullmatch(f"rlplace: {line}", lines[0])


ONLY_ONE = """
import os
import torch

def net(batch=4):
    if os.environ.get("RANK") == "1":
        raise OSError("no data on this host")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    return model, {"input": torch.randn(batch, 4)}, lambda output: output.square().mean()
"""


OWN_PLAN = """
import os, sys
from rlplace.cli.main import main

sys.exit(main(["run", "--plan", f"{os.environ['RANK']}.plan.json"]))
"""


def planned(model, path):
    words = f"place {model} --cluster cpu:2 --space replicate=2 --batch 4 --calls 9 --out {path}"
    assert main(words.split()) == 0


def first_line(err):
    return next(line for line in err.splitlines() if line.startswith("rlplace:"))


@pytest.mark.parametrize("launcher", ["none", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_rank_0_repeats_what_another_rank_reports_unseen(tmp_path, launcher):
    (tmp_path / "mine.py").write_text(ONLY_ONE)
    planned(f"{tmp_path / 'mine.py'}:net", tmp_path / "p.plan.json")
    command = ["-m", "rlplace", "run", "--plan", tmp_path / "p.plan.json", "--steps", "1"]
    if launcher == "none":  # a file of its own for every rank, rank 0's first
        code, _, err = forked(2, *command)
    else:
        code, _, err = torchrun(2, "--local-ranks-filter", 0, *command)
    assert code != 0 and re.fullmatch(rf"rlplace: rank 1 \({HOST}\): model .* raised OSError: no data on .*", first_line(err))


def test_a_process_without_its_plan_is_heard_of(tmp_path):
    (tmp_path / "own_plan.py").write_text(OWN_PLAN)
    planned("zoo:mlp,layers=2,width=8", tmp_path / "0.plan.json")
    code, _, err = forked(2, tmp_path / "own_plan.py", cwd=tmp_path)
    assert code != 0 and re.fullmatch(rf"rlplace: rank 1 \({HOST}\): 1.plan.json: cannot be read: .*", first_line(err))


def test_torchrun_never_reads_half_a_word(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    faults.tell_torchrun("rank 1 is gone")
    whole = file.read_text()
    assert "rank 1 is gone" in json.loads(whole)["message"]["message"]

    def cut_off(data, target):
        target.write("{")
        raise OSError("no space left on device")

    monkeypatch.setattr(json, "dump", cut_off)
    faults.tell_torchrun("rank 2 is gone")
    assert file.read_text() == whole


def test_what_is_whose_fault():
    assert faults.is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    )
    assert faults.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not faults.is_out_of_memory(ValueError("out of memory"))
    assert faults.is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert faults.is_lost_peer(torch.distributed.DistNetworkError("gone"))
    assert not faults.is_lost_peer(RuntimeError("Timed out"))
    assert not faults.is_lost_peer(InputError("connection closed by peer"))


def processes_of(marker):
    """Processes whose command line has a text, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "cmdline").read_text():
                variables = dict(item.partition("=")[::2] for item in (entry / "environ").read_text().split("\0"))
                if "LOCAL_RANK" in variables:
                    found[int(variables["RANK"])] = int(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_elastic_restart_continues_from_the_last_checkpoint(tmp_path):
    plan, folder = tmp_path / "p.plan.json", tmp_path / "checkpoints"
    model = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100,n_positions=32"
    options = ["--cluster", "cpu:2", "--planner", "round_robin", "--microbatch", "2", "--seq", "16"]
    assert main(["place", model, *options, "--out", str(plan)]) == 0
    command = ["-m", "rlplace", "run", "--plan", plan, "--steps", "400", "--json"]
    started = start(2, *command, "--checkpoint", folder, "--checkpoint-every", "20", "--resume", restarts=2)
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        killed = processes_of(str(folder))[1]
        os.kill(killed, signal.SIGKILL)
        out, err = started.communicate(timeout=900)
    finally:
        started.kill()
    assert started.returncode == 0, err
    assert re.search(r"rlplace: rank 1 \(stage 1, .*\) is gone: it was killed", err), err
    found = json.loads(out)  # that a resumed run has the losses of a whole one is tested without a kill
    assert 0 < found["first_step"] < 400 and len(found["losses"]) == 400 - found["first_step"]
    assert not processes_of(str(folder))


@pytest.mark.parametrize(
    ("source_of", "others", "culprit"),
    [
        ({0: 1}, [1, 2], 1),
        ({0: 1, 1: 2}, [2, 3], 2),  # the chain of waits is followed
        ({0: 1, 1: None}, [2], 2),  # a collective waits for whoever does not say that it waits
        ({0: 1, 1: 2, 2: 0}, [], None),
        ({0: None, 1: None}, [], None),
        ({0: 1, 1: 2, 2: 1}, [3], None),
    ],
)
def test_who_is_to_blame(source_of, others, culprit):
    assert faults.blamed(0, source_of, others) == culprit


def test_the_end_of_a_program_ends_its_groups():
    """A script of a user's need not: threads of gloo that outlive the interpreter abort it (SIGABRT at the very end)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    faults._at_exit()
    assert not dist.is_initialized()
