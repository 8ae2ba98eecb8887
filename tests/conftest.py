"""Shared test setup: one torch thread, no network, no test that fails because the machine was slow; `toys` is importable."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parent))

# Time is judged in benchmarks/ alone, and inputs may take long to make while another process compiles.
# CI draws the same inputs each time.
settings.register_profile(
    "rlplace",
    parent=settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rlplace")


@pytest.fixture(scope="session")
def training_problem():
    """Draws small training problems on which ties are the rule."""
    import drawn

    return drawn.training_problem
