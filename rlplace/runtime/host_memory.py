"""How the C library keeps freed memory, and what it costs when it does not.

glibc hands the top of its heap back to the system when more than a threshold is free there, and takes large blocks from the
system each time. Both are paid for page by page, when the memory is touched again. The thresholds move with the blocks that a
program frees, so the same training step may take either way, depending on the history of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1 << 28


def keep_freed_memory() -> str:
    """Tells glibc to keep what is freed, for the rest of the process.

    Returns:
        "keep", or "default" where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return "default"
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return "default"
    done = [mallopt(_M_TRIM_THRESHOLD, -1), mallopt(_M_TOP_PAD, _TOP_PAD_BYTES), mallopt(_M_MMAP_MAX, 0)]
    return "keep" if all(done) else "default"


def page_faults() -> int:
    """Pages that the process had to be given so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


class StepMemory:
    """Measures one step between `begin` and `end`.

    A GPU counts what it allocates. On a processor the peak is the size of the tensors that are there between steps, plus what
    the resident memory of the process grows by during the step; code and libraries do not count.

    Attributes:
        peak_bytes: Peak of the measured step; None before it, or where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes: int | None = None
        self._device = device
        self._rest_bytes = self._held_bytes = 0

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        """Starts to measure.

        Args:
            held: What stays from step to step: parameters, gradients, buffers, optimizer state.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._held_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
        if sys.platform.startswith("linux"):
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what is taken
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                self._rest_bytes = _status_bytes("VmRSS")

    def end(self) -> None:
        """Notes the peak since `begin`."""
        if self._device.type == "cuda":
            self.peak_bytes = int(torch.cuda.max_memory_allocated(self._device))
        elif self._rest_bytes:
            self.peak_bytes = self._held_bytes + max(_status_bytes("VmHWM") - self._rest_bytes, 0)


def held_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The tensors of a module and its optimizer that stay from step to step."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)
