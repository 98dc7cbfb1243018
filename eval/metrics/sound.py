"""What happened to the sound: error, spectrum, level, peak and silence; samples are compared as rendered, before AAC."""

import math

import numpy as np
import numpy.typing as npt
import torch

from eval.metrics.pair import Clip, NotMeasurable, Pair

SILENCE_DB = -60.0  # below this RMS or peak (full scale 0 dB) sound counts as silence
_POWER_FLOOR = 1e-10
_WINDOW = 1024
_BLOCK_S = 0.02


def _db(amplitude: float) -> float:
    """Decibels to full scale, not below silence: two silences have one level."""
    return max(SILENCE_DB, 20 * math.log10(amplitude)) if amplitude > 0 else SILENCE_DB


def _rms(samples: npt.NDArray[np.float32]) -> float:
    return math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))


def audio_snr(pair: Pair) -> float:
    """Energy of the reference over energy of the difference, in dB, both channels together."""
    if _db(_rms(pair.reference.audio)) <= SILENCE_DB:
        raise NotMeasurable("the reference is silent")
    error = _rms(pair.new.audio - pair.reference.audio)
    return 20 * math.log10(_rms(pair.reference.audio) / error) if error else math.inf


def log_spectral_distance(pair: Pair) -> float:
    """Root mean square over frequency of the difference of log power spectra (Gray and Markel 1976), mean over time, in dB."""
    new, reference = (log_power(torch.from_numpy(np.ascontiguousarray(clip.audio))) for clip in (pair.new, pair.reference))
    return float((new - reference).square().mean(dim=1).sqrt().mean())


def log_power(samples: torch.Tensor) -> torch.Tensor:
    """(channels, frequencies, times) in dB of (channels, samples); a full-scale sine is near -6, the floor is -100."""
    size = min(_WINDOW, samples.shape[1])
    window = torch.hann_window(size, dtype=torch.float64, device=samples.device)
    bins = torch.stft(samples.double(), size, hop_length=max(1, size // 4), window=window, center=False, return_complex=True)
    return 10 * ((bins.abs() / window.sum()) ** 2).clamp(min=_POWER_FLOOR).log10()


def level_shift(pair: Pair) -> float:
    """RMS level, new minus reference, in dB; silence counts as -60 dB."""
    return _db(_rms(pair.new.audio)) - _db(_rms(pair.reference.audio))


def peak_shift(pair: Pair) -> float:
    """Peak level, new minus reference, in dB; silence counts as -60 dB."""
    return _db(float(np.abs(pair.new.audio).max())) - _db(float(np.abs(pair.reference.audio).max()))


def silent_share(clip: Clip) -> float:
    """The share of 20 ms blocks that are silent in every channel."""
    size = max(1, min(clip.audio.shape[1], round(_BLOCK_S * clip.sampling_rate)))
    count = clip.audio.shape[1] // size
    blocks = clip.audio[:, : count * size].reshape(len(clip.audio), count, size)
    levels = np.sqrt(np.mean(np.square(blocks, dtype=np.float64), axis=2)).max(axis=0)
    return float(np.mean(levels < 10 ** (SILENCE_DB / 20)))


def silence_excess(pair: Pair) -> float:
    """Silent share, new minus reference: sound that went missing (positive) or came up (negative)."""
    return silent_share(pair.new) - silent_share(pair.reference)
