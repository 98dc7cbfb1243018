"""Frames and sound to a checked MP4 and its companions; knows nothing of models, names or journals."""

import hashlib
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videogen.errors import ClipFault, EnvironmentFault, RequestError, bad, say
from videogen.ffmpeg import EXACT_SCALE, ClipInfo, file_url, probe, read_audio, read_comment, read_frames, run_ffmpeg

__all__ = [
    "ClipInfo",
    "Encoding",
    "discard_partial",
    "encode_files",
    "probe",
    "read_audio",
    "read_comment",
    "read_frames",
    "to_uint8",
    "write_clip",
]

# Decoders overshoot [0, 1] and [-1, 1] a little and are clipped; further out it is another range (bytes, [-1, 1]), never a picture
OVERSHOOT = 0.5
AAC_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
# ffmpeg's default coder bursts to 1.8 times the level within the first 30 ms of a clip that starts on a tone; "fast" does not,
# and perceptual noise and intensity coding, made for low rates, cost 8 dB on noise at this one
_AAC = ("-c:a", "aac", "-b:a", "192k", "-aac_coder", "fast", "-aac_pns", "0", "-aac_is", "0")
_BT709 = "setparams=color_primaries=bt709:color_trc=bt709:colorspace=bt709:range=tv"
_TO_YUV = f"{EXACT_SCALE}:out_color_matrix=bt709:out_range=tv,format=yuv420p,{_BT709}"
_BASE_LIMIT_S = 120.0
_SLOWEST_PIXELS_PER_S = 500_000.0  # a 1344x768 frame in 2 s; two busy CPU cores do ten a second


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a clip is stored; `crf` is x264's quality, 0 (best) to 51. The companions hold the frames exactly as rendered."""

    crf: int = 16
    lossless: bool = False
    save_frames: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.crf, bool) or not isinstance(self.crf, int) or not 0 <= self.crf <= 51:
            raise bad("crf", self.crf, "a whole number from 0 (best) to 51", "leave it out for 16")


def encode_files(path: Path, encoding: Encoding) -> list[Path]:
    """Everything that belongs to the clip at `path` (NAME.mp4), itself first, then NAME.lossless.mkv and NAME.frames/."""
    lossless = [path.with_name(f"{path.stem}.lossless.mkv")] if encoding.lossless else []
    frames = [path.with_name(f"{path.stem}.frames")] if encoding.save_frames else []
    return [path, *lossless, *frames]


