"""What `videogen doctor --save` found fastest on a device, as a file that opening a pipeline reads; measures nothing itself."""

import json
import logging
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from videogen.config import Environment
from videogen.identity import hash_text

logger = logging.getLogger(__name__)

SCHEMA = "videogen.device/2"
REACH = 2.0  # up to so many times more or fewer rows than were measured: one octave, the step in which entries are kept
MATMULS = (None, "model", "bfloat16")  # what doctor measures


@dataclass(frozen=True, slots=True)
class Winners:
    """What was fastest at one dtype and one number of packed rows. attention is diffusers' name of a back end; None: its own.

    matmul is None where products were not compared. Raises ValueError for values that no measurement gives.
    """

    dtype: str
    rows: int
    attention: str | None = None
    matmul: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_number = isinstance(self.rows, int) and not isinstance(self.rows, bool)
        if not is_number or not 1 <= self.rows < 1 << 31 or not isinstance(self.dtype, str):
            raise ValueError(f"entry: got dtype {self.dtype!r:.60} and rows {self.rows!r:.60}, expected a name and a whole number")
        if not isinstance(self.attention, str | None) or self.matmul not in MATMULS or not isinstance(self.measured, dict):
            raise ValueError(f"entry: got attention {self.attention!r:.60} and matmul {self.matmul!r:.60}, expected what doctor writes")

    @property
    def octave(self) -> int:
        """Entries of one dtype and octave replace each other."""
        return round(math.log2(self.rows))


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The winners on one device with one torch, by dtype and rows."""

    device: str
    entries: tuple[Winners, ...] = ()

    def at(self, dtype: str, rows: int) -> Winners | None:
        """The entry of this dtype measured nearest to so many rows, within a factor of `REACH`; None where there is none."""
        near = [each for each in self.entries if each.dtype == dtype and _apart(each.rows, rows) <= REACH]
        return min(near, key=lambda each: _apart(each.rows, rows), default=None)

    def keeping(self, found: Winners) -> "DeviceProfile":
        """With this entry, in place of one of the same dtype and about as many rows."""
        place = (found.dtype, found.octave)
        others = [each for each in self.entries if (each.dtype, each.octave) != place]
        return DeviceProfile(self.device, tuple(sorted((*others, found), key=lambda each: (each.dtype, each.rows))))


def _apart(one: int, other: int) -> float:
    return max(one, other) / max(1, min(one, other))


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
        if (found["schema"], found["device"]) == (SCHEMA, device_key(device)):
            return DeviceProfile(found["device"], tuple(Winners(**each) for each in found["entries"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("device profile %s: got %s, expected a file of `videogen doctor --save`; it is not used", path, error)
        return None
    logger.warning("device profile %s: got one of another device or version, expected %s; it is not used", path, device_key(device))
    return None


def as_text(profile: DeviceProfile) -> str:
    """The file's content."""
    return json.dumps({"schema": SCHEMA} | asdict(profile), indent=1) + "\n"
