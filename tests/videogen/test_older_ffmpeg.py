"""ffmpeg before 8 decodes the coder's padding as sound and stores its end to a millisecond: clips of it are whole, shorter ones are not."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from videogen import ffmpeg, media
from videogen.media import Encoding, probe, read_audio, write_clip

RATE, SAMPLES = 8_000, 7_333  # seven frames of the coder and 165 samples
SOUND = (0.1 * np.sin(np.arange(SAMPLES) / 9) * np.ones((2, 1))).astype(np.float32)


def write(path: Path) -> media.ClipInfo:
    frames = np.zeros((22, 32, 32, 3), np.uint8)
    return write_clip(path, frames, SOUND, fps=24.0, sampling_rate=RATE, encoding=Encoding(), comment="{}")


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's ffmpeg decodes, with the padding behind it."""
    parse, read = ffmpeg._parse_framecrc, ffmpeg._read

    def parsed(table: str) -> list[Any]:
        found = parse(table)
        return [found[0], replace(found[1], end=8 * 1024), *found[2:]] if len(found) > 1 else found

    def padded(path: Path, *output: str) -> bytes:
        return read(path, *output) + (b"\x01" * 8 * (8 * 1024 - SAMPLES) if "f32le" in output else b"")

    monkeypatch.setattr(ffmpeg, "_parse_framecrc", parsed)
    monkeypatch.setattr(ffmpeg, "_read", padded)


def test_padding_is_not_sound(tmp_path: Path, older: None) -> None:
    info = write(tmp_path / "a.mp4")
    assert info == probe(tmp_path / "a.mp4") and info.audio_samples == SAMPLES
    got = read_audio(tmp_path / "a.mp4", RATE)
    assert got.shape == SOUND.shape and np.abs(got - SOUND).max() < 0.05
    assert read_audio(tmp_path / "a.mp4", 2 * RATE).shape[1] == 2 * SAMPLES


@pytest.mark.parametrize(
    ("tick", "end", "kept"), [(Fraction(1, RATE), 7333, 7333), (Fraction(1, RATE), 9000, 8192), (Fraction(1, 1000), 917, 8192)]
)
def test_only_packets_timed_by_sample_say_where_sound_ends(tick: Fraction, end: int, kept: int) -> None:
    stored = ffmpeg._Decoded(tick, 8, end, 100, {"sample_rate": str(RATE)})
    assert ffmpeg._without_padding(8192, stored, RATE) == kept
    assert ffmpeg._without_padding(8192, replace(stored, begin=-1024), RATE) == kept  # the coder's run-up
    late = replace(stored, end=end + 500, begin=500)  # sound that begins after the picture
    assert ffmpeg._without_padding(8192, late, RATE) == kept


@pytest.mark.parametrize(("by", "is_whole"), [(0, True), (3, True), (-8, True), (9, False), (-9, False), (-1024, False)])
def test_a_millisecond_is_the_most_that_sound_may_differ_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: int, is_whole: bool
) -> None:
    monkeypatch.setattr(media, "probe", lambda path: replace(probe(path), audio_samples=SAMPLES + by))
    if is_whole:
        assert write(tmp_path / "a.mp4").audio_samples == SAMPLES + by
        return
    with pytest.raises(media.ClipFault, match="read back"):
        write(tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())
