"""`Residual`: what is wrong with the cost model before anything ran here, learned from runs elsewhere.

log(measured / predicted) of a step is a function of the plan, the cluster and the software (`rlplace.measured.plan_graph`).
Every member of an ensemble gives a mean and a spread; their mixture is the answer (Lakshminarayanan et al. 2017), so that
members that differ widen it. What runs is a `rlplace.measured.log.Run`, measured or not: a file of somebody else's runs is
enough to learn from. Those correct the ensemble as a Gaussian process, in closed form.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.errors import InputError, whole_number
from rlplace.files import check_keys, read_bytes, read_json, write_files
from rlplace.measured.log import Run
from rlplace.measured.plan_graph import PlanGraph, ResidualNetwork, stack_rows, together
from rlplace.measured.pool import FEATURES
from rlplace.strategy.costs import Floats

FORMAT, VERSION = "rlplace.residual", 1
WEIGHTS = "residual.safetensors"

_MOST_HIDDEN, _MOST_MEMBERS = 512, 32

ALIKE, OWN = 0.1, 0.05
"""Standard deviations of what runs elsewhere leave unexplained: shared by strategies of like features, and of each."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A trained ensemble.

    Attributes:
        members: Its networks.
        stacks: Names of the software that it knows, K.
        kinds: Kinds of devices of which it has seen measured runs.
        widen: Factor on standard deviations, so that intervals cover what they should on clusters left out.
        most_devices: Of a measured run.
        weight: Part of the mean that is believed, as clusters left out advise.
        elsewhere: Runs of others, on top.
    """

    members: tuple[ResidualNetwork, ...]
    stacks: tuple[str, ...]
    kinds: tuple[str, ...]
    widen: float
    most_devices: int
    weight: float = 1.0
    elsewhere: tuple[Run, ...] = ()

    def of(self, runs: Sequence[Run]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log(measured / predicted), float64 [N] each, of plans that may not have run."""
        mean, spread = self._ensemble(runs)
        if not self.elsewhere:
            return mean, spread
        known, wrong = self.elsewhere, self._wrong
        near = _alike(runs, known)
        inner = _alike(known, known) + (OWN**2) * np.eye(len(known))
        gain = np.linalg.solve(inner, near.T).T
        left: Floats = np.maximum(ALIKE**2 - (gain * near).sum(axis=1), 0.0) / ALIKE**2
        return mean + gain @ wrong, spread * np.sqrt(0.25 + 0.75 * left)

    def told(self, runs: Sequence[Run]) -> Residual:
        """With what others have measured: strategies like theirs, on kinds of devices like theirs, are corrected likewise."""
        done = [run for run in runs if run.median_s is not None]
        for run in done:
            PlanGraph.of(run)
        return dataclasses.replace(self, elsewhere=(*self.elsewhere, *done))

    def strange(self, kinds: Sequence[str]) -> str | None:
        """Why a cluster of these devices is far from all that was measured; None where it is not."""
        known = {*self.kinds, *(kind for run in self.elsewhere for kind in run.kinds)}
        if unknown := [kind for kind in dict.fromkeys(kinds) if kind not in known]:
            return f"no run on {', '.join(unknown)} was ever seen"
        most = max([self.most_devices, *(len(run.kinds) for run in self.elsewhere)])
        return f"no run on more than {most} devices was ever seen" if len(kinds) > most else None

    @cached_property
    def _wrong(self) -> Floats:
        """What the ensemble leaves unexplained of runs elsewhere."""
        took = np.log([float(run.median_s or 0.0) / run.predicted_s for run in self.elsewhere])
        found: Floats = took - self._ensemble(self.elsewhere)[0]
        return found

    def _ensemble(self, runs: Sequence[Run]) -> tuple[Floats, Floats]:
        graph, of_stage = together([PlanGraph.of(run) for run in runs])
        stacks = stack_rows(runs, self.stacks)
        with torch.no_grad():
            found = [member(graph, of_stage, stacks) for member in self.members]
        means = np.array([mean.numpy() for mean, _ in found], dtype=np.float64)
        own = np.exp(np.array([spread.numpy() for _, spread in found], dtype=np.float64))
        return self.weight * means.mean(axis=0), self.widen * np.sqrt((own**2).mean(axis=0) + means.var(axis=0))

    def save(self, folder: str | Path, *, training: dict[str, Any], card: str) -> None:
        """Writes a folder as shipped ones are: weights, config and card."""
        from safetensors.torch import save

        named = {
            f"{number}.{name}": value for number, one in enumerate(self.members) for name, value in one.state_dict().items()
        }
        weights = save({name: value.contiguous() for name, value in named.items()})
        config = {
            "format": FORMAT, "version": VERSION, "members": len(self.members), "hidden": self.members[0].block.out_features,
            "stacks": self.stacks, "kinds": self.kinds, "features": FEATURES, "widen": self.widen,
            "most_devices": self.most_devices, "weight": self.weight, "training": training,
            "weights": hashlib.sha256(weights).hexdigest(),
        }  # fmt: skip
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, allow_nan=False, indent=1) + "\n"
        write_files(Path(folder), {WEIGHTS: weights, "config.json": text.encode(), "card.md": card.encode()})

    @staticmethod
    def load(name: str | Path = "default") -> Residual:
        """Loads the shipped residual, ``"default"``, or a folder.

        Raises:
            InputError: There is no such folder, or it is damaged.
        """
        from importlib.resources import files

        from rlplace.tensors import fill, read_tensors

        folder = Path(str(files("rlplace.checkpoints") / "residual")) if name == "default" else Path(name)
        if not folder.is_dir():
            raise InputError(f"residual: {str(name)[:200]!r} is no folder; name one, or 'default' for the shipped one")
        config = _config(folder / "config.json")
        payload, path = read_bytes(folder / WEIGHTS), folder / WEIGHTS
        if hashlib.sha256(payload).hexdigest() != config["weights"]:
            raise InputError(f"{path}: not the weights that config.json was written with")
        tensors, members = read_tensors(path, payload), []
        for number in range(config["members"]):
            member = ResidualNetwork(len(config["stacks"]), config["hidden"])
            own = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
            fill(member, own, path)
            members.append(member.eval())
        stacks, kinds = tuple(config["stacks"]), tuple(config["kinds"])
        widen, most, weight = (config[key] for key in ("widen", "most_devices", "weight"))
        return Residual(tuple(members), stacks, kinds, widen, most, weight)


