"""The card of a checkpoint: its content, its training, how to repeat that, and the origin of a fine-tuned one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import sb3_contrib
import torch

import rlplace


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
