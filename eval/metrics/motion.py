"""Whether a clip moves, flickers, shifts in time or changes its light against the reference; needs no weights."""

import math

import numpy as np
import numpy.typing as npt

from eval.metrics.pair import Clip, NotMeasurable, Pair

STILL_LEVELS = 2  # a frame is frozen when no channel of any pixel moved by more than this
_EPS_LEVELS = 0.1  # added to both sides of a ratio, so that two still clips have the ratio 1
_MAX_LAG = 12
_COARSE_PX = 48  # the shorter side that clips are reduced to before they are slid against each other
# how much smaller the squared error must become before a lag is believed
_LAG_GAIN = 0.5


def _needs_two(pair: Pair) -> None:
    if pair.num_frames < 2:
        raise NotMeasurable("a single frame has no motion")


def _ratio(new: float, reference: float) -> float:
    return (new + _EPS_LEVELS) / (reference + _EPS_LEVELS)


def temporal_information(clip: Clip) -> float:
    """ITU-T P.910's TI, but averaged over time: the mean spatial deviation of frame differences, in grey levels."""
    return float(np.mean([np.std(after - before) for before, after in zip(clip.luma, clip.luma[1:])]))


def motion_ratio(pair: Pair) -> float:
    """Temporal information, new over reference: 1 keeps the motion, 0 is a still."""
    _needs_two(pair)
    return _ratio(temporal_information(pair.new), temporal_information(pair.reference))


def frozen_share(clip: Clip) -> float:
    """The share of frames that show nothing new since the frame before."""
    steps = zip(clip.frames, clip.frames[1:])
    return float(np.mean([np.abs(after.astype(np.int16) - before).max() <= STILL_LEVELS for before, after in steps]))


def frozen_excess(pair: Pair) -> float:
    """Frozen share, new minus reference: what stands still though it should not."""
    _needs_two(pair)
    return frozen_share(pair.new) - frozen_share(pair.reference)


def flicker(pair: Pair) -> float:
    """PSNR of the new clip's luma frame differences against the reference's, in dB (peak 255)."""
    _needs_two(pair)
    new, reference = pair.new.luma, pair.reference.luma
    errors = [np.mean(((new[i + 1] - new[i]) - (reference[i + 1] - reference[i])) ** 2, dtype=np.float64) for i in range(len(new) - 1)]
    error = float(np.mean(errors))
    return 10 * math.log10(255**2 / error) if error else math.inf


def _coarse(clip: Clip) -> npt.NDArray[np.float32]:
    height, width = clip.luma.shape[1:]
    block = max(1, min(height, width) // _COARSE_PX)
    rows, columns = height // block, width // block
    cut = clip.luma[:, : rows * block, : columns * block]
    means: npt.NDArray[np.float32] = cut.reshape(len(cut), rows, block, columns, block).mean(axis=(2, 4))
    return means


def time_shift(pair: Pair) -> float:
    """By how many frames the new clip is late (negative: early), 0 unless sliding halves the squared error at least."""
    _needs_two(pair)
    new, reference = _coarse(pair.new), _coarse(pair.reference)
    most = min(_MAX_LAG, len(new) // 3)

    def error(lag: int) -> float:
        late, early = (new[lag:], reference[: len(reference) - lag]) if lag >= 0 else (new[:lag], reference[-lag:])
        return float(np.mean((late - early) ** 2, dtype=np.float64))

    best = min(range(-most, most + 1), key=lambda lag: (error(lag), abs(lag)))
    return float(best) if error(best) < _LAG_GAIN * error(0) else 0.0


def luma_shift(pair: Pair) -> float:
    """Mean luma, new minus reference, in grey levels."""
    return pair.new.frame_means(_mean) - pair.reference.frame_means(_mean)


def _mean(frame: npt.NDArray[np.float32]) -> float:
    return float(frame.mean(dtype=np.float64))


def chroma_shift(pair: Pair) -> float:
    """How far a frame's mean colour moved in BT.709's Cb-Cr plane, mean over frames, in grey levels."""
    steps = []
    for new, reference in zip(pair.new.frames, pair.reference.frames):
        red, green, blue = new.mean(axis=(0, 1), dtype=np.float64) - reference.mean(axis=(0, 1), dtype=np.float64)
        luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        steps.append(math.hypot((blue - luma) / 1.8556, (red - luma) / 1.5748))
    return float(np.mean(steps))


def contrast_ratio(pair: Pair) -> float:
    """Spatial deviation of luma, new over reference: near 0 for a black or flat clip."""
    return _ratio(pair.new.frame_means(_deviation), pair.reference.frame_means(_deviation))


def _deviation(frame: npt.NDArray[np.float32]) -> float:
    return float(frame.std(dtype=np.float64))


def sharpness_ratio(pair: Pair) -> float:
    """Mean absolute luma gradient, new over reference: below 1 is blur, above 1 noise or ringing."""
    return _ratio(pair.new.frame_means(_gradient), pair.reference.frame_means(_gradient))


def _gradient(frame: npt.NDArray[np.float32]) -> float:
    steps = [np.abs(np.diff(frame, axis=axis)) for axis in (0, 1) if frame.shape[axis] > 1]
    return float(sum(step.mean(dtype=np.float64) for step in steps))
