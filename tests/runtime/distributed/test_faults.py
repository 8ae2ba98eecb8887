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
import torch.multiprocessing as mp
from launch import start
from plans import plan_of
from torch import nn

from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution.activity import Activity
from rlplace.runtime.distributed.execution.wire import LostPeerError
from rlplace.runtime.distributed.job import faults, watch
from rlplace.runtime.distributed.job.board import Member
from rlplace.runtime.distributed.job.watch import Watch

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


def run_script(rank, world, path, mode, who, timeout_s):
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


HOST = r"host [\w.-]+"


def job(tmp_path, mode, who=1, world=2, timeout_s=6.0, limit_s=120):
    """Exit codes by rank, None for one that did not end; the lines on stderr."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "rlplace.runtime.distributed.distribute"])
    arguments = (world, str(tmp_path), mode, who, timeout_s)
    processes = [context.Process(target=run_script, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    try:
        for rank, process in enumerate(processes):
            if mode != "stop" or rank != who:
                process.join(max(deadline - time.monotonic(), 0.0))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return codes, (tmp_path / "stderr").read_text().splitlines()


def test_nothing_wrong(tmp_path):
    assert job(tmp_path, "none") == ([0, 0], [])


def test_raises(tmp_path):
    codes, lines = job(tmp_path, "raise")
    assert codes == [1, 1]
    (line,) = lines
    assert re.fullmatch(
        rf"rlplace: rank 1 \(stage 1, {HOST}\) failed in the training script, outside of the model "
        r"\(test_faults.py:\d+ in go_wrong\): ValueError: my own mistake",
        line,
    )


def test_out_of_memory(tmp_path):
    codes, lines = job(tmp_path, "memory", who=0)
    assert codes == [1, 1]
    (line,) = lines
    assert re.search(
        rf"rank 0 \(stage 0, {HOST}\) ran out of memory in the backward of segment \d+ \(micro-batch 0\): .*allocate 2.00 GiB",
        line,
    )


def test_killed(tmp_path):
    codes, lines = job(tmp_path, "kill")
    assert codes == [1, -signal.SIGKILL]
    (line,) = lines
    assert re.search(rf"rank 1 \(stage 1, {HOST}\) is gone: it was killed or has crashed", line)


@pytest.mark.slow
def test_hangs_in_a_kernel(tmp_path):
    codes, lines = job(tmp_path, "hang")
    assert codes == [1, 1]
    (line,) = lines
    assert re.search(rf"rank 1 \(stage 1, {HOST}\) hangs: for \d+ s it has been in the backward of segment \d+", line)
    assert re.search(r"while rank 0 \(stage 0, .*\) waits for the gradient of '\w+' of micro-batch 0 from rank 1$", line)


@pytest.mark.slow
@pytest.mark.long
def test_hangs_in_the_script(tmp_path):
    codes, lines = job(tmp_path, "loop", who=2, world=3)
    assert codes == [1, 1, 1]
    (line,) = lines
    assert re.search(rf"rank 2 \(stage 2, {HOST}\) hangs: .* the training script, outside of the model \(test_faults", line)


@pytest.mark.slow
@pytest.mark.long
def test_stopped(tmp_path):
    codes, lines = job(tmp_path, "stop")
    assert codes == [1, None]
    (line,) = lines
    assert re.search(rf"rank 1 \(stage 1, {HOST}\) gives no sign of life", line)


@pytest.mark.slow
@pytest.mark.long
def test_leaves_early(tmp_path):
    codes, lines = job(tmp_path, "leave")
    assert codes == [1, 0]
    (line,) = lines
    assert re.search(rf"rank 1 \(stage 1, {HOST}\) has ended its script while rank 0 \(stage 0, {HOST}\) wait", line)


def test_what_is_whose_fault():
    assert faults.is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    )
    assert faults.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not faults.is_out_of_memory(ValueError("out of memory"))
    assert faults.is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert faults.is_lost_peer(LostPeerError("gone", 1))
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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_elastic_restart_continues_from_the_last_checkpoint(tmp_path):
    plan, folder = tmp_path / "p.plan.json", tmp_path / "checkpoints"
    model = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100,n_positions=32"
    options = ["--cluster", "cpu:2", "--planner", "pipedream", "--microbatch", "2", "--seq", "16", "--microbatches", "2"]
    assert main(["place", model, *options, "--out", str(plan)]) == 0
    command = ["-m", "rlplace", "run", "--plan", plan, "--steps", "100", "--json"]
    started = start(2, *command, "--checkpoint", folder, "--checkpoint-every", "10", "--resume", restarts=2)
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        killed = processes_of(str(folder))[1]
        os.kill(killed, signal.SIGKILL)
        out, err = started.communicate(timeout=240)
    finally:
        started.kill()
    assert started.returncode == 0, err
    assert re.search(r"rlplace: rank 1 \(stage 1, .*\) is gone: it was killed", err), err
    found = json.loads(out)  # that a resumed run has the losses of a whole one is tested without a kill
    assert 0 < found["first_step"] < 100 and len(found["losses"]) == 100 - found["first_step"]
    assert not processes_of(str(folder))


COLLECTIVE = Activity("all_gather together", None, True, 20.0)


class Board:
    """Beats of other ranks; a rank beats every second unless it is silent."""

    def __init__(self, world):
        self.rank, self.world, self.found, self.silent = 0, world, {}, set()

    def put(self, key, data):
        self.found[key] = data

    def look(self, key):
        return self.found.get(key)

    def member(self, rank):
        return Member(rank, "h", "", -1, "")

    def does(self, rank, activity):
        self.found[f"beat/{rank}"] = {"n": 1, **activity.to_dict()}


@pytest.fixture
def made_up(monkeypatch):
    """The watch of rank 0 of three, which waits in a collective, and its board; `after` lets seconds pass."""
    now_s = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(watch, "listen", lambda: (None, lambda wake: False))  # the tests keep their own handling of SIGTERM
    board = Board(3)
    found = Watch(board, "", 10.0, lambda code: None)

    def after(seconds, waiting=COLLECTIVE):
        said = None
        for _ in range(seconds):
            now_s[0] += 1.0
            for key, beat in board.found.items():
                if key.startswith("beat/") and int(key[5:]) not in board.silent:
                    beat["n"] += 1
            said = found.standstill(waiting)
        return said

    return board, after


def test_ranks_that_wait_for_each_other(made_up):
    board, after = made_up
    for rank in (1, 2):
        board.does(rank, COLLECTIVE)
    assert after(1) is None  # a beat that was found is as old as anything
    assert "the ranks wait for each other" in after(3)


LAST = [COLLECTIVE, Activity("'x' from rank 0", 0, False, 1.0), Activity("the model", None, False, 1.0)]


@pytest.mark.parametrize("last", LAST)
def test_a_stopped_rank_is_blamed_whatever_it_did_last(made_up, last):
    board, after = made_up
    board.does(1, COLLECTIVE)
    board.does(2, last)
    assert "no sign of life" not in (after(2) or "")
    board.silent = {2}
    assert after(8) is None
    assert "rank 2 (host h) gives no sign of life" in after(4)


def test_a_rank_that_is_busy_for_too_long_hangs(made_up):
    board, after = made_up
    board.does(1, COLLECTIVE)
    board.does(2, Activity("the training script", None, False, 9.0))
    assert after(4) is None
    board.does(2, Activity("the training script", None, False, 11.0))
    assert "rank 2 (host h) hangs: for 11 s it has been in the training script" in after(2)


def test_the_chain_of_waits_is_followed(made_up):
    board, after = made_up
    board.does(1, Activity("'y' from rank 2", 2, False, 15.0))
    board.does(2, Activity("the backward", None, False, 30.0))
    said = after(4, Activity("'x' from rank 1", 1, False, 20.0))
    assert "rank 2 (host h) hangs: for 30 s it has been in the backward, while rank 1 (host h) waits for 'y' from" in said


def test_who_has_ended_or_never_came(made_up):
    board, after = made_up
    board.does(1, COLLECTIVE)
    assert after(4) is None  # rank 2 may still be starting
    assert "rank 2 (host h) has not called rlplace.distribute" in after(1, Activity("all_gather together", None, True, 130.0))
    board.does(2, COLLECTIVE)
    board.silent = {2}
    board.put("ended/2", {"why": "done"})
    assert "rank 2 (host h) has ended its script" in after(5)
    board.put("ended/2", {"why": watch.TERMINATED})
    assert after(1) is None