def discard_partial(path: Path) -> None:
    """Remove what an interrupted `write_clip(path)` left beside the target; finished files stay."""
    for part in (*map(_part, encode_files(path, Encoding(lossless=True, save_frames=True))), _sound(path), _tags(path)):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def to_uint8(frames: NDArray[Any]) -> NDArray[np.uint8]:
    """(F, H, W, 3) floats in [0, 1] to rounded, clipped bytes; bytes pass through untouched. NaN and other ranges are refused."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise bad("frames", frames.shape, "a shape (F, H, W, 3) without zeros", "pass at least one RGB frame")
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise bad("frames", str(frames.dtype), "floats in [0, 1] or uint8", "convert them first")
    pixels = np.empty(frames.shape, np.uint8)
    for index, frame in enumerate(frames):  # one at a time: a 15 s clip is 4 GB in float32
        _check_range(f"frame {index}", frame, 0.0)
        pixels[index] = np.rint(np.clip(frame.astype(np.float32), 0, 1) * 255)
    return pixels


OnChecked = Callable[[ClipInfo, Path], None]


def ignore(_info: ClipInfo, _part: Path) -> None:
    """The do-nothing listener."""


def write_clip(
    path: Path,
    frames: NDArray[Any],
    audio: NDArray[Any] | None,
    *,
    fps: float,
    sampling_rate: int,
    encoding: Encoding,
    comment: str,
    on_checked: OnChecked = ignore,
) -> ClipInfo:
    """Write `path` (NAME.mp4) and its companions, read them back, and only then give them their names.

    `frames` is (F, H, W, 3) as for `to_uint8`; `audio` is (1 or 2 channels, samples) floats in [-1, 1], cut or padded with
    silence to F / fps seconds, or None for a clip without sound. `comment` becomes the comment tag. `on_checked` gets what was
    read back and the finished file, which has no name yet. Raises `RequestError` on bad input, `EnvironmentFault` when the disk
    refuses, `ClipFault` when ffmpeg fails or what was read back differs; then nothing new is left behind.
    """
    if not (math.isfinite(fps) and 0 < fps <= 1000):
        raise bad("fps", fps, "above 0 and at most 1000", "use the model's rate")
    pixels = np.ascontiguousarray(to_uint8(frames))
    num_samples = round(len(pixels) / fps * sampling_rate)
    samples = None if audio is None else _fit_audio(audio, num_samples, sampling_rate)
    _check_target(path, pixels, comment)
    limit_s = _BASE_LIMIT_S + pixels[..., 0].size / _SLOWEST_PIXELS_PER_S
    rate = Fraction(fps).limit_denominator(1001)
    try:
        discard_partial(path)
        sound = _write_inputs(path, samples, sampling_rate, comment)
        info = _encode_mp4(path, pixels, sound, rate, encoding.crf, limit_s)
        _compare(path, info, pixels, samples, fps, sampling_rate)
        _compare_comment(path, comment)
        if encoding.lossless:
            _encode_lossless(path, pixels, sound, rate, limit_s)
        if encoding.save_frames:
            _encode_pngs(path, pixels, rate, limit_s)
        on_checked(info, _part(path))
        _publish(encode_files(path, encoding))
    except OSError as error:
        advice = "free space, then run the same command to go on"
        raise EnvironmentFault(say(f"clip {path}", error, "a writable folder with space", advice)) from error
    finally:
        discard_partial(path)
    return info


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _sound(path: Path) -> Path:
    return path.with_name(f".{path.name}.f32")


def _tags(path: Path) -> Path:
    return path.with_name(f".{path.name}.tags")


def _check_range(what: str, values: NDArray[Any], least: float) -> None:
    low, high = float(values.min()), float(values.max())
    if not (low >= least - OVERSHOOT and high <= 1 + OVERSHOOT):  # also refuses NaN
        raise bad(what, f"values from {low:g} to {high:g}", f"finite values in [{least:g}, 1]", "decode or rescale it again")


def _fit_audio(audio: NDArray[Any], num_samples: int, sampling_rate: int) -> NDArray[np.float32]:
    """Stereo, clipped, of exactly the clip's length: (2, num_samples)."""
    if sampling_rate not in AAC_RATES:
        raise bad("sampling rate", sampling_rate, f"one that AAC has: {', '.join(map(str, AAC_RATES))}", "resample the sound")
    if audio.ndim != 2 or audio.shape[0] not in (1, 2) or audio.shape[1] == 0:
        raise bad("audio", audio.shape, "a shape (1 or 2 channels, samples)", "pass None for a clip without sound")
    if not np.issubdtype(audio.dtype, np.floating):
        raise bad("audio", str(audio.dtype), "floats in [-1, 1]", "convert it first")
    _check_range("audio", audio, -1.0)
    fitted = np.zeros((2, num_samples), np.float32)
    heard = min(num_samples, audio.shape[1])
    fitted[:, :heard] = np.clip(audio[:, :heard], -1, 1)  # a single channel fills both
    return fitted


def _check_target(path: Path, pixels: NDArray[np.uint8], comment: str) -> None:
    _, height, width, _ = pixels.shape
    if height % 2 or width % 2:
        raise bad("size", f"{width}x{height}", "even sides (H.264 yuv420p)", "render a canvas of even sides; we never rescale")
    if path.suffix != ".mp4" or path.is_dir():
        raise bad("output file", str(path), "a file name ending in .mp4", "rename it")
    if not path.parent.is_dir():
        raise bad("output folder", str(path.parent), "an existing folder", "create it first")
    if "\0" in comment or any("\ud800" <= character <= "\udfff" for character in comment):
        raise bad("comment", comment, "text without NUL or lone surrogates", "escape them (json.dumps does)")


def _write_inputs(path: Path, samples: NDArray[np.float32] | None, sampling_rate: int, comment: str) -> tuple[str, ...]:
    """Write the tag file, and the sound if there is any; returns ffmpeg's arguments that read the sound."""
    text = "".join(f"\\{character}" if character in "=;#\\\n\r" else character for character in comment)
    _tags(path).write_bytes(f";FFMETADATA1\ncomment={text}".encode())
    if samples is None:
        return ()
    _sound(path).write_bytes(samples.T.astype("<f4").tobytes())  # interleaved; numpy's tofile does not say why it fails
    return ("-f", "f32le", "-ar", str(sampling_rate), "-ch_layout", "stereo", "-i", file_url(_sound(path)))


def _picture(pixels: NDArray[np.uint8], rate: Fraction) -> tuple[str, ...]:
    _, height, width, _ = pixels.shape
    return ("-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", str(rate), "-i", "pipe:0")


def _encode_mp4(path: Path, pixels: NDArray[np.uint8], sound: tuple[str, ...], rate: Fraction, crf: int, limit_s: float) -> ClipInfo:
    tags = ("-f", "ffmetadata", "-i", file_url(_tags(path)), "-map_metadata", "2" if sound else "1")
    video = ("-map", "0:v", "-vf", _TO_YUV, "-c:v", "libx264", "-crf", str(crf), "-fps_mode", "passthrough")
    heard = ("-map", "1:a", *_AAC) if sound else ()
    store = ("-movflags", "+faststart", "-f", "mp4", file_url(_part(path)))
    run_ffmpeg(*_picture(pixels, rate), *sound, *tags, *video, *heard, *store, stdin=pixels.reshape(-1).data, limit_s=limit_s)
    try:
        return probe(_part(path))
    except RequestError as error:
        raise ClipFault(say(f"clip {path} read back", error, "every frame", "nothing was kept; render it again")) from error


