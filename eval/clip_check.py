"""Whether a rendered clip is whole: a broken one counts as nothing. Looks at frames and sound, not at the prompt."""

import numpy as np
import numpy.typing as npt

from videogen.result import Result

BLACK_LEVEL = 8


def is_black(frames: npt.NDArray[np.uint8]) -> bool:
    """No pixel brighter than `BLACK_LEVEL` of 255 in any frame."""
    return int(frames.max()) <= BLACK_LEVEL


def is_frozen(frames: npt.NDArray[np.uint8]) -> bool:
    """Every frame equal to the first, bit for bit."""
    return len(frames) > 1 and bool((frames[1:] == frames[:1]).all())


def broken_because(result: Result, *, frames: int, size: tuple[int, int], has_sound: bool = True) -> str:
    """Why the clip does not count, or an empty string. `size` is (width, height); sound is demanded where there is to be any."""
    wanted = (frames, size[1], size[0], 3)
    if result.frames.shape != wanted:
        return f"shape {result.frames.shape} instead of {wanted}"
    if is_black(result.frames):
        return "black"
    if is_frozen(result.frames):
        return "frozen"
    if not has_sound:
        return "" if result.audio is None else "audio where there is to be none"
    if result.audio is None or result.audio.ndim != 2 or result.audio.shape[1] == 0:
        return "no audio"
    if not np.isfinite(result.audio).all():
        return "audio not finite"
    seconds = result.audio.shape[1] / result.sampling_rate
    if abs(seconds - result.duration_s) > 0.05:
        return f"audio lasts {seconds:.2f} s, picture {result.duration_s:.2f} s"
    return ""
