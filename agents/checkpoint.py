"""Checkpoints: safetensors weights, a JSON config and a card. Loading runs no code of the checkpoint.

A checkpoint is a folder ``policy.safetensors``, ``config.json`` (format ``rlplace.checkpoint`` version 3) and ``card.md``.
A run folder also has ``optimizer.safetensors``, from which training goes on: Adam's moments, and the weights and counts that
belong to them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

import rlplace
from rlplace.agents.config import MAX_HIDDEN
from rlplace.agents.policies import (
    BUILT_IN,
    Policy,
    candidate_columns,
    check_environment,
    columns_of,
    policy_class,
    policy_name,
)
from rlplace.envs.base import ENVIRONMENTS
from rlplace.errors import InputError, show, unknown_name, whole_number
from rlplace.files import check_keys, locked, read_bytes, read_json, write_bytes, write_files
from rlplace.plugins import version_of


def fill(module: torch.nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Loads weights from the file `path` into a module after checking every name, shape and value."""
    check(module.state_dict(), weights, path)
    module.load_state_dict(weights)


def check(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuses weights from the file `path` whose names, shapes, types or values are not those of a module's state."""
    for key in [*expected, *weights]:
        if key not in weights or key not in expected:
            raise InputError(f"{path}: weight {key[:80]!r} is {'missing' if key not in weights else 'not expected'}")
        if weights[key].shape != expected[key].shape:
            shapes = tuple(weights[key].shape), tuple(expected[key].shape)
            raise InputError(f"{path}: weight {key!r} has shape {shapes[0]}, the config asks for {shapes[1]}")
        if weights[key].dtype != expected[key].dtype:
            raise InputError(f"{path}: weight {key!r} is of {weights[key].dtype}, not of {expected[key].dtype}")
        if not torch.isfinite(weights[key]).all():
            raise InputError(f"{path}: weight {key!r} holds values that are not finite")
        if key == "scale" and not (weights[key] > 0).all():
            raise InputError(f"{path}: weight 'scale' holds values that are not positive")


def read_tensors(path: Path, payload: bytes | None = None) -> dict[str, Tensor]:
    """Reads a safetensors file, or its contents where they are read already."""
    payload = read_bytes(path) if payload is None else payload
    try:
        return load_tensors(payload)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise InputError(f"{path}: not a safetensors file: {show(str(error), 200)}") from None


def versions() -> dict[str, str]:
    """Returns versions of the packages that determine a training."""
    packages = {name: version_of(name) for name in ("torch", "gymnasium", "sb3-contrib", "numpy")}
    return {"rlplace": rlplace.__version__, "python": platform.python_version(), **packages}


def card_of(name: str, environment: str, training: Mapping[str, Any]) -> str:
    """Returns a model card in Markdown.

    Args:
        name: Name of the checkpoint.
        environment: Id of the environment that it was trained in.
        training: The `training` entry of the checkpoint's config.
    """
    notes, settings = training["notes"], training["hyperparameters"]
    versions = ", ".join(f"{key} {value}" for key, value in training["versions"].items())
    lines = (
        f"# Agent {name}",
        "",
        f"- environment: {environment}",
        f"- problems: {training['problem_set']}, seed {training['seed']}",
        f"- pre-training: {training['fitted']} steps on {notes.get('files', 0):,} of {settings['cases']} cases",
        f"- on cases not fitted: {notes.get('held', 'not measured')}",
        f"- PPO: {training['steps_done']} decisions in {training['parts']} parts of {settings['part_cases']} cases",
        f"- seconds: {notes['seconds']:.0f}",
        f"- reproduce: `rlplace train --policy {settings['policy']} --problems {training['problem_set']} "
        f"--seed {training['seed']}`, with the settings in config.json",
        f"- versions: {versions}",
        "- license: Apache-2.0",
        "",
    )
    return "\n".join(lines)


FORMAT = "rlplace.checkpoint"
VERSION = 3
STATE = "optimizer.safetensors"
WEIGHTS = "policy.safetensors"
_WEIGHT = "weight."
_REQUIRED = {"environment", "policy", "settings", "features", "training"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        name: Folder name.
        network: The policy in evaluation mode.
        environment: Id of the environment it was trained on, for example ``"rlplace/Refinement-v0"``.
        training: Facts of its training: steps, seed, problems, versions.
    """

    name: str
    network: Policy
    environment: str
    training: Mapping[str, Any]


def save_checkpoint(folder: str | Path, network: Policy, *, training: Mapping[str, Any], card: str) -> None:
    """Writes a checkpoint folder: its files are those of one call even with other writers, and a full disk changes none."""
    folder = Path(folder)
    make_folder(folder)
    weights = save_tensors({name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()})
    config = {
        "format": FORMAT,
        "version": VERSION,
        "environment": network.environment,
        "policy": policy_name(network),
        "settings": network.settings(),
        "features": list(network.features),
        "weights": hashlib.sha256(weights).hexdigest(),
        "training": dict(training),
    }
    text = json.dumps(config, allow_nan=False) + "\n"
    with locked(folder):
        write_files(folder, {WEIGHTS: weights, "config.json": text.encode(), "card.md": card.encode()})


def load_checkpoint(name: str | Path) -> Checkpoint:
    """Loads a shipped checkpoint by name, or a folder by path; a `Path` is a folder even where a shipped one has its name.

    Raises:
        InputError: Unknown name, malformed config, wrong shapes, or weights that are not finite.
    """
    folder = _find(name)
    path, card = folder / WEIGHTS, folder / "card.md"
    if not card.is_file():
        raise InputError(f"{card}: is missing; a checkpoint is a folder of {WEIGHTS}, config.json and card.md")
    with locked(folder, shared=True):  # not while another process is between its files
        config, payload = read_config(folder), read_bytes(path)
    make = maker(config["policy"], config["settings"], config["features"], config["environment"], folder / "config.json")
    network = filled(make, path, payload)
    if config.get("weights", digest := hashlib.sha256(payload).hexdigest()) != digest:
        raise InputError(f"{path}: not the weights that config.json was written with; save or copy the checkpoint again")
    network.eval()
    return Checkpoint(folder.name, network, config["environment"], config["training"])


def maker(name: str, settings: Any, features: Sequence[str], environment: str, where: Path | str) -> Callable[[], Policy]:
    """Returns a function that makes the policy of these settings; nothing is made yet.

    Raises:
        InputError: The policy is unknown or of another environment, or the settings are not plain data by name.
    """
    try:
        kind = policy_class(name)
        check_environment(name, environment)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{where}: settings must be an object, found {show(settings)}")
    if name in BUILT_IN:
        check_keys(settings, {"hidden", "second"}, ("rounds",)[: BUILT_IN.index(name)], f"{where}: settings")
        for key, value in settings.items():
            whole_number(value, f"{where}: settings.{key}", int(key != "rounds"), MAX_HIDDEN)
    columns_of(features, candidate_columns(environment))

    def make() -> Policy:
        try:
            policy = kind(features=tuple(features), **settings)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: policy {name} cannot be made of these settings: {show(str(error), 200)}") from error
        policy.environment = environment
        return policy

    return make


def filled(make: Callable[[], Policy], path: Path, payload: bytes | None = None) -> Policy:
    """Returns a policy with the weights of a file, which are checked before memory is taken for one of its sizes.

    Args:
        make: Makes the policy, see `maker`.
        path: The file of the weights.
        payload: Contents of the file, where they are read already.

    Raises:
        InputError: The file is damaged, or holds weights of a policy of other sizes.
    """
    weights = read_tensors(path, payload)
    with torch.device("meta"):
        check(make().state_dict(), weights, path)
    policy = make()
    policy.load_state_dict(weights)
    return policy


def save_state(path: Path, network: Policy, moments: Mapping[str, Any], progress: tuple[int, int, int]) -> None:
    """Writes the state from which training resumes as one safetensors file: weights, Adam's state, and counts of progress."""
    tensors = {f"{_WEIGHT}{name}": value for name, value in network.state_dict().items()}
    for index, state in moments["state"].items():
        tensors.update({f"{index}.{key}": torch.as_tensor(value) for key, value in state.items()})
    tensors["progress"] = torch.tensor(progress)
    write_bytes(path, save_tensors({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}))


def load_state(path: Path, network: Policy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[int]]:
    """Reads a file of `save_state`: fills the network, returns Adam's state with the settings of `optimizer`, and counts."""
    tensors = read_tensors(path)
    if "progress" not in tensors or tensors["progress"].shape != (3,) or tensors["progress"].dtype != torch.int64:
        raise InputError(f"{path}: does not say how far training is; remove it to go on from the checkpoint beside it")
    progress = tensors.pop("progress").tolist()
    if min(progress) < 0:
        raise InputError(f"{path}: a count of what is done is negative; remove it to go on from the checkpoint beside it")
    fill(network, {n.removeprefix(_WEIGHT): t for n, t in tensors.items() if n.startswith(_WEIGHT)}, path)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(parameters):
        for key, shape in (("step", torch.Size()), ("exp_avg", parameter.shape), ("exp_avg_sq", parameter.shape)):
            value = tensors.pop(f"{index}.{key}", None)
            if value is None:
                break  # of a parameter that was never updated there is nothing
            good = value.shape == shape and value.dtype == torch.float32 and bool(torch.isfinite(value).all())
            if not good or (key != "exp_avg" and bool((value < 0).any())):
                raise InputError(f"{path}: entry '{index}.{key}' is not the state of Adam for that parameter")
            state.setdefault(index, {})[key] = value
    left = [name for name in tensors if not name.startswith(_WEIGHT)]
    if left or any(len(entry) != 3 for entry in state.values()):
        what = f"entry {left[0][:80]!r} is not optimizer state" if left else "a part of the optimizer state is missing"
        raise InputError(f"{path}: {what}; remove it to go on from the checkpoint beside it")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}, progress


def shipped_checkpoints() -> dict[str, str]:
    """Returns one-line descriptions of the checkpoints in this installation, by name."""
    index = files("rlplace.checkpoints") / "index.toml"
    if not index.is_file():
        return {}
    table = tomllib.loads(index.read_text(encoding="utf-8"))
    return {name: str(entry.get("description", "")) for name, entry in table.get("checkpoints", {}).items()}


def make_folder(folder: Path) -> None:
    """Creates an output folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror or error}") from None


def _find(name: str | Path) -> Path:
    shipped = shipped_checkpoints()
    if isinstance(name, Path) and name.is_dir():
        return name
    if str(name) in shipped:
        return Path(str(files("rlplace.checkpoints") / str(name)))
    if Path(name).is_dir():
        return Path(name)
    raise unknown_name("agent", str(name), shipped)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a checkpoint and checks it."""
    path = folder / "config.json"
    config = read_json(path, FORMAT, VERSION)
    if "network" in config:  # version 2
        config.update(policy=BUILT_IN[0], settings=config.pop("network"))
    check_keys(config, _REQUIRED, {"weights"}, str(path))
    if config["environment"] not in ENVIRONMENTS:
        where = ", ".join(ENVIRONMENTS)
        raise InputError(f"{path}: environment {show(config['environment'])} is not in {where}, where agents are trained")
    features = config["features"]
    named = [*map(str, features)] if isinstance(features, list) else []
    if not named or len(set(named)) < len(named) or not set(named) <= set(candidate_columns(config["environment"])):
        raise InputError(f"{path}: trained on other features than this version computes; train it again")
    if not isinstance(config["training"], dict):
        raise InputError(f"{path}: training must be an object")
    return config
