"""What a distillation run is asked for: plain values and their checks. No torch."""

from dataclasses import dataclass, fields
from pathlib import Path

from videogen.errors import bad


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """`seconds` are for trajectories, training and looks, after loading; `warp` multiplies both shifts of the folder, 0 chooses it."""

    folder: Path
    out: Path
    forwards: int = 4
    teacher: int = 49
    warp: float = 0.0
    rank: int = 18
    adaln_rank: int = 4
    seconds: float = 140.0
    deadline: float = 0.0
    steps: int = 0
    bank: float = 0.3
    rollout: float = 0.75
    short: float = 0.15
    large: float = 0.25
    anchor: float = 0.0
    rate: float = 2e-3
    rollout_rate: float = 2e-3
    row_budget: int = 24_000
    dmd: float = 0.0
    clips: int = 640
    seed: int = 0
    resume: bool = False
    smoke: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("forwards", 1, 64),
            ("teacher", self.forwards, 1000),
            ("warp", 0, 100),
            ("rank", 1, 256),
            ("adaln_rank", 0, 32),
            ("seconds", 0, 1e6),
            ("steps", 0, 10**7),
            ("bank", 0.01, 0.95),
            ("rollout", 0, 1),
            ("short", 0, 0.9),
            ("large", 0, 0.9),
            ("anchor", 0, 100),
            ("rate", 1e-7, 1),
            ("rollout_rate", 1e-7, 1),
            ("row_budget", 1, 10**7),
            ("dmd", 0, 1e6),
            ("clips", 5, 10**6),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise bad(f"lora distil --{name.replace('_', '-')}", value, f"{low:g} to {high:g}", "choose another value")

    def recipe(self) -> dict[str, object]:
        """What a checkpoint must share with the run that continues it."""
        return {name: getattr(self, name) for name in ("forwards", "teacher", "warp", "rank", "adaln_rank")}


DEFAULTS = {each.name: each.default for each in fields(DistilOptions) if each.name not in ("folder", "out")}
