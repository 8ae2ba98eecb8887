"""Training of a policy: pre-training on a data set, then stock `MaskablePPO`.

A run folder is a checkpoint (`rlplace.agents.checkpoint`) with ``optimizer.safetensors``, ``labels/`` and TensorBoard logs,
rewritten after every part. A run that is cut anywhere and resumed gives the weights that it would have given: what a part does
follows from the weights and moments before it, the seed and its number.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from rlplace.agents import ppo
from rlplace.agents.checkpoint import (
    STATE,
    WEIGHTS,
    card_of,
    filled,
    load_state,
    make_folder,
    maker,
    read_config,
    save_checkpoint,
    save_state,
    versions,
)
from rlplace.agents.config import TrainConfig
from rlplace.agents.policies import candidate_columns
from rlplace.agents.pretraining import PRETRAINING, check_dataset, collect_dataset, fit
from rlplace.agents.problems.sources import CaseSource
from rlplace.errors import InputError
from rlplace.files import finite_number

_FIT_PART = 500  # steps of pre-training between saves
_PPO_CASES = 1_000_000  # the stream's cases from here on are PPO's
_LAST_RATE = 0.1  # share of PPO's learning rate, which falls linearly, below which it does not fall
_HELD = 16  # files of the data set that are not fitted, to show progress on


def train(
    source: CaseSource,
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    progress_bar: bool = False,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> int:
    """Trains and writes a run folder.

    Args:
        source: Source of the problems to train on.
        config: Hyperparameters.
        out: Run folder.
        resume: Continue the run in `out`.
        progress_bar: Show a progress bar of PPO on stderr.
        report: Called with lines about the progress.

    Returns:
        PPO decisions done in all.

    Raises:
        InputError: No problem is usable, the run folder holds data of other problems, or the environment has no pre-training.
        KeyboardInterrupt: After a line that tells how to resume.
    """
    torch.set_num_threads(1)
    run = TrainingRun(source, config, Path(out), resume, progress_bar, report)
    try:
        if not resume:
            run.begin()
        run.pretrain()
        run.practise()
    except KeyboardInterrupt:
        report(f"interrupted; {run.out} holds everything up to the last part, --resume goes on from there")
        raise
    return run.decisions


class TrainingRun:
    """One training and its progress."""

    def __init__(
        self,
        source: CaseSource,
        config: TrainConfig,
        out: Path,
        resume: bool,
        progress_bar: bool,
        report: Callable[[str], None],
    ) -> None:
        make_folder(out)
        self.source, self.config, self.out = source, config, out
        self.report, self._progress_bar = report, progress_bar
        self._begin_s = time.monotonic()
        torch.manual_seed(config.seed)
        if config.fit_steps and config.environment not in PRETRAINING:
            raise InputError(f"there is no pre-training in {config.environment}; use --fit-steps 0")
        features = config.features or candidate_columns(config.environment)
        make = maker(config.policy, config.settings_of(), features, config.environment, out)
        self.network = filled(make, out / WEIGHTS) if resume else make()
        self.fitted = self.decisions = self.parts = 0
        self.notes: dict[str, Any] = {"seconds": 0.0}
        self._moments: dict[str, Any] | None = None
        if resume:
            self._resume()
        self._before_s = float(self.notes["seconds"])

    def begin(self) -> None:
        """Saves the state from which a run resumes that is interrupted before its first part is done."""
        if self.config.fit_steps:
            check_dataset(self.source, self.out / "labels", **self._dataset())
        (self.out / STATE).unlink(missing_ok=True)  # of an earlier run
        self.save(None)

    def pretrain(self) -> None:
        """Collects the data set and fits to it; does nothing where that is done already."""
        config = self.config
        if config.fit_steps <= self.fitted:
            return
        pretraining = PRETRAINING[config.environment]
        files = collect_dataset(
            self.source,
            self.out / "labels",
            cases=config.cases,
            processes=config.processes,
            report=self.report,
            collect=pretraining.collect,
            **self._dataset(),
        )
        if not files:
            raise InputError("no labels: no case has two devices and a plan that can run")
        held, fitted = files[: min(_HELD, len(files) // 8)], files[min(_HELD, len(files) // 8) :]
        if self.fitted == 0:
            pretraining.begin(self.network, fitted)
        optimizer = torch.optim.Adam(self.network.parameters())
        if self._moments is not None:
            optimizer.load_state_dict(self._moments)
        self.notes["files"] = len(files)
        self.report(f"fitting to {len(files)} files of labels")

        while self.fitted < config.fit_steps:
            done = min(config.fit_steps, self.fitted + _FIT_PART)
            steps = {"first": self.fitted, "last": done, "steps": config.fit_steps, "seed": config.seed}
            loss = fit(self.network, optimizer, fitted, pretraining, **steps)
            self.fitted = done
            self.notes["held"] = pretraining.summary(self.network, held) if held else "not measured"
            self.save(optimizer.state_dict() if done < config.fit_steps else None)
            self.report(f"{done}/{config.fit_steps} steps, loss {loss:.3f}; on cases not fitted: {self.notes['held']}")

        self._moments = None

    def _dataset(self) -> dict[str, int]:
        """Returns the settings that determine the data set of a case."""
        return {"states": self.config.states, "moves": self.config.moves, "seed": self.config.seed * 1_000_000}

    def practise(self) -> None:
        """Runs PPO; does nothing where that is done already."""
        config = self.config
        bar = tqdm(total=config.steps, initial=self.decisions, unit="step", file=sys.stderr, disable=not self._progress_bar)
        while self.decisions < config.steps:
            begin_s = time.monotonic()
            first = _PPO_CASES + self.parts * config.part_cases if self.source.count is None else self.parts * config.part_cases
            instances = ppo.instances_of(self.source, first, config.part_cases, config.environment)
            ready_s = time.monotonic()
            rate = config.learning_rate * max(_LAST_RATE, 1.0 - self.decisions / config.steps)
            part = ppo.run_part(
                self.network,
                self._moments,
                instances,
                msgspec.structs.replace(config, learning_rate=rate),
                number=self.parts,
                decisions=min(config.part, config.steps - self.decisions),
                logs=self.out / "tensorboard" / f"part{self.parts}",
                tick=bar.update,
            )
            self._moments = part.moments
            self.decisions += part.decisions
            self.parts += 1
            self.notes["episodes_vs_best"] = None if math.isnan(part.ratio) else round(part.ratio, 5)
            self.save(part.moments)
            speed = part.decisions / max(time.monotonic() - ready_s, 1e-9)
            self.report(
                f"{self.decisions}/{config.steps} decisions, {speed:.0f} a second after {ready_s - begin_s:.0f} s for the "
                f"floors; step time {part.ratio:.4f} of the {ppo.BASELINES[config.environment]} at the end of episodes"
            )
        bar.close()

    def save(self, moments: dict[str, Any] | None) -> None:
        """Writes the checkpoint, and before it the state from which the run resumes, in one file."""
        self.notes["seconds"] = round(self._before_s + time.monotonic() - self._begin_s, 1)
        config = msgspec.structs.replace(self.config, device="auto")
        training = {
            "steps_done": self.decisions,
            "fitted": self.fitted,
            "parts": self.parts,
            "seed": config.seed,
            "problem_set": self.source.name,
            "hyperparameters": msgspec.structs.asdict(config),
            "notes": self.notes,
            "versions": versions(),
        }
        card = card_of(self.out.name, self.network.environment, training)
        if moments is not None:
            save_state(self.out / STATE, self.network, moments, (self.fitted, self.decisions, self.parts))
        save_checkpoint(self.out, self.network, training=training, card=card)
        if moments is None:
            (self.out / STATE).unlink(missing_ok=True)

    def _resume(self) -> None:
        training = read_config(self.out)["training"]
        progress = [training.get(key) for key in ("fitted", "steps_done", "parts")]
        notes, where = training.get("notes"), self.out / "config.json"
        if not all(type(count) is int and 0 <= count < 1 << 53 for count in progress) or not isinstance(notes, dict):
            raise InputError(f"{where}: training does not say how far it is; it cannot be resumed")
        self.notes.update(notes)
        finite_number(self.notes["seconds"], f"{where}: training.notes.seconds")
        if (self.out / STATE).exists():
            # Whole in itself, even where the run was cut between it and the checkpoint.
            optimizer = torch.optim.Adam(self.network.parameters())
            self._moments, progress = load_state(self.out / STATE, self.network, optimizer)
        self.fitted, self.decisions, self.parts = progress
