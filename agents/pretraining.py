"""Pre-training before PPO: data sets in one file a case, collected by several processes, and the fit to them.

No file is made twice, and the batch of a step follows from the seed and the number of the step, so that a run can stop anywhere
and resume exactly.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from rlplace.agents import behaviour_cloning, move_ranking
from rlplace.agents.checkpoint import make_folder
from rlplace.agents.policies import Policy
from rlplace.agents.problems.sources import CaseSource
from rlplace.cluster.machines import usable_cores
from rlplace.envs.base import PLACEMENT, REFINEMENT
from rlplace.errors import InputError, show
from rlplace.files import fingerprint, read_json, write_json

FORMAT, VERSION = "rlplace.labels", 1

_RATE = 2e-3

Collect = Callable[..., Any]
"""Called with a case and the settings ``states``, ``moves``, ``seed``; its result is saved, unless it is None."""


class Pretraining(NamedTuple):
    """The data set and the loss of the policies of an environment.

    Attributes:
        collect: Makes the contents of the file of a case.
        begin: Called once before the fit.
        loss: Of a batch that it draws from some files.
        summary: A line about held-out files.
    """

    collect: Collect
    begin: Callable[[Policy, Sequence[Path]], None]
    loss: Callable[[Policy, Sequence[Path], Generator], Tensor]
    summary: Callable[[Policy, Sequence[Path]], str]


PRETRAINING: Mapping[str, Pretraining] = {
    REFINEMENT: Pretraining(
        move_ranking.collect_moves, move_ranking.set_standard, move_ranking.batch_loss, move_ranking.summary
    ),
    PLACEMENT: Pretraining(
        behaviour_cloning.collect_demonstration, lambda *_: None, behaviour_cloning.cloning_loss, behaviour_cloning.summary
    ),
}  # fmt: skip
"""By environment; policies of others have none."""


def collect_dataset(
    source: CaseSource,
    folder: Path,
    *,
    cases: int,
    states: int,
    moves: int,
    seed: int,
    processes: int,
    report: Callable[[str], None],
    collect: Collect,
) -> list[Path]:
    """Collects the data set of the first `cases` cases of a source; a source with fewer repeats them with other seeds.

    Args:
        source: Source of the cases.
        folder: Folder of the files; existing ones stay.
        cases: Files to make; cases without data leave gaps.
        states: Number of plans of a case.
        moves: Number of moves priced from each plan.
        seed: Seed of the plans and moves; the n-th file has the seed `seed` + n.
        processes: Number of processes; 0: one a core.
        report: Called with lines about the progress.
        collect: Makes the contents of a file.

    Returns:
        The files, by number.

    Raises:
        InputError: The folder holds data of other cases, or of the same cases with other settings.
    """
    check_dataset(source, folder, states=states, moves=moves, seed=seed)
    wanted = [
        number for number in range(cases) if not any(_file(folder, number, end).exists() for end in ("safetensors", "none"))
    ]
    processes = min(processes or usable_cores(), max(1, len(wanted)))
    begin_s = time.monotonic()
    if wanted:
        report(f"making labels of {len(wanted)} cases with {processes} processes")
    options = {"states": states, "moves": moves, "seed": seed}

    def tell(count: int) -> None:
        if count % 20 == 0 or count == len(wanted):
            seconds = time.monotonic() - begin_s
            pace, left_s = count * states * moves / seconds, (len(wanted) - count) * seconds / count
            report(f"{count}/{len(wanted)} cases, about {pace:,.0f} labels a second, {left_s:.0f} s left")

    if processes == 1:
        for count, number in enumerate(wanted, 1):
            _write(source, collect, folder, number, **options)
            tell(count)
    else:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(source, collect)) as pool:
            futures = [pool.submit(_write_given, folder, number, options) for number in wanted]
            try:
                for count, future in enumerate(as_completed(futures), 1):
                    future.result()
                    tell(count)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [path for path in (_file(folder, number) for number in range(cases)) if path.exists()]


def check_dataset(source: CaseSource, folder: Path, *, states: int, moves: int, seed: int) -> None:
    """Records in the folder which cases its data are of, or refuses a folder of others; arguments as in `collect_dataset`."""
    if source.count == 0:
        raise InputError("no problem to train on")
    facts = [source.case(number).problem.fingerprint for number in range(source.count or 1)]
    origin = {"problems": source.name, "cases": fingerprint({"cases": facts}), "states": states, "moves": moves, "seed": seed}
    path = folder / "origin.json"
    if not path.exists():
        make_folder(folder)
        write_json(path, {"format": FORMAT, "version": VERSION, **origin})
        return
    noted = read_json(path, FORMAT, VERSION)
    for key, value in origin.items():
        if noted.get(key) != value:
            raise InputError(
                f"{folder}: holds labels of another training: {key} {show(noted.get(key))}, now {show(value)}; remove that "
                "folder, or choose another --out"
            )


_given: tuple[CaseSource, Collect]  # of a process of the pool


def _begin(source: CaseSource, collect: Collect) -> None:
    global _given
    torch.set_num_threads(1)
    _given = source, collect


def _write_given(folder: Path, number: int, options: dict[str, Any]) -> None:
    _write(*_given, folder, number, **options)


def _write(source: CaseSource, collect: Collect, folder: Path, number: int, *, seed: int, **sizes: int) -> None:
    """Collects and saves the file of a case."""
    case = source.case(number if source.count is None else number % source.count)
    data = collect(case, seed=seed + number, **sizes)
    if data is None:
        _file(folder, number, "none").touch()
    else:
        data.save(_file(folder, number))


def _file(folder: Path, number: int, ending: str = "safetensors") -> Path:
    """Returns the file of a case; an empty one with the ending ``none`` marks a case without data."""
    return folder / f"{number:05d}.{ending}"


def fit(
    network: Policy,
    optimizer: torch.optim.Optimizer,
    files: Sequence[Path],
    pretraining: Pretraining,
    *,
    first: int,
    last: int,
    steps: int,
    seed: int,
) -> float:
    """Makes the steps from `first` up to `last` of `steps` in all; returns the mean loss.

    Args:
        network: The policy, changed in place.
        optimizer: Optimizer of its parameters; the number of the step sets its learning rate.
        files: Files of the data set.
        pretraining: The loss on them.
        first: Number of the first step to make.
        last: Number after the last one.
        steps: Steps of the whole fit; the learning rate falls linearly to zero at the last one.
        seed: Seed of the batches.
    """
    network.train()
    total = 0.0
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1.0 - step / steps) + 1e-5
        loss = pretraining.loss(network, files, np.random.default_rng([seed, step]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    network.eval()
    return total / max(last - first, 1)