def _alike(some: Sequence[Run], others: Sequence[Run]) -> Floats:
    """float64 [N, M], covariance of what is unexplained: of like strategies, on the same kinds of devices."""
    one, other = (np.array([run.features for run in runs]) for runs in (some, others))
    apart = ((one[:, None] - other[None]) ** 2).mean(axis=2)
    same = np.array([[float(set(a.kinds) == set(b.kinds)) for b in others] for a in some])
    found: Floats = ALIKE**2 * (0.3 + 0.7 * same) * np.exp(-apart)
    return found


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path, FORMAT, VERSION)
    names = {"members", "hidden", "stacks", "kinds", "features", "widen", "most_devices", "weight", "weights", "training"}
    check_keys(config, names, (), str(path))
    whole_number(config["members"], f"{path}: members", 1, _MOST_MEMBERS)
    whole_number(config["hidden"], f"{path}: hidden", 1, _MOST_HIDDEN)
    whole_number(config["most_devices"], f"{path}: most_devices", 1, 1 << 20)
    if config["features"] != list(FEATURES):
        raise InputError(f"{path}: trained on other features than this version computes; train it again")
    for key in ("stacks", "kinds"):
        if not isinstance(config[key], list) or len(config[key]) > 1000 or not all(isinstance(n, str) for n in config[key]):
            raise InputError(f"{path}: {key} must be a list of names")
    for key in ("widen", "weight"):
        if not isinstance(config[key], float) or not 0.0 <= config[key] < 100.0:
            raise InputError(f"{path}: {key} must be a number from 0 to 100")
    return config
