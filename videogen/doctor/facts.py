"""Facts about this process that no call shows: versions, mapped libraries, compile counters, peers, processors."""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._dynamo.utils import counters


def xformers_state() -> tuple[str | None, bool]:
    """The version of xformers, where it is installed, and whether its C++ extension loads."""
    try:
        found = version("xformers")
    except PackageNotFoundError:
        return None, False
    try:
        library = import_module("xformers._cpp_lib")
    except (ImportError, OSError, RuntimeError):
        return found, False
    return found, getattr(library, "_cpp_library_load_exception", None) is None


def cudnn_files() -> list[str]:
    """The cuDNN libraries mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted({line.split()[-1] for line in maps.splitlines() if "libcudnn" in line})


def compile_counters() -> dict[str, Mapping[str, int]]:
    """Dynamo's counters of this process."""
    return {name: dict(group) for name, group in counters.items()}


def cudnn_version() -> int | None:
    """As torch sees it; None without a GPU."""
    return int(torch.backends.cudnn.version()) if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def is_hopper_or_later(device: torch.device) -> bool:
    """Compute capability 9.0 and up."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def peers() -> tuple[int, bool]:
    """How many GPUs there are, and whether each reaches every other's memory."""
    count = torch.cuda.device_count()
    reach = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    return count, reach


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
