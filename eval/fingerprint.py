"""What a measurement was made on and with: hardware, software, code; never a host or user name."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from videogen.config import read_environment
from videogen.machine import software

COMPARED = ("cpu", "cpus", "gpus", "memory_gb", "software")
_ROOT = Path(__file__).parent.parent


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *args], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _first_line_of(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _gpu(index: int) -> dict[str, Any]:
    p = torch.cuda.get_device_properties(index)
    return {"name": p.name, "memory_gb": round(p.total_memory / 1e9, 1), "capability": f"{p.major}.{p.minor}"}


def fingerprint() -> dict[str, Any]:
    """The facts that two measurements must share to be compared, and the code's commit."""
    memory_kb = _first_line_of("/proc/meminfo", "MemTotal").split(" ")[0]
    return {
        "cpu": _first_line_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cpus": torch.get_num_threads(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "memory_gb": round(int(memory_kb) / 1e6) if memory_kb.isdigit() else None,
        "os": platform.system(),
        "software": software() | {"cuda": torch.version.cuda if torch.cuda.is_available() else None},
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "environment": read_environment().record(),
    }
