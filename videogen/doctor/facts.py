"""Facts about this process that no call shows: versions, mapped libraries, compile counters, peers, processors."""

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import _HUB_KERNELS_REGISTRY, AttentionBackendName, _AttentionBackendRegistry
from torch import nn
from torch._dynamo.utils import counters

from videogen.doctor.rules import is_from_hub


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


def attention_backends(pipe: Any) -> dict[str, str]:
    """What each component of a pipeline attends through, by its processors or, where those leave it open, by the process's default.

    One from the hub stands for a component that has several. Transformers' models name theirs in their configuration.
    """
    found, default = dict[str, str](), _AttentionBackendRegistry.get_active_backend()[0]
    for component, model in pipe.components.items():
        if not isinstance(model, nn.Module):
            continue
        processors: list[Any] = [getattr(each, "processor", None) for each in model.modules()]
        processors = [each for each in processors if hasattr(each, "_attention_backend")]
        names = [str(AttentionBackendName(each._attention_backend or default).value) for each in processors]
        own = getattr(getattr(model, "config", None), "_attn_implementation", None)
        names += [str(own)] if own else []
        if names:
            found[component] = next((name for name in names if is_from_hub(name)), names[0])
    return found


def missing_kernels(backends: Iterable[str]) -> set[str]:
    """Those of diffusers' back ends that come from the hub and have not been loaded: a call of one fails."""
    kernels = {key.value: config.kernel_fn for key, config in _HUB_KERNELS_REGISTRY.items()}
    return {name for name in backends if name in kernels and kernels[name] is None}


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
