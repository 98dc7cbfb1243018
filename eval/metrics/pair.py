"""Two clips of one request, checked to be comparable before anything is measured; holds no number of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from videogen.errors import bad

LUMA = (0.2126, 0.7152, 0.0722)  # BT.709


class NotMeasurable(Exception):
    """A metric has no value for this pair; the message says why."""


@dataclass(frozen=True)
class Clip:
    """One clip before encoding: frames (F, H, W, 3) uint8, audio (channels, N) float in [-1, 1], (0, 0) without sound.

    Raises RequestError for floats as frames, NaN, or a shape that is no clip.
    """

    frames: npt.NDArray[np.uint8]
    audio: npt.NDArray[np.float32]
    sampling_rate: int
    fps: float
    name: str = "clip"

    def __post_init__(self) -> None:
        frames, audio = self.frames, self.audio
        if frames.dtype != np.uint8:
            got = f"{frames.dtype} with NaN" if frames.dtype.kind == "f" and np.isnan(frames).any() else str(frames.dtype)
            raise bad(f"{self.name}: frames", got, "uint8 as rendered", "convert them with videogen.media.to_uint8")
        if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise bad(f"{self.name}: frames", frames.shape, "a shape (F, H, W, 3) without zeros", "pass whole RGB frames")
        if audio.shape != (0, 0) and (audio.ndim != 2 or 0 in audio.shape):
            raise bad(f"{self.name}: audio", audio.shape, "a shape (channels, samples) without zeros", "pass the clip's sound")
        if audio.dtype.kind != "f" or not np.isfinite(audio).all():
            got = f"{audio.dtype}" if audio.dtype.kind != "f" else "NaN or infinity"
            raise bad(f"{self.name}: audio", got, "finite floats in [-1, 1]", "render the clip again")

    @cached_property
    def luma(self) -> npt.NDArray[np.float32]:
        """BT.709 luma of the full-range frames, (F, H, W) in grey levels of 255."""
        out = np.empty(self.frames.shape[:3], np.float32)
        for index, frame in enumerate(self.frames):  # one at a time: float32 RGB of a 15 s clip is 4 GB
            out[index] = frame @ np.asarray(LUMA, np.float32)
        return out

    def frame_means(self, of: Callable[[npt.NDArray[np.float32]], float]) -> float:
        """The mean over frames of a number read from each frame's luma."""
        return float(np.mean([of(frame) for frame in self.luma]))


@dataclass(frozen=True)
class Pair:
    """The clip under test and the one it is held against, of one prompt if it is known.

    Raises RequestError when they are not of one shape, rate and length.
    """

    new: Clip
    reference: Clip
    prompt: str = ""

    def __post_init__(self) -> None:
        for what in ("fps", "sampling_rate"):
            self._same(what, getattr(self.new, what), getattr(self.reference, what))
        self._same("frames (F, H, W, 3)", self.new.frames.shape, self.reference.frames.shape)
        self._same("audio (channels, samples)", self.new.audio.shape, self.reference.audio.shape)

    def _same(self, what: str, new: object, reference: object) -> None:
        if new != reference:
            raise bad(f"{self.new.name} against {self.reference.name}: {what}", new, f"{reference}", "pair clips of one request")

    @property
    def num_frames(self) -> int:
        """Frames in each clip."""
        return len(self.new.frames)

    @property
    def sides(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.new.frames.shape[1], self.new.frames.shape[2]

    @cached_property
    def is_same_picture(self) -> bool:
        """Every pixel of every frame equal."""
        return np.array_equal(self.new.frames, self.reference.frames)

    @cached_property
    def is_same_sound(self) -> bool:
        """Every sample equal."""
        return np.array_equal(self.new.audio, self.reference.audio)

    @property
    def is_identical(self) -> bool:
        """Picture and sound equal bit for bit."""
        return self.is_same_picture and self.is_same_sound
