"""Checkpoints: safetensors weights, a JSON config and a card. Loading runs no code of the checkpoint.

A checkpoint is a folder ``policy.safetensors``, ``config.json`` (format ``rlplace.checkpoint`` version 2) and ``card.md``.
A run folder also has ``optimizer.safetensors`` with Adam's moments, so that training can go on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from rlplace.agents.config import ENVIRONMENTS, features_of
from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_keys, read_bytes, read_json, write_bytes, write_json, write_text

FORMAT = "rlplace.checkpoint"
VERSION = 2
_REQUIRED = {"environment", "network", "features", "training"}
_MAX_HIDDEN, _MAX_LAYERS = 4096, 64


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        name: Folder name.
        network: The network in evaluation mode.
        environment: Id of the environment it was trained on, for example ``"rlplace/Refinement-v0"``.
        training: How it was trained: steps, seed, problems, versions.
    """

    name: str
    network: PlacerNetwork
    environment: str
    training: Mapping[str, Any]


def save_checkpoint(
    folder: str | Path, network: PlacerNetwork, *, environment: str, training: Mapping[str, Any], card: str
) -> None:
    """Writes a checkpoint folder; each file is replaced atomically."""
    folder = Path(folder)
    make_folder(folder)
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    write_bytes(folder / "policy.safetensors", save_tensors(weights))
    config = {
        "format": FORMAT,
        "version": VERSION,
        "environment": environment,
        "network": network.config.to_dict(),
        "features": list(network.features),
        "training": dict(training),
    }
    write_json(folder / "config.json", config)
    write_text(folder / "card.md", card)


def load_checkpoint(name: str | Path) -> Checkpoint:
    """Loads a shipped checkpoint by name, or a folder by path.

    Raises:
        InputError: Unknown name, malformed config, wrong shapes, or weights that are not finite.
    """
    folder = _find(name)
    config = _read_config(folder)
    network = PlacerNetwork(_network_config(config, folder), features=config["features"])
    load_weights(network, folder / "policy.safetensors")
    network.eval()
    return Checkpoint(folder.name, network, config["environment"], config["training"])


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Loads safetensors into a module after checking every name, shape and value."""
    weights = read_tensors(path)
    expected = module.state_dict()
    for key in [*expected, *weights]:
        if key not in weights or key not in expected:
            raise InputError(f"{path}: weight {key[:80]!r} is {'missing' if key not in weights else 'not expected'}")
        if weights[key].shape != expected[key].shape or weights[key].dtype != expected[key].dtype:
            shapes = tuple(weights[key].shape), tuple(expected[key].shape)
            raise InputError(f"{path}: weight {key!r} has shape {shapes[0]}, the config asks for {shapes[1]}")
        if not torch.isfinite(weights[key]).all():
            raise InputError(f"{path}: weight {key!r} holds values that are not finite")
    module.load_state_dict(weights)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file."""
    payload = read_bytes(path)
    try:
        return load_tensors(payload)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise InputError(f"{path}: not a safetensors file: {error}") from None


def save_optimizer(path: Path, state_dict: Mapping[str, Any]) -> None:
    """Writes Adam's state as safetensors."""
    tensors: dict[str, Tensor] = {}
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            tensors[f"{index}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    write_bytes(path, save_tensors(tensors))


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Adam's state written by `save_optimizer`, with the parameter groups of `optimizer`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in read_tensors(path).items():
        index, _, key = name.partition(".")
        if not index.isdigit() or not key:
            raise InputError(f"{path}: entry {name[:80]!r} is not optimizer state")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    return {"state": state, "param_groups": groups}


def shipped_checkpoints() -> dict[str, str]:
    """Name to one-line description of the checkpoints in this installation."""
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
    if str(name) in shipped:
        return Path(str(files("rlplace.checkpoints") / str(name)))
    if Path(name).is_dir():
        return Path(name)
    raise unknown_name("agent", str(name), shipped)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_json(path, FORMAT, VERSION)
    check_keys(config, _REQUIRED, {"progress"}, str(path))
    names = {identifier: name for name, identifier in ENVIRONMENTS.items()}
    if not isinstance(config["environment"], str) or config["environment"] not in names:
        raise InputError(f"{path}: environment {show(config['environment'])} is not one of this version")
    if config["features"] != list(features_of(names[config["environment"]])):
        raise InputError(f"{path}: trained on other features than this version computes; train it again")
    if not isinstance(config["training"], dict):
        raise InputError(f"{path}: training must be an object")
    return config


def _network_config(config: Mapping[str, Any], folder: Path) -> NetworkConfig:
    where = f"{folder / 'config.json'}: network"
    check_keys(config["network"], {"hidden", "second", "layers"}, set(), where)
    limits = {"hidden": (1, _MAX_HIDDEN), "second": (1, _MAX_HIDDEN), "layers": (0, _MAX_LAYERS)}
    for name, (least, most) in limits.items():
        value = config["network"][name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(f"{where}.{name}: {show(value)} is outside {least}..{most}")
    return NetworkConfig(**config["network"])
