"""Shared test setup: one torch thread, no network, no test that fails because the machine was slow."""

import os
import tempfile

if "RLPLACE_CACHE" not in os.environ:  # one for all workers and what they start, which inherit it
    KEPT = tempfile.TemporaryDirectory(prefix="rlplace-kept-")
    os.environ["RLPLACE_CACHE"] = KEPT.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Time is judged in benchmarks/ alone, and inputs may take long to make while another process compiles.
# CI draws the same inputs each time.
settings.register_profile(
    "rlplace",
    parent=settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rlplace")
