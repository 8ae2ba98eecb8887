"""The card of a checkpoint: its content, its training, how to repeat that, and the origin of a fine-tuned one."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sb3_contrib
import torch
from safetensors.torch import save as save_tensors

import rlplace
from rlplace.agents.checkpoint import Checkpoint, save_checkpoint
from rlplace.agents.network import PlacerNetwork


def versions() -> dict[str, str]:
    """Versions of the packages that determine a training."""
    return {
        "rlplace": rlplace.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "sb3-contrib": sb3_contrib.__version__,
        "numpy": np.__version__,
    }


def card_of(name: str, environment: str, training: Mapping[str, Any]) -> str:
    """Markdown text.

    Args:
        name: Name of the checkpoint.
        environment: Id of the environment.
        training: The `training` entry of the checkpoint's config.
    """
    notes, settings = training["notes"], training["hyperparameters"]
    captured = ", ".join(f"{100 * value:.1f} % ({rank})" for rank, value in notes.get("captured_gain", {}).items())
    return _text_of(
        name,
        environment,
        training,
        f"- problems: {training['problem_set']}, seed {training['seed']}",
        f"- pre-training: {training['fitted']} steps on {notes.get('labels', 0):,} priced moves of {settings['cases']} cases",
        f"- gain of the best move that is among the first moves, on cases not fitted: {captured or 'not measured'}",
        f"- PPO: {training['steps_done']} decisions in {training['parts']} parts of {settings['part_cases']} cases",
        f"- seconds: {notes['seconds']:.0f}",
        f"- reproduce: `rlplace train --problems {training['problem_set']} --seed {training['seed']}`, settings in config.json",
    )


def _text_of(name: str, environment: str, training: Mapping[str, Any], *lines: str) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in training["versions"].items())
    head = (f"# Agent {name}", "", f"- environment: {environment}")
    return "\n".join([*head, *lines, f"- versions: {versions}", "- license: Apache-2.0", ""])


def weights_sha256(network: PlacerNetwork) -> str:
    """SHA-256 of a network's weights, by which networks are told apart."""
    weights = {name: value.detach().cpu().contiguous() for name, value in sorted(network.state_dict().items())}
    return hashlib.sha256(save_tensors(weights)).hexdigest()


def save_tuned(folder: str | Path, network: PlacerNetwork, parent: Checkpoint, *, learned: Mapping[str, Any]) -> None:
    """Writes a checkpoint folder.

    Args:
        folder: Folder of the new agent.
        network: The fine-tuned network.
        parent: The checkpoint that it was fine-tuned from.
        learned: Facts of the fine-tuning for the card: numbers and text.
    """
    before = list(parent.training.get("lineage", []))
    line = {"name": parent.name, "weights_sha256": weights_sha256(parent.network)}
    training = {
        **{key: value for key, value in parent.training.items() if key not in ("lineage", "tuned", "versions")},
        "versions": versions(),
        "lineage": [*before, line],
        "tuned": dict(learned),
    }
    ancestors = " -> ".join(each["name"] for each in training["lineage"])
    card = _text_of(
        Path(folder).name,
        parent.environment,
        training,
        f"- fine-tuned from: {ancestors}",
        f"- weights of {parent.name}: sha256 {line['weights_sha256']}",
        *(f"- {key.replace('_', ' ')}: {_text(value)}" for key, value in training["tuned"].items()),
        f"- before: problems {training.get('problem_set', 'unknown')}, seed {training.get('seed', 'unknown')}",
    )
    save_checkpoint(folder, network, environment=parent.environment, training=training, card=card)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
