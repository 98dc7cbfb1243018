"""Runs the ffmpeg binary that imageio-ffmpeg ships, with time limits, and reads clips back through it; never writes a clip."""

import errno
import os
import signal
import subprocess
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videogen.errors import ClipFault, EnvironmentFault, bad, say

try:  # without it everything but files still works
    import imageio_ffmpeg
except ImportError:
    imageio_ffmpeg = None

READ_LIMIT_S = 600.0
# swscale truncates by default, which darkens a clip by half a grey level on every conversion
EXACT_SCALE = "scale=flags=accurate_rnd+full_chroma_int+full_chroma_inp"
_TAIL_LINES = 8
# errors of the disk, which the next clip would meet too; ffmpeg's exit status is their negative number, or it says their words
_OF_DISK = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """What a decoder finds in a clip: `frames` and `audio_samples` (per channel) are counted, not read from the header."""

    frames: int
    width: int
    height: int
    fps: float
    duration_s: float
    video_codec: str
    pixel_format: str
    audio_codec: str | None
    audio_channels: int
    sampling_rate: int
    faststart: bool
    audio_samples: int = 0


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One stream as decoded, or as stored: units of `tick_s` for `begin` and `end`, bytes for `frame_size`."""

    tick_s: Fraction
    num_packets: int
    end: int
    frame_size: int
    facts: dict[str, str]
    begin: int = 0


def run_ffmpeg(*args: str, stdin: memoryview | None = None, limit_s: float = READ_LIMIT_S, cwd: Path | None = None) -> tuple[bytes, str]:
    """Standard output and error text; `ClipFault` with ffmpeg's last lines when it fails or takes over `limit_s` seconds.

    Raises `EnvironmentFault` where those lines say that it is the disk.
    """
    done = _spawn(args, stdin, limit_s, cwd)
    if done.returncode != 0:
        cause, tail = _disk_error(done), _tail(done.stderr)
        kind, advice = (EnvironmentFault, "make room, then run the same command to go on") if cause else (ClipFault, "render it again")
        got = f"exit status {done.returncode}{f' ({cause})' if cause else ''}"
        raise kind(say("ffmpeg", got, "0", f"{advice}; its last lines{tail or ': none'}"))
    return done.stdout, done.stderr.decode(errors="replace")


def file_url(path: Path) -> str:
    """A path that ffmpeg takes literally, whatever colons, dashes or percent signs are in it."""
    return f"file:{path.absolute()}"


def probe(path: Path) -> ClipInfo:
    """Decode every frame and sample of `path` and say what was there; `RequestError` when it is damaged or not a clip."""
    streams = ("-map", "0:v:0", "-map", "0:a:0?", "-map", "0:a:0?", "-fps_mode", "passthrough", "-c:a:0", "pcm_f32le", "-c:a:1", "copy")
    decoded = _parse_framecrc(_read(path, *streams, "-f", "framecrc", "-").decode())
    if not decoded or decoded[0].end <= 0:
        raise bad(f"clip {str(path)!r}", "no frame with a duration", "a clip", "check the file")
    video, audio = decoded[0], decoded[1] if len(decoded) > 1 else None
    _, log = run_ffmpeg("-i", file_url(path), "-map", "0", "-c", "copy", "-t", "0", "-f", "null", "-")
    duration_s = video.end * video.tick_s
    video_codec, pixel_format = _stream_codec(log, "Video")
    width, height = video.facts["dimensions"].split("x")
    rate = int(audio.facts["sample_rate"]) if audio else 0
    return ClipInfo(
        frames=video.num_packets,
        width=int(width),
        height=int(height),
        fps=float(video.num_packets / duration_s),
        duration_s=float(duration_s),
        video_codec=video_codec,
        pixel_format=pixel_format,
        audio_codec=_stream_codec(log, "Audio")[0] if audio else None,
        audio_channels=audio.frame_size // 4 if audio else 0,
        sampling_rate=rate,
        faststart=is_faststart(path),
        audio_samples=_without_padding(int(audio.end * audio.tick_s * rate), decoded[2], rate) if audio else 0,
    )


def read_comment(path: Path) -> str | None:
    """The comment tag, or None when there is none."""
    return _parse_metadata(_read(path, "-f", "ffmetadata", "-").decode(errors="replace")).get("comment")


def read_frames(path: Path) -> NDArray[np.uint8]:
    """Every frame, (F, H, W, 3) RGB; none dropped or repeated."""
    pictures = ("-map", "0:v:0", "-fps_mode", "passthrough", "-vf", f"{EXACT_SCALE},format=rgb24")
    stream = _read(path, *pictures, "-c:v", "ppm", "-f", "image2pipe", "-")
    if not stream.startswith(b"P6\n"):
        raise bad(f"clip {str(path)!r}", "no frame", "a clip", "check the file")
    header_bytes = len(b"\n".join(stream[:64].split(b"\n", 3)[:3])) + 1  # "P6\n<width> <height>\n255\n" before every picture
    width, height = (int(side) for side in stream[:header_bytes].split()[1:3])
    packed = np.frombuffer(stream, np.uint8).reshape(-1, header_bytes + height * width * 3)  # (F, header + pixels)
    return packed[:, header_bytes:].reshape(-1, height, width, 3)


def read_audio(path: Path, sampling_rate: int, channels: int = 2) -> NDArray[np.float32]:
    """The sound as (channels, samples) in [-1, 1], resampled and mixed when the file differs; `RequestError` when silent."""
    layout = ("-map", "0:a:0", "-ac", str(channels), "-ar", str(sampling_rate))
    stream = np.frombuffer(_read(path, *layout, "-f", "f32le", "-"), np.float32).reshape(-1, channels)
    stored = _parse_framecrc(_read(path, "-map", "0:a:0", "-c", "copy", "-f", "framecrc", "-").decode())
    return stream[: _without_padding(len(stream), stored[0], sampling_rate) if stored else None].T.copy()


def is_faststart(path: Path) -> bool:
    """Whether an MP4's index (moov) lies before its media data (mdat), so that it plays while it is still loading."""
    order: list[bytes] = []
    with path.open("rb") as stream:
        while len(header := stream.read(8)) == 8:
            size, kind = int.from_bytes(header[:4], "big"), header[4:]
            taken = 8
            if size == 1:  # a 64-bit size follows
                size, taken = int.from_bytes(stream.read(8), "big"), 16
            order.append(kind)
            if size < taken or kind == b"mdat":
                break
            stream.seek(size - taken, 1)
    return order[:1] == [b"ftyp"] and b"moov" in order and order[-1] == b"mdat"