def _compare(
    path: Path, info: ClipInfo, pixels: NDArray[np.uint8], samples: NDArray[np.float32] | None, fps: float, sampling_rate: int
) -> None:
    num_frames, height, width, _ = pixels.shape
    audio = ("aac", 2, sampling_rate, samples.shape[1]) if samples is not None else (None, 0, 0, 0)
    expected = ((num_frames, width, height), ("h264", "yuv420p", True), audio)
    stored = (info.video_codec, info.pixel_format, info.faststart)
    is_near = abs(info.audio_samples - audio[3]) <= sampling_rate / 1000  # ffmpeg before 8 stores the sound's end to a millisecond
    heard = (info.audio_codec, info.audio_channels, info.sampling_rate, audio[3] if is_near else info.audio_samples)
    got = ((info.frames, info.width, info.height), stored, heard)
    if got != expected or abs(info.duration_s - num_frames / fps) > 1e-3:
        found, wanted = f"{got} lasting {info.duration_s:.4f} s", f"{expected} lasting {num_frames / fps:.4f} s"
        raise ClipFault(say(f"clip {path} read back", found, wanted, "nothing was kept; render it again"))


def _compare_comment(path: Path, comment: str) -> None:
    stored = read_comment(_part(path)) or ""
    if stored != comment:
        found, wanted = f"{len(stored)} characters", f"the {len(comment)} characters given"
        raise ClipFault(say(f"comment tag of {path} read back", found, wanted, "nothing was kept; report this comment"))


def _encode_lossless(path: Path, pixels: NDArray[np.uint8], sound: tuple[str, ...], rate: Fraction, limit_s: float) -> None:
    """FFV1 in RGB with the sound as 32-bit floats: both bit for bit."""
    part = _part(encode_files(path, Encoding(lossless=True))[1])
    heard = ("-map", "1:a", "-c:a", "pcm_f32le") if sound else ()
    video = ("-map", "0:v", "-c:v", "ffv1", "-level", "3", "-pix_fmt", "bgr0", "-fps_mode", "passthrough")
    store = ("-f", "matroska", file_url(part))
    run_ffmpeg(*_picture(pixels, rate), *sound, *video, *heard, *store, stdin=pixels.reshape(-1).data, limit_s=limit_s)
    _compare_exactly(part, pixels, limit_s, "-i", file_url(part))


def _encode_pngs(path: Path, pixels: NDArray[np.uint8], rate: Fraction, limit_s: float) -> None:
    part = _part(encode_files(path, Encoding(save_frames=True))[1])
    part.mkdir()
    store = ("-fps_mode", "passthrough", "-f", "image2", "-start_number", "0", "%05d.png")
    run_ffmpeg(*_picture(pixels, rate), *store, stdin=pixels.reshape(-1).data, limit_s=limit_s, cwd=part)
    _compare_exactly(part, pixels, limit_s, "-f", "image2", "-start_number", "0", "-i", "%05d.png")


def _compare_exactly(part: Path, pixels: NDArray[np.uint8], limit_s: float, *source: str) -> None:
    """Hash the decoded pictures, so that the whole clip need not fit in memory a second time."""
    sink = ("-map", "0:v", "-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "hash", "-hash", "sha256", "-")
    stdout, _ = run_ffmpeg("-xerror", *source, *sink, limit_s=limit_s, cwd=part if part.is_dir() else None)
    found, wanted = stdout.decode().strip(), f"SHA256={hashlib.sha256(pixels.data).hexdigest()}"
    if found != wanted:
        raise ClipFault(say(f"{part.name} read back", found, wanted, "nothing was kept; render it again"))


def _publish(files: list[Path]) -> None:
    """Give finished parts their names, the clip itself last: who sees NAME.mp4 sees all of it."""
    for final in files:
        for stored in (*(sorted(_part(final).iterdir()) if _part(final).is_dir() else ()), _part(final)):
            _fsync(stored)
    renamed: list[Path] = []
    try:
        for final in reversed(files):
            if final.is_dir():  # frames of a run that died before its clip was named; anything else in there stops us
                for frame in final.glob("[0-9][0-9][0-9][0-9][0-9].png"):
                    frame.unlink()
                final.rmdir()
            os.replace(_part(final), final)
            renamed.append(final)
    except BaseException:
        for final in renamed:
            shutil.rmtree(final) if final.is_dir() else final.unlink()
        raise
    _fsync(files[0].parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
