"""Runs a function in several gloo processes and brings back what each returned; or a program, as torchrun runs it.

A job that hangs is ended after a timeout and every process of a job is gone when `run` or `forked` returns.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SLOW_IMPORTS = (
    "torch", "torch.export._trace", "torch.testing", "transformers", "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "mixtral", "resnet", "t5", "vit")),
    "rlplace.cli.main", "rlplace.runtime.job.distribute", "rlplace.runtime.job.job",
    "rlplace.runtime.strategy.run",
)  # fmt: skip


def forks():
    """Makes processes that have imported what is slow to import: a server forks them, as the test process has threads."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*SLOW_IMPORTS, *({"peft"} & sys.modules.keys())])
    return context


def start_and_end(processes, timeout_s, unended=()):
    """Starts processes and waits for them but for the unended; those that hang, by number, are killed after a time."""
    for process in processes:
        process.start()
    end = time.monotonic() + timeout_s
    try:
        for rank, process in enumerate(processes):
            if rank not in unended:
                process.join(max(end - time.monotonic(), 0.0))
    finally:
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    return hung


def _process(rank, world, path, function, arguments, timeout_s):
    torch.set_num_threads(1)
    faulthandler.enable(open(f"{path}/{rank}.crash", "w"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}/store", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
        result = function(*arguments)
        torch.save(result, f"{path}/{rank}.result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        with open(f"{path}/{rank}.error", "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)


def run(world, function, *arguments, timeout_s=600):
    """What ``function(*arguments)`` returned on each rank.

    `function` must be importable by name: a function at the top of a test module.

    Raises:
        AssertionError: A rank failed, with the traceback of each that did, or the time ran out.
    """
    with tempfile.TemporaryDirectory() as path:
        processes = [
            forks().Process(target=_process, args=(rank, world, path, function, arguments, timeout_s)) for rank in range(world)
        ]
        hung = start_and_end(processes, timeout_s)
        errors = [
            f"rank {rank} ended by {signal.Signals(-process.exitcode).name}"
            for rank, process in enumerate(processes)
            if process.exitcode < 0 and rank not in hung
        ]
        # The first to fail is the cause; the others lost it as a peer.
        told = [file for file in Path(path).iterdir() if file.suffix in (".crash", ".error")]
        for file in sorted(told, key=lambda file: file.stat().st_mtime):
            if text := file.read_text():
                errors.append(f"rank {file.stem}:\n{text}")
        assert not errors, "\n".join(errors)
        assert not hung, f"ranks {hung} did not end within {timeout_s} s"
        return [torch.load(f"{path}/{rank}.result", weights_only=False) for rank in range(world)]


def own_store():
    """The store of a job; it is there as long as the object that is returned."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def become_rank(rank, world, port):
    """Makes this process a rank of a job whose store is at a port."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost"}
    here |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update({name: str(value) for name, value in here.items()})


def _program(rank, world, path, port, command, folder):
    torch.set_num_threads(1)
    os.chdir(folder)
    for handle, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}/{rank}.{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT), handle)
    become_rank(rank, world, port)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def forked(processes, *command, cwd=".", timeout_s=900):
    """What `torchrun` makes of a command, without its launcher: forks need a tenth of the time.

    Returns:
        Exit code of the first that failed, what each printed, and what all said on stderr.
    """
    store = own_store()
    with tempfile.TemporaryDirectory() as path:
        given = (path, store.port, list(map(str, command)), str(cwd))
        jobs = [forks().Process(target=_program, args=(rank, processes, *given)) for rank in range(processes)]
        hung = start_and_end(jobs, timeout_s)
        out, err = ([Path(path, f"{rank}.{name}").read_text() for rank in range(processes)] for name in ("out", "err"))
    assert not hung, f"ranks {hung} did not end within {timeout_s} s: {err}"
    return next((job.exitcode for job in jobs if job.exitcode), 0), out, "".join(err)


def start(processes, *command, restarts=0, **options):
    """A job of torchrun, whose own port is one that is free; `command` is what follows torchrun's options."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "--max-restarts", restarts]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*map(str, line)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def torchrun(processes, *command, timeout_s=900, **options):
    """Exit code and output of such a job, which is ended after a timeout."""
    job = start(processes, *command, **options)
    try:
        out, err = job.communicate(timeout=timeout_s)
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its processes
            job.communicate(timeout=30)
    return job.returncode, out, err
