"""Jobs on forked processes: what hangs, dies or fails is ended and reported, and the jobs behind it run on new processes."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import RlplaceError

GRACE_S = 5.0
"""Time that the other processes of a job have to report after the first one failed."""

START_S, STARTS = 60.0, 3
"""Time that processes have to find each other, and how often they try: gloo refuses now and then after others were killed."""

Result = dict[str, Any]
Work = Callable[[Any], Result]


def run_jobs(work: Work, jobs: Sequence[Any], processes: int, limit_s: float, backend: str = "gloo") -> Iterator[list[Result]]:
    """Runs jobs one after another, each on all processes.

    Args:
        work: Called with a job on every process.
        jobs: What to run.
        processes: How many.
        limit_s: Time for one job, after which it counts as hung.
        backend: Of the group that the processes form; empty: none.

    Yields:
        For every job what each process returned, or reports with ``error`` (the exception's type), ``line``, ``refused``
        (whether rlplace raised it on purpose) and ``trace``, of those that failed alone.
    """
    context, done, starts = multiprocessing.get_context("fork"), 0, 0
    while done < len(jobs):
        with tempfile.TemporaryDirectory() as folder:
            pipes = [context.Pipe() for _ in range(processes)]
            members = [
                context.Process(
                    target=_member,
                    args=(rank, processes, folder, pipe[1], work, jobs[done:], limit_s, backend),
                )
                for rank, pipe in enumerate(pipes)
            ]
            for member in members:
                member.start()
            for _, theirs in pipes:
                theirs.close()
            try:
                _, ready = _results([ours for ours, _ in pipes], members, START_S)
                starts = 0 if ready else starts + 1
                while done < len(jobs) and (ready or starts == STARTS):
                    results, usable = _results([ours for ours, _ in pipes], members, limit_s)
                    done += 1
                    yield results
                    if not usable:
                        break
            finally:
                for member in members:
                    member.kill()
                    member.join()


def _results(pipes: Sequence[Connection], members: Sequence[Any], limit_s: float) -> tuple[list[Result], bool]:
    """Collects what the processes report of one job, and whether they can run another."""
    found: dict[int, Result] = {}
    end = time.monotonic() + limit_s
    while len(found) < len(pipes) and (left := end - time.monotonic()) > 0:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        for ready in wait(waiting, left):
            rank = next(rank for rank, pipe in enumerate(pipes) if pipe is ready)
            try:
                found[rank] = pipes[rank].recv()
            except EOFError:
                members[rank].join()
                code = members[rank].exitcode
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                found[rank] = {"error": "Died", "line": f"rank {rank} ended by {how}", "refused": False}
            if "error" in found[rank]:
                end = min(end, time.monotonic() + GRACE_S)
    failed = [found[rank] for rank in sorted(found) if "error" in found[rank]]
    if not failed and len(found) == len(pipes):
        return [found[rank] for rank in sorted(found)], True
    together = len(failed) == len(pipes) and all(one["refused"] for one in failed)
    line = f"nothing from {len(pipes) - len(found)} of {len(pipes)} processes after {limit_s:.0f} s"
    return failed or [{"error": "Hang", "line": line, "refused": False}], together


def _member(
    rank: int, processes: int, folder: str, pipe: Connection, work: Work, jobs: Sequence[Any], limit_s: float, backend: str
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if backend:
        store = f"file://{folder}/store"
        dist.init_process_group(backend, store, timedelta(seconds=2 * limit_s), world_size=processes, rank=rank)
    pipe.send({})
    for job in jobs:
        try:
            pipe.send(work(job))
        except BaseException as error:
            line = " ".join(str(_root(error)).split())[:400]
            refused = isinstance(error, RlplaceError)
            pipe.send({"error": type(_root(error)).__name__, "line": line, "refused": refused, "trace": traceback.format_exc()})


def _root(error: BaseException) -> BaseException:
    """Finds what raised first: pipelines raise an error of their own from it."""
    while error.__cause__ is not None and not isinstance(error, RlplaceError):
        error = error.__cause__
    return error
