"""What a clip is computed on: versions, device, most memory in use; no host or user name."""

import platform
import resource
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from videogen import __version__


def software() -> dict[str, str]:
    """Versions that decide a clip."""
    return {
        "videogen": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Where the clip was computed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": device.type, "name": name, "threads": torch.get_num_threads()}


def peak_memory_mb(device: torch.device) -> float:
    """Most memory in use so far: of the device for CUDA, of the process otherwise. Megabytes of 10^6 bytes."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1)


def memory_in_use_mb() -> float:
    """Of the process now, in megabytes of 10^6 bytes; where the system does not say, the most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_memory_mb(torch.device("cpu"))
    return pages * resource.getpagesize() / 1e6
