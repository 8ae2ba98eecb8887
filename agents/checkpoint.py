"""Checkpoints: safetensors weights, a JSON config and a card. Loading runs no code of the checkpoint.

A checkpoint is a folder ``policy.safetensors``, ``config.json`` (format ``rlplace.checkpoint`` version 2) and ``card.md``.
A run folder also has ``optimizer.safetensors``, from which training goes on: Adam's moments, and the weights and counts that
belong to them.
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
STATE = "optimizer.safetensors"
_WEIGHT = "weight."
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
    """Loads a shipped checkpoint by name, or a folder by path; a `Path` is a folder even where a shipped one has its name.

    Raises:
        InputError: Unknown name, malformed config, wrong shapes, or weights that are not finite.
    """
    folder = _find(name)
    config = read_config(folder)
    network = PlacerNetwork(_network_config(config, folder), features=config["features"])
    load_weights(network, folder / "policy.safetensors")
    network.eval()
    return Checkpoint(folder.name, network, config["environment"], config["training"])


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Loads safetensors into a module after checking every name, shape and value."""
    fill(module, read_tensors(path), path)


def fill(module: torch.nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Loads weights from the file `path` into a module after checking every name, shape and value."""
    expected = module.state_dict()
    for key in [*expected, *weights]:
        if key not in weights or key not in expected:
            raise InputError(f"{path}: weight {key[:80]!r} is {'missing' if key not in weights else 'not expected'}")
        if weights[key].shape != expected[key].shape or weights[key].dtype != expected[key].dtype:
            shapes = tuple(weights[key].shape), tuple(expected[key].shape)
            raise InputError(f"{path}: weight {key!r} has shape {shapes[0]}, the config asks for {shapes[1]}")
        if not torch.isfinite(weights[key]).all():
            raise InputError(f"{path}: weight {key!r} holds values that are not finite")
        if key == "scale" and not (weights[key] > 0).all():
            raise InputError(f"{path}: weight 'scale' holds values that are not positive")
    module.load_state_dict(weights)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file."""
    payload = read_bytes(path)
    try:
        return load_tensors(payload)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise InputError(f"{path}: not a safetensors file: {error}") from None


def save_state(path: Path, network: PlacerNetwork, moments: Mapping[str, Any], progress: tuple[int, int, int]) -> None:
    """Writes what training goes on from as one safetensors file: weights, Adam's state, and counts that say how far it is."""
    tensors = {f"{_WEIGHT}{name}": value for name, value in network.state_dict().items()}
    for index, state in moments["state"].items():
        tensors.update({f"{index}.{key}": torch.as_tensor(value) for key, value in state.items()})
    tensors["progress"] = torch.tensor(progress)
    write_bytes(path, save_tensors({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}))


def load_state(path: Path, network: PlacerNetwork, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[int]]:
    """Reads what `save_state` wrote: fills the network, returns Adam's state with the settings of `optimizer`, and counts."""
    tensors = read_tensors(path)
    if "progress" not in tensors or tensors["progress"].shape != (3,):
        raise InputError(f"{path}: does not say how far training is; remove it to go on from the checkpoint beside it")
    progress = tensors.pop("progress").tolist()
    fill(network, {n.removeprefix(_WEIGHT): t for n, t in tensors.items() if n.startswith(_WEIGHT)}, path)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(_WEIGHT):
            continue
        index, _, key = name.partition(".")
        if not index.isdigit() or not key:
            raise InputError(f"{path}: entry {name[:80]!r} is not optimizer state")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}, progress


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
    if isinstance(name, Path) and name.is_dir():
        return name
    if str(name) in shipped:
        return Path(str(files("rlplace.checkpoints") / str(name)))
    if Path(name).is_dir():
        return Path(name)
    raise unknown_name("agent", str(name), shipped)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint, checked."""
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
