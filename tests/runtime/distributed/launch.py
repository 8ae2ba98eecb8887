"""Runs a function in several gloo processes and brings back what each returned.

A job that hangs is ended after a timeout and every process of a job is gone when `run` returns.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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


def run(world, function, *arguments, timeout_s=120, preload=()):
    """What ``function(*arguments)`` returned on each rank.

    `function` must be importable by name: a function at the top of a test module. `preload` names modules that are imported
    once, before the first processes of the test run are made.

    Raises:
        AssertionError: A rank failed, with the traceback of each that did, or the time ran out.
    """
    with tempfile.TemporaryDirectory() as path:
        # A server that has imported what is slow to import forks the processes; the test process itself has threads.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "rlplace.runtime.distributed.distribute", *preload])
        processes = [
            context.Process(target=_process, args=(rank, world, path, function, arguments, timeout_s)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout_s)
        finally:
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
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


def start(processes, *command, restarts=0, **options):
    """A job of torchrun, whose own port is one that is free; `command` is what follows torchrun's options."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "--max-restarts", restarts]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*map(str, line)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def torchrun(processes, *command, timeout_s=240, **options):
    """Exit code and output of such a job, which is ended after a timeout."""
    job = start(processes, *command, **options)
    try:
        out, err = job.communicate(timeout=timeout_s)
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its processes
            job.communicate(timeout=30)
    return job.returncode, out, err
