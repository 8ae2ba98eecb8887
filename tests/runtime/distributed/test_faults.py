"""A rank that fails ends the job: all processes gone, one line, no traceback. There is no launcher here that would end them."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import fault_worker
import pytest
import torch
import torch.multiprocessing as mp
from launch import start, torchrun

from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.wire import LostPeerError
from rlplace.runtime.distributed.job import faults

HOST = r"host [\w.-]+"


def job(tmp_path, mode, who=1, world=2, timeout_s=6.0, limit_s=120):
    """Exit codes by rank, None for one that did not end; the lines on stderr."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "rlplace.runtime.distributed.distribute"])
    arguments = (world, str(tmp_path), mode, who, timeout_s)
    processes = [context.Process(target=fault_worker.process, args=(rank, *arguments)) for rank in range(world)]
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
        r"\(fault_worker.py:\d+ in go_wrong\): ValueError: my own mistake",
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
def test_hangs_in_the_script(tmp_path):
    codes, lines = job(tmp_path, "loop", who=2, world=3)
    assert codes == [1, 1, 1]
    (line,) = lines
    assert re.search(
        rf"rank 2 \(stage 2, {HOST}\) hangs: .* the training script, outside of the model \(fault_worker.py:\d+ in", line
    )


@pytest.mark.slow
def test_stopped(tmp_path):
    codes, lines = job(tmp_path, "stop")
    assert codes == [1, None]
    (line,) = lines
    assert re.search(rf"rank 1 \(stage 1, {HOST}\) gives no sign of life", line)


@pytest.mark.slow
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
    options = ["--cluster", "cpu:2", "--planner", "pipedream", "--batch", "2", "--seq", "16", "--microbatches", "2"]
    assert main(["place", model, *options, "--out", str(plan)]) == 0
    command = ["-m", "rlplace", "run", "--plan", plan, "--steps", "200", "--json"]
    code, whole, err = torchrun(2, *command)
    assert code == 0, err
    started = start(2, *command, "--checkpoint", folder, "--checkpoint-every", "20", "--resume", restarts=2)
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
    found, expected = json.loads(out), json.loads(whole)
    assert 0 < found["first_step"] < 200
    assert found["losses"] == expected["losses"][found["first_step"] :]
    assert not processes_of(str(folder))
