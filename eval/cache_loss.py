"""What a cached clip lost against the same clip uncached, in units of stated tolerances: the loss a certificate speaks of."""

from dataclasses import asdict, dataclass

import numpy as np

from eval.metrics.pair import Pair
from eval.metrics.picture import ssim_curve
from eval.metrics.sound import level_shift, log_spectral_distance
from videogen.errors import bad

WORST_FRAMES = 95  # percentile over frames: a mean hides the few that broke


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How much of each part may be lost. video: 1 - SSIM of the worst frames; motion: grey levels; spectrum and level: dB."""

    video: float = 0.05
    motion: float = 2.0
    spectrum: float = 3.0
    level: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise bad(f"tolerance {name}", value, "a positive number", "change it")


def loss_parts(pair: Pair) -> dict[str, float]:
    """Each part of the loss in its own unit; 0 for identical clips, and of a sound that neither has."""
    new, reference = np.diff(pair.new.luma, axis=0), np.diff(pair.reference.luma, axis=0)
    motion = float(np.percentile(np.sqrt(np.mean((new - reference) ** 2, axis=(1, 2))), WORST_FRAMES)) if len(new) else 0.0
    has_sound = pair.reference.audio.size > 0
    return {
        "video": float(np.percentile(1 - np.asarray(ssim_curve(pair)), WORST_FRAMES)),
        "motion": motion,
        "spectrum": log_spectral_distance(pair) if has_sound else 0.0,
        "level": abs(level_shift(pair)) if has_sound else 0.0,
    }


def loss(parts: dict[str, float], tolerances: Tolerances) -> float:
    """The largest part over its tolerance: above 1 is a violation."""
    limits: dict[str, float] = asdict(tolerances)
    return max(parts[name] / limits[name] for name in limits)
