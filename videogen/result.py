"""What one rendered clip is in memory; knows nothing of files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Result:
    """One finished clip.

    frames: (F, H, W, 3) uint8; audio: (channels, samples) float32 in [-1, 1]; record: the sidecar's JSON content.
    """

    frames: npt.NDArray[np.uint8]
    audio: npt.NDArray[np.float32]
    sampling_rate: int
    fps: float
    record: dict[str, Any]

    @property
    def duration_s(self) -> float:
        """Length of the picture in seconds."""
        return len(self.frames) / self.fps
