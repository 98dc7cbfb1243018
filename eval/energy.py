"""Energy of the GPU from NVML's own counter; None where there is none. Never computed from a power rating."""

import importlib
from typing import Any

import torch


class EnergyMeter:
    """Reads the counter when made and when asked; NVML counts millijoules since the driver was loaded."""

    def __init__(self, device: torch.device) -> None:
        self._nvml = _nvml() if device.type == "cuda" else None
        self._index = device.index or 0
        self._start_mj = self._now_mj()

    def _now_mj(self) -> int | None:
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._nvml.nvmlDeviceGetHandleByIndex(self._index)))
        except self._nvml.NVMLError:
            return None

    def read_wh(self) -> float | None:
        """Watt-hours since the meter was made, of the whole device; None where NVML does not count."""
        now_mj = self._now_mj()
        if now_mj is None or self._start_mj is None:
            return None
        return (now_mj - self._start_mj) / 3.6e6


def _nvml() -> Any:
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except (ImportError, RuntimeError, OSError):
        return None
    return module
