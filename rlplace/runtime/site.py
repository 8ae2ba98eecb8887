"""What a process knows about the machine, the device and the software that its steps run on."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def local_facts(device: torch.device) -> dict[str, str | int | float]:
    """Facts of this process for `rlplace.measured.site.site_of`, the same at every start on the same machine.

    Only what changes step times and does not change by itself: no clocks, loads or temperatures. Sizes of memory are whole
    GiB, because what a driver or kernel keeps for itself differs by a few MiB between versions.

    Args:
        device: The device of this process.

    Returns:
        `host` (only to see which processes share a machine), `device_type`, `device`, `device_memory_gib`, `processor`,
        `machine`, `cores` (that the process may use), `threads`, `python`, `torch`; on CUDA devices also `cuda`, `cudnn`,
        `matmul_tf32`, `cudnn_tf32` and where the driver tells it `power_limit_w`; on processors `capability`.
    """
    import torch

    from rlplace.cluster.detect import host_processor
    from rlplace.runtime.environment import nvidia_readings, processor_name

    cores, memory_bytes = host_processor()
    processor = processor_name()
    facts: dict[str, str | int | float] = {
        "host": platform.node() or "host",
        "device_type": device.type,
        "processor": processor,
        "machine": platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"], memory_bytes = properties.name, int(properties.total_memory)
        facts["cuda"], facts["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        facts["matmul_tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
        facts["cudnn_tf32"] = str(torch.backends.cudnn.allow_tf32)
        power_limit_w = nvidia_readings(device).get("power.limit")
        if power_limit_w is not None:
            facts["power_limit_w"] = round(power_limit_w)
    else:
        facts["device"] = processor
        facts["capability"] = torch.backends.cpu.get_cpu_capability()
    facts["device_memory_gib"] = round(memory_bytes / 2**30)
    return facts
