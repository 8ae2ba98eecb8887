"""Conditions of a device under which times are taken: its name, clocks, power cap, speed at a fixed product, and memory.

glibc hands the top of its heap back to the system when more than a threshold is free there, and takes large blocks from the
system each time. Both are paid for page by page, when the memory is touched again. The thresholds move with the blocks that a
program frees, so the same training step may take either way, depending on the history of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from rlplace.cost.timings import Environment
from rlplace.errors import InputError, MissingError, show
from rlplace.model.torch_adapter import pytree

_CONTROL_WARMUP, _CONTROL_REPEATS = 5, 15
_FIELDS = ("clocks.sm", "power.limit", "temperature.gpu")


def own_device(named: str | torch.device | None, verb: str) -> torch.device:
    """Returns the device that this process computes on, and makes it torch's current one.

    Args:
        named: cpu, cuda or cuda:N; default the processor, or the GPU of the local rank where there are GPUs.
        verb: For messages.

    Raises:
        InputError: Not a device that models run on.
        MissingError: This process has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(named if named is not None else "cuda" if count else "cpu")
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"{verb}: device {show(str(named))}: expected cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= count:
        raise MissingError(
            f"{verb}: process {index} of {platform.node()} has no GPU of its own, {count} CUDA devices are here; start one "
            "process per GPU, or run on the cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def read_clock(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns seconds by a clock once a device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def time_run(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of a run by a clock, with the device synchronized before and after."""
    begin = read_clock(device, clock)
    run()
    return read_clock(device, clock) - begin


def own_clock(device: torch.device) -> Callable[[], float]:
    """Returns the thread's processor time, which other programs do not lengthen, where one thread works; else wall time."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def read_environment(device: torch.device) -> Environment:
    """Describes a device as it is now; its kind is that of `rlplace.Cluster.detect()`."""
    from rlplace.cluster.machines import detect

    readings, details = nvidia_readings(device), dict[str, str | float | int]()
    if device.type == "cuda":
        found, matmul, cudnn = torch.cuda.get_device_properties(device), torch.backends.cuda.matmul, torch.backends.cudnn
        details |= {"cuda": str(torch.version.cuda), "multiprocessors": int(found.multi_processor_count)}
        details |= {"matmul_tf32": str(matmul.allow_tf32), "cudnn_tf32": str(cudnn.allow_tf32)}
        name = str(found.name)
    else:
        details |= {"capability": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count() or 1}
        details["load_average"] = round(os.getloadavg()[0], 2)
        name = next(iter(_processor_values("model name")), "processor")
    return Environment(
        device=name,
        device_kind=detect().kinds[device.index or 0].name,
        device_type=device.type,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        clock_mhz=clock_mhz(device),
        power_limit_w=readings.get("power.limit"),
        temperature_c=readings.get("temperature.gpu"),
        details=details,
    )


def clock_mhz(device: torch.device) -> float | None:
    """Returns the present clock, the mean over the cores of a processor; None where the system does not report it."""
    if device.type == "cuda":
        return nvidia_readings(device).get("clocks.sm")
    values = [float(value) for value in _processor_values("cpu MHz")]
    return round(statistics.mean(values), 1) if values else None


def nvidia_readings(device: torch.device) -> dict[str, float]:
    """Reads clock (MHz), power cap (W) and temperature (C) by nvidia-smi's names, as far as the driver reports them."""
    if device.type != "cuda":
        return {}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    readings: dict[str, float] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        for name, text in zip(_FIELDS, line.split(","), strict=False):
            with contextlib.suppress(ValueError):
                readings[name] = float(text)
    return readings


def time_control(device: torch.device) -> tuple[str, float]:
    """Times a square float32 matrix product of fixed size; in processor time where one thread does all the work.

    Returns:
        Name of the product, and the median seconds.
    """
    size, clock = 4096 if device.type == "cuda" else 512, own_clock(device)
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    seconds = [time_run(lambda: torch.mm(left, right), device, clock) for _ in range(_CONTROL_WARMUP + _CONTROL_REPEATS)]
    return f"mm float32 {size}x{size}x{size}", statistics.median(seconds[_CONTROL_WARMUP:])


def _processor_values(key: str) -> list[str]:
    """Reads a value of every core from Linux."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]
    return []


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1 << 28


def keep_freed_memory() -> str:
    """Makes glibc keep freed memory for the rest of the process.

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

    A GPU counts its allocations. On a processor the peak is the size of the tensors that exist between steps, plus the growth
    of the process's resident memory since; code and libraries do not count.

    Args:
        device: A GPU, or a processor.
        held: Tensors that stay from step to step: parameters, gradients, buffers, optimizer state. None: do not measure a
            processor.
    """

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor] | None = None) -> None:
        self._device = device
        self._rest_bytes = self._held_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif held is not None:
            self._held_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
            with contextlib.suppress(OSError, AttributeError, TypeError):  # only Linux has these
                ctypes.CDLL(None).malloc_trim(0)  # freed memory would hide new allocations
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                self._rest_bytes = _status_bytes("VmRSS")

    def read_bytes(self) -> int | None:
        """Returns the peak so far; None where the system does not report it."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._held_bytes + max(_status_bytes("VmHWM") - self._rest_bytes, 0) if self._rest_bytes else None


def held_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Returns the tensors of a module and its optimizer that stay from step to step."""
    states = [] if optimizer is None else list(optimizer.state.values())
    held = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters()), *pytree.tree_leaves(states)]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in held if isinstance(t, torch.Tensor)]
    return [t._values() if t.is_sparse else t for t in tensors]


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)
