"""What `videogen doctor --save` found fastest on a device, as a file that opening a pipeline reads; measures nothing itself."""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from videogen.config import Environment
from videogen.identity import hash_text
from videogen.transforms.options import MATMULS

logger = logging.getLogger(__name__)

SCHEMA = "videogen.device/1"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The winners on one device with one torch. attention is diffusers' name of a back end; None where nothing was measured."""

    device: str
    attention: str | None = None
    matmul: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)


def device_key(device: torch.device) -> str:
    """What a profile holds for: the device, torch and cuDNN. Another of any of them needs another profile."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    kind = f"{device.type} {torch.backends.cpu.get_cpu_capability()} {_cpu_name()}"
    return f"{kind}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def profile_path(device: torch.device, environment: Environment) -> Path | None:
    """The file for this device; None when profiles are switched off."""
    if not environment.device_profiles:
        return None
    return Path(environment.device_profiles).expanduser() / f"{hash_text(device_key(device))[:16]}.json"


def read_profile(device: torch.device, environment: Environment) -> DeviceProfile | None:
    """The profile of this device, where there is one. A file that is none is left out of account, and that is said."""
    path = profile_path(device, environment)
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        profile = DeviceProfile(**{name: found[name] for name in ("device", "attention", "matmul", "measured")})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("device profile %s: got %s, expected a file of `videogen doctor --save`; it is not used", path, error)
        return None
    if found.get("schema") != SCHEMA or profile.device != device_key(device) or profile.matmul not in (None, *MATMULS):
        logger.warning("device profile %s: got one of another device or version, expected %s; it is not used", path, device_key(device))
        return None
    return profile


def as_text(profile: DeviceProfile) -> str:
    """The file's content."""
    return json.dumps({"schema": SCHEMA} | asdict(profile), indent=1) + "\n"