def _binary() -> str:
    if imageio_ffmpeg is None:
        raise EnvironmentFault(say("ffmpeg", "no imageio-ffmpeg", "its binary", "pip install imageio-ffmpeg"))
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise EnvironmentFault(say("ffmpeg", error, "the binary of imageio-ffmpeg", "reinstall imageio-ffmpeg")) from error


def _spawn(args: tuple[str, ...], stdin: memoryview | None, limit_s: float, cwd: Path | None) -> subprocess.CompletedProcess[bytes]:
    """In its own process group, so that a Ctrl-C meant for us does not end an encode halfway; when we leave early it is killed."""
    command = [_binary(), "-hide_banner", "-nostats", "-y", *(() if stdin is not None else ("-nostdin",)), *args]
    feed: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    try:
        return subprocess.run(command, capture_output=True, timeout=limit_s, cwd=cwd, process_group=0, check=False, **feed)
    except subprocess.TimeoutExpired as error:
        advice = f"it was stopped; render it again, on a machine with less to do{_tail(error.stderr)}"
        raise ClipFault(say("ffmpeg", f"no end after {limit_s:g} s", "an end", advice)) from error
    except OSError as error:
        raise EnvironmentFault(say("ffmpeg", error, "a runnable binary", "reinstall imageio-ffmpeg")) from error


