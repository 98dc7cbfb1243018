"""What one rendered clip is in memory, as the model made it and as it is handed on; knows nothing of files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from caches.trace import Trace


@dataclass(frozen=True, slots=True)
class RawClip:
    """What the model made: frames (F, H, W, 3), floats in [0, 1] or bytes, audio (channels, samples) float or None where the family
    makes none, sigmas with the last 0 by modality.

    cache and attention say what the step cache and sparse attention did; evaluations is how often a step asks the model; moves are
    the experts that came from host memory meanwhile.
    """

    frames: npt.NDArray[np.float32]
    audio: npt.NDArray[np.float32] | None
    sampling_rate: int
    sigmas: dict[str, list[float]]
    cache: Trace
    attention: dict[str, Any]
    evaluations: int = 1
    moves: tuple[dict[str, int | float], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One finished clip.

    frames: (F, H, W, 3) uint8; audio: (channels, samples) float32 in [-1, 1], None without sound; record: the sidecar's JSON content.
    """

    frames: npt.NDArray[np.uint8]
    audio: npt.NDArray[np.float32] | None
    sampling_rate: int
    fps: float
    record: dict[str, Any]

    @property
    def duration_s(self) -> float:
        """Length of the picture in seconds."""
        return len(self.frames) / self.fps
