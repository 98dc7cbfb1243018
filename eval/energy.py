"""Energy of the GPU from NVML's own counter; None where there is none. Never computed from a power rating."""

import importlib
from typing import Any

import torch


class EnergyMeter:
    """Reads the counter of one device. NVML numbers all devices of the machine, CUDA only the visible ones: matched by UUID."""

    def __init__(self, device: torch.device) -> None:
        self._nvml = _nvml() if device.type == "cuda" else None
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if self._nvml is not None else ""

    def read_wh(self) -> float | None:
        """Watt-hours of the whole device since its driver was loaded; None where NVML does not count."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._nvml.nvmlDeviceGetHandleByUUID(self._uuid))) / 3.6e6
        except self._nvml.NVMLError:
            return None


def _nvml() -> Any:
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return module