def _disk_error(done: subprocess.CompletedProcess[bytes]) -> str:
    """What the system says of the disk where that is why ffmpeg failed, else nothing."""
    text = done.stderr.decode(errors="replace")
    is_cut = done.returncode == -signal.SIGXFSZ
    found = [each for each in _OF_DISK if 256 - done.returncode == each or os.strerror(each) in text or (is_cut and each == errno.EFBIG)]
    return os.strerror(found[0]) if found else ""


def _tail(stderr: bytes | None) -> str:
    lines = (stderr or b"").decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  {line.strip()[:300]}" for line in lines)


def _read(path: Path, *output: str) -> bytes:
    """What ffmpeg makes of the file. Any error it logs is final: on a file cut short it logs one, drops the rest and exits with 0."""
    what = f"clip {str(path)!r}"
    if not path.is_file():
        raise bad(what, "no file", "an existing file", "check the path")
    done = _spawn(("-v", "error", "-xerror", "-i", file_url(path), *output), None, READ_LIMIT_S, None)
    if done.returncode != 0 or done.stderr.strip():
        raise bad(what, "a file that does not decode", "a complete clip with what is read", f"check the file{_tail(done.stderr)}")
    return done.stdout


def _without_padding(num_samples: int, stored: _Decoded, rate: int) -> int:
    """How many of the samples are the sound: ffmpeg before 8 also decodes what fills the coder's last frame.

    The packets say where the sound ends, exactly where they are timed by sample (MP4, not Matroska).
    """
    is_exact = stored.tick_s == Fraction(1, int(stored.facts["sample_rate"]))
    length = (stored.end - max(0, stored.begin)) * stored.tick_s  # the coder's run-up lies before 0
    return min(num_samples, round(length * rate)) if is_exact else num_samples


def _parse_framecrc(table: str) -> list[_Decoded]:
    """Streams in order, from ffmpeg's framecrc table: `#name index: value` lines, then `index, dts, pts, duration, size, crc` rows."""
    facts: dict[int, dict[str, str]] = {}
    rows: dict[int, list[list[int]]] = {}
    for line in table.splitlines():
        if line.startswith("#"):
            name, _, value = line[1:].partition(": ")
            name, _, stream = name.partition(" ")
            if stream:
                facts.setdefault(int(stream), {})[name] = value
        else:
            stream, *fields = line.split(",")[:5]
            rows.setdefault(int(stream), []).append([int(field) for field in fields])
    decoded = []
    for index in sorted(rows):
        _, pts, duration, size = rows[index][-1]
        tick_s, begin = Fraction(facts[index]["tb"]), rows[index][0][1]
        decoded.append(_Decoded(tick_s, len(rows[index]), pts + duration, size // max(1, duration), facts[index], begin))
    return decoded


def _stream_codec(log: str, kind: str) -> tuple[str, str]:
    """Codec and sample format from ffmpeg's first line like `Video: h264 (High) (avc1 / 0x31), yuv420p(tv, bt709), 96x64, ...`."""
    codec, form = log.partition(f": {kind}: ")[2].splitlines()[0].split(", ")[:2]
    return codec.split(" ")[0], form.split("(")[0]


def _parse_metadata(text: str) -> dict[str, str]:
    """The global tags of an ffmetadata file, names in lower case; a backslash there makes the next character literal."""
    tags: dict[str, str] = {}
    key: str | None = None
    part: list[str] = []
    characters = iter(text)
    for character in characters:
        if character == "\\":
            part.append(next(characters, ""))
        elif character == "=" and key is None:
            key, part = "".join(part).lower(), []
        elif character == "\n":
            if key is None and "".join(part).startswith("["):
                break
            if key is not None:
                tags[key] = "".join(part)
            key, part = None, []
        else:
            part.append(character)
    return tags
