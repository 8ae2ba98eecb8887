"""Saving a fine-tuned agent: its weights, what it learned from, and where it comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from rlplace.agents.card import versions
from rlplace.agents.checkpoint import Checkpoint, save_checkpoint
from rlplace.agents.network import PlacerNetwork


def weights_sha256(network: PlacerNetwork) -> str:
    """What tells two networks apart."""
    weights = {name: value.detach().cpu().contiguous() for name, value in sorted(network.state_dict().items())}
    return hashlib.sha256(save_tensors(weights)).hexdigest()


def save_tuned(
    folder: str | Path, network: PlacerNetwork, parent: Checkpoint, *, method: str, learned: Mapping[str, Any]
) -> None:
    """Writes a checkpoint folder.

    Args:
        folder: A new agent's.
        network: Fine-tuned.
        parent: What it was fine-tuned from.
        method: How: ``"corrected"`` or ``"direct"``, see `rlplace.agents.tuning.offline`.
        learned: From what: numbers and text for the card.
    """
    before = list(parent.training.get("lineage", []))
    line = {"name": parent.name, "weights_sha256": weights_sha256(parent.network)}
    training = {
        **{key: value for key, value in parent.training.items() if key not in ("lineage", "tuned", "versions")},
        "versions": versions(),
        "lineage": [*before, line],
        "tuned": {"method": method, **learned},
    }
    card = _card(Path(folder).name, parent, training)
    save_checkpoint(folder, network, environment=parent.environment, training=training, card=card)


def _card(name: str, parent: Checkpoint, training: Mapping[str, Any]) -> str:
    tuned = training["tuned"]
    lines = [
        f"# Agent {name}",
        "",
        f"- environment: {parent.environment}",
        f"- fine-tuned from: {' -> '.join(line['name'] for line in training['lineage'])}",
        f"- weights of {parent.name}: sha256 {training['lineage'][-1]['weights_sha256']}",
    ]
    lines += [f"- {key.replace('_', ' ')}: {_text(value)}" for key, value in tuned.items()]
    lines += [
        "- versions: " + ", ".join(f"{key} {value}" for key, value in training["versions"].items()),
        f"- before: problems {training.get('problem_set', 'unknown')}, seed {training.get('seed', 'unknown')}",
        "- license: Apache-2.0",
        "",
    ]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
