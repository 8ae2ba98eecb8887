"""``rlplace run``: under torchrun, trains a plan's model as the plan says."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.cli.options import CHOSEN, Options, flag, natural, option, positive, print_json, print_records, rate, seconds
from rlplace.errors import InputError, MissingError
from rlplace.text import gb, ms

if TYPE_CHECKING:
    from rlplace.plan.plan import PlacementPlan
    from rlplace.runtime.job.job import JobOptions, JobResult


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of the verb."""

    HELP = "under torchrun: train a plan's model as the plan says"
    EXAMPLE = "example: torchrun --nproc-per-node 4 -m rlplace run --plan gpt2.plan.json --steps 10 --verify"

    plan: str = option("plan that 'rlplace place MODEL' made", None, "P.plan.json", required=True)
    steps: int = option("training steps (10)", positive, "N", default=10)
    verify: bool = flag("compare with the unplaced model; exit code 1 if it differs")
    optimizer: str | None = option("optimizer (that of the plan)", choices=CHOSEN)
    lr: float = option("learning rate (0.001)", rate, "X", default=0.001)
    clip: float | None = option("clip gradients to this global norm", rate, "NORM")
    autocast: str | None = option("mixed precision (what the plan was captured with)", choices=("bf16",))
    seed: int = option("seed of weights, batches and dropout (0)", natural, "N", default=0)
    device: str | None = option("where to run (cuda where there is a GPU)", choices=("cpu", "cuda"))
    backend: str | None = option("of torch.distributed (nccl for GPUs, else gloo)", choices=("gloo", "nccl"))
    cluster: str | None = option("the cluster at hand; must be the one that the plan was made for", None, "C")
    checkpoint: str | None = option("folder for checkpoints, on storage that all hosts share", None, "DIR")
    checkpoint_every: int | None = option("steps between checkpoints (only at the end)", positive, "N")
    resume: bool = flag("continue from the latest checkpoint, if there is one")
    timeout: float = option("how long a rank may stand still while others wait (300)", seconds, "S", default=300.0)

    def run(self) -> int:
        """Runs the verb on this rank."""
        from rlplace.runtime.job import job

        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # closing sockets is no news
        plan: PlacementPlan | InputError
        try:
            plan = _load(self)
        except InputError as error:
            if os.environ.get("RANK", "0") == "0":
                raise
            plan = error  # rank 0 reports what all ranks have: torchrun then ends the others while they wait for it
        settings = job.JobOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(job.JobOptions)})
        return _train(plan, settings, self)


def _load(options: RunOptions) -> PlacementPlan:
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.runtime.job.distribute import check_strategy

    if options.checkpoint is None and (options.resume or options.checkpoint_every):
        raise InputError("run: --resume and --checkpoint-every need --checkpoint DIR")
    plan = PlacementPlan.load(options.plan)
    check_processes(plan, options.plan)
    _ = Planned(plan).recipe  # refuses a plan that names no model
    check_strategy(plan, "run")
    return plan


def _train(plan: PlacementPlan | InputError, settings: JobOptions, options: RunOptions) -> int:
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


def _step_printer(options: RunOptions) -> Callable[[int, float, float], None]:
    stream = sys.stderr if options.json else sys.stdout

    def on_step(step: int, loss: float, seconds: float) -> None:
        print(f"step {step + 1}  loss {loss:.6f}  {ms(seconds)} ms", file=stream, flush=True)

    return on_step


def _show(result: JobResult, options: RunOptions) -> None:
    if options.json:
        print_json(result.to_dict())
        return
    print()
    cells: dict[str, Callable[[Any], str]] = {
        "rank": lambda rank: str(rank["rank"]),
        "host": lambda rank: rank["host"],
        "device": lambda rank: rank["device"],
        "plan's device": lambda rank: "-" if rank["stage"] is None else str(rank["stage"]),
        "step ms": lambda rank: ms(rank["median_step_s"]),
        "peak GB": lambda rank: gb(rank["peak_memory_bytes"]),
        "predicted GB": lambda rank: gb(rank["predicted_memory_bytes"]),
    }
    print_records(result.ranks, cells)
    print()
    print(f"engine {result.engine}")
    print(f"median step time {ms(result.step_s)} ms, predicted {ms(result.predicted_step_s)} ms")
    if result.comparison is not None:
        for line in result.comparison.lines():
            print(line)
