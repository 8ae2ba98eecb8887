"""How the C library keeps freed memory, what it costs when it does not, and the peak of a step.

glibc hands the top of its heap back to the system when more than a threshold is free there, and takes large blocks from the
system each time. Both are paid for page by page, when the memory is touched again. The thresholds move with the blocks that a
program frees, so the same training step may take either way, depending on the history of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return "default"
    done = [mallopt(_M_TRIM_THRESHOLD, -1), mallopt(_M_TOP_PAD, _TOP_PAD_BYTES), mallopt(_M_MMAP_MAX, 0)]
    return "keep" if all(done) else "default"


class PeakMemory:
    """The peak of a device's memory since this was made.

    A GPU counts what it allocates. On a processor the peak is the size of the tensors that are there between steps, plus what
    the resident memory of the process has grown by since; code and libraries do not count.
    """

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor] | None = None) -> None:
        """Starts to measure.

        Args:
            device: A GPU, or a processor.
            held: What stays from step to step: parameters, gradients, buffers, optimizer state. None: do not measure a
                processor.
        """
        self._device = device
        self._rest_bytes = self._held_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif held is not None:
            self._held_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
            with contextlib.suppress(OSError, AttributeError, TypeError):  # only Linux tells
                ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what is taken
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                self._rest_bytes = _status_bytes("VmRSS")

    def read_bytes(self) -> int | None:
        """The peak so far; None where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._held_bytes + max(_status_bytes("VmHWM") - self._rest_bytes, 0) if self._rest_bytes else None


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
