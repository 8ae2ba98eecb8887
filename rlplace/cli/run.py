"""``rlplace run``: under torchrun, trains a plan's model as the plan says."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlplace.cli.common import (
    OPTIMIZERS,
    natural,
    positive,
    print_json,
    print_table,
    rate,
    seconds,
)
from rlplace.errors import InputError, MissingError
from rlplace.text import gb, ms

if TYPE_CHECKING:
    from rlplace.plan.plan import PlacementPlan
    from rlplace.runtime.job.job import JobOptions, JobResult

HELP = "under torchrun: train a plan's model as the plan says"
EXAMPLE = "example: torchrun --nproc-per-node 4 -m rlplace run --plan gpt2.plan.json --steps 10 --verify"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--plan", metavar="P.plan.json", required=True, help="plan that 'rlplace place MODEL' made")
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="training steps (10)")
    parser.add_argument("--verify", action="store_true", help="compare with the unplaced model; exit code 1 if it differs")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="optimizer (that of the plan)")
    parser.add_argument("--lr", type=rate, default=1e-3, metavar="X", help="learning rate (0.001)")
    parser.add_argument("--clip", type=rate, metavar="NORM", help="clip gradients to this global norm")
    parser.add_argument("--autocast", choices=("bf16",), help="mixed precision (what the plan was captured with)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of weights, batches and dropout (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to run (cuda where there is a GPU)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="of torch.distributed (nccl for GPUs, else gloo)")
    parser.add_argument("--cluster", metavar="C", help="the cluster at hand; must be the one that the plan was made for")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder for checkpoints, on storage that all hosts share")
    parser.add_argument("--checkpoint-every", type=positive, metavar="N", help="steps between checkpoints (only at the end)")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint, if there is one")
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="how long a rank may stand still while others wait (300)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the verb on this rank."""
    from rlplace.runtime.job import job

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # closing sockets is no news
    plan: PlacementPlan | InputError
    try:
        plan = _load(options)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        plan = error  # rank 0 reports what all ranks have: torchrun then ends the others while they wait for it
    settings = job.JobOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(job.JobOptions)})
    return _train(plan, settings, options)


def _load(options: argparse.Namespace) -> PlacementPlan:
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import recipe_of
    from rlplace.runtime.job.training import check_strategy

    if options.checkpoint is None and (options.resume or options.checkpoint_every):
        raise InputError("run: --resume and --checkpoint-every need --checkpoint DIR")
    plan = PlacementPlan.load(options.plan)
    check_processes(plan, options.plan)
    recipe_of(plan)
    check_strategy(plan, "run")
    return plan


def _train(plan: PlacementPlan | InputError, settings: JobOptions, options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from rlplace.runtime.base import faults
    from rlplace.runtime.base.ranks import end_group, wait_for_all
    from rlplace.runtime.job import job

    try:
        device = job.start_job(settings, options.timeout)
    except MissingError as error:
        faults.tell_torchrun(f"rank {os.environ.get('RANK', '0')}: {error}")
        raise
    with faults.guard(debug=options.debug):
        if isinstance(plan, InputError):
            raise plan
        result = job.train(plan, device, settings, _step_printer(options))
        equal = result.comparison is None or dist.get_rank() != 0 or result.comparison.equal
        if dist.get_rank() == 0:
            _show(result, options)
        wait_for_all()  # torchrun ends the others as soon as one fails
    end_group()
    return 0 if equal else 1


def check_processes(plan: PlacementPlan, path: str) -> None:
    """Refuses a number of processes that is not that of the plan's devices.

    Raises:
        InputError: With the command that starts the right number.
    """
    from rlplace.runtime.base.ranks import devices_of

    needed = len(devices_of(plan))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == needed:
        return
    command = f"torchrun --nproc-per-node {needed} -m rlplace run --plan {shlex.quote(path)}"
    uses = f"run: the plan uses {needed} device{'s' if needed > 1 else ''}"
    if "RANK" not in os.environ:
        raise InputError(f"{uses}, each a process of its own; start it with: {command}")
    raise InputError(f"{uses}, but there are {world} processes; start it with: {command}")


def _step_printer(options: argparse.Namespace) -> Callable[[int, float, float], None]:
    stream = sys.stderr if options.json else sys.stdout

    def on_step(step: int, loss: float, seconds: float) -> None:
        print(f"step {step + 1}  loss {loss:.6f}  {ms(seconds)} ms", file=stream, flush=True)

    return on_step


def _show(result: JobResult, options: argparse.Namespace) -> None:
    if options.json:
        print_json(result.to_dict())
        return
    print()
    rows = [
        [
            str(rank["rank"]),
            rank["host"],
            rank["device"],
            "-" if rank["stage"] is None else str(rank["stage"]),
            ms(rank["median_step_s"]),
            gb(rank["peak_memory_bytes"]),
            gb(rank["predicted_memory_bytes"]),
        ]
        for rank in result.ranks
    ]
    print_table(["rank", "host", "device", "plan's device", "step ms", "peak GB", "predicted GB"], rows)
    print()
    print(f"engine {result.engine}")
    print(f"median step time {ms(result.step_s)} ms, predicted {ms(result.predicted_step_s)} ms")
    if result.comparison is not None:
        for line in result.comparison.lines():
            print(line)
