"""A clip on disk holds every frame and sample it was given, with its record inside, or it does not exist."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from videogen import ffmpeg, media
from videogen.errors import EnvironmentFault, RequestError
from videogen.media import Encoding, encode_files, probe, read_audio, read_comment, read_frames, to_uint8, write_clip

RATE = 32_000
NASTY = json.dumps(
    {"k=v;#\\": 'quote " and \\n', "line\nbreak\r\ttab": "é 日本 😀", "[CHAPTER]": ";FFMETADATA1", "long": "=;#\\\n" * 4000},
    ensure_ascii=False,
)


FULL = Encoding(lossless=True, save_frames=True)


def picture(num_frames: int = 22, height: int = 64, width: int = 96) -> NDArray[np.float32]:
    """A colour gradient that drifts, one distinct brightness a frame."""
    f, y, x = np.meshgrid(np.arange(num_frames), np.arange(height), np.arange(width), indexing="ij")
    planes = (x / width, y / height, 0.5 + 0 * x)
    return np.stack([0.6 * plane + 0.4 * f / num_frames for plane in planes], -1).astype(np.float32)


def tone(num_samples: int, channels: int = 2, rate: int = RATE) -> NDArray[np.float32]:
    hertz = np.array([440.0, 660.0])[:channels, None]
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(num_samples) / rate)).astype(np.float32)


def write(path: Path, frames: NDArray[Any], audio: NDArray[Any] | None = None, **changes: Any) -> media.ClipInfo:
    options: dict[str, Any] = {"fps": 24.0, "sampling_rate": RATE, "encoding": Encoding(), "comment": "{}"} | changes
    return write_clip(path, frames, audio, **options)


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_clip_has_every_frame_the_exact_length_and_starts_fast(tmp_path: Path) -> None:
    path = tmp_path / "clip one: 100%05d.mp4"
    num_samples = round(22 / 24 * RATE)
    info = write(path, picture(), tone(num_samples))
    assert info == probe(path)
    assert (info.frames, info.width, info.height, info.fps) == (22, 96, 64, 24.0)
    assert info.duration_s == pytest.approx(22 / 24, abs=1e-9) and info.audio_samples == num_samples
    assert (info.video_codec, info.pixel_format, info.faststart) == ("h264", "yuv420p", True)
    assert (info.audio_codec, info.audio_channels, info.sampling_rate) == ("aac", 2, RATE)
    assert listing(tmp_path) == [path.name]
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_frames_come_back_in_order_and_true_in_colour(tmp_path: Path) -> None:
    frames = picture()
    write(tmp_path / "a.mp4", frames)
    got = read_frames(tmp_path / "a.mp4")
    assert got.shape == frames.shape and got.dtype == np.uint8
    error = got.astype(np.float32) - frames * 255
    assert np.abs(error).mean() < 1.0 and abs(error.mean()) < 0.1  # a wrong matrix or range costs more than 5 levels
    _, log = ffmpeg.run_ffmpeg("-i", ffmpeg.file_url(tmp_path / "a.mp4"), "-f", "null", "-")
    assert "yuv420p(tv, bt709, progressive)" in log  # says so to every player
    for colour in ((255, 0, 0), (0, 0, 255), (200, 150, 90)):
        write(tmp_path / "b.mp4", np.full((2, 32, 32, 3), colour, np.uint8))
        assert np.abs(read_frames(tmp_path / "b.mp4").astype(int) - colour).max() <= 2, colour


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 24.0), (22, 23.976), (9, 30_000 / 1001), (5, 12.5)])
def test_any_rate_gives_its_exact_length(tmp_path: Path, num_frames: int, fps: float) -> None:
    info = write(tmp_path / "a.mp4", picture(num_frames, 16, 32), tone(100), fps=fps)
    assert info.frames == num_frames and info.fps == pytest.approx(fps, rel=1e-6)
    assert info.duration_s == pytest.approx(num_frames / fps, abs=1e-5) and info.audio_samples == round(num_frames / fps * RATE)


@pytest.mark.parametrize("rate", [8_000, 16_000, 32_000, 44_100])
def test_sound_survives_from_its_first_sample(tmp_path: Path, rate: int) -> None:
    audio = tone(round(22 / 24 * rate), rate=rate)
    assert write(tmp_path / "a.mp4", picture(), audio, sampling_rate=rate).sampling_rate == rate
    got = read_audio(tmp_path / "a.mp4", rate)
    assert got.shape == audio.shape and got.dtype == np.float32
    assert np.abs(got - audio)[:, : rate // 20].max() < 0.1  # ffmpeg's default AAC coder is off by 0.43 here
    assert np.abs(got - audio).max() < 0.15 and np.abs(got - audio).mean() < 0.01


def test_sound_is_upmixed_trimmed_padded_and_clipped(tmp_path: Path) -> None:
    num_samples = round(22 / 24 * RATE)
    mono = tone(num_samples + 5_000, channels=1)
    write(tmp_path / "long.mp4", picture(), mono)
    got = read_audio(tmp_path / "long.mp4", RATE)
    assert got.shape == (2, num_samples) and np.abs(got - mono[:, :num_samples]).max() < 0.15
    write(tmp_path / "short.mp4", picture(), 1.2 * np.sign(tone(num_samples // 2)), encoding=Encoding(lossless=True))
    assert np.abs(read_audio(tmp_path / "short.lossless.mkv", RATE)).max() == 1.0
    got = read_audio(tmp_path / "short.mp4", RATE)
    assert got.shape == (2, num_samples) and np.abs(got[:, num_samples // 2 + 3000 :]).max() < 1e-3
    write(tmp_path / "silent.mp4", picture(), np.zeros((2, num_samples), np.float32))
    assert np.abs(read_audio(tmp_path / "silent.mp4", RATE)).max() < 1e-4


def test_noise_keeps_its_shape(tmp_path: Path) -> None:
    noise = (0.1 * np.random.default_rng(0).normal(size=(2, RATE))).astype(np.float32)
    write(tmp_path / "a.mp4", picture(24), noise)
    error = read_audio(tmp_path / "a.mp4", RATE) - noise
    assert 10 * np.log10((noise**2).sum() / (error**2).sum()) > 10  # 13.0 dB; 4.9 with noise substitution


def test_read_audio_resamples_and_mixes(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", picture(24), tone(RATE))
    assert read_audio(tmp_path / "a.mp4", 8_000, channels=1).shape == (1, 8_000)


def test_a_clip_without_sound_has_no_audio_stream(tmp_path: Path) -> None:
    info = write(tmp_path / "a.mp4", picture(), None, comment=NASTY)
    assert (info.audio_codec, info.audio_channels, info.sampling_rate, info.audio_samples) == (None, 0, 0, 0)
    assert read_comment(tmp_path / "a.mp4") == NASTY
    with pytest.raises(RequestError, match="matches no streams"):
        read_audio(tmp_path / "a.mp4", RATE)


@pytest.mark.parametrize("comment", [NASTY, "  spaces \\ kept \r\n \\", "a" * 200_000, "[x]\n;y\n=", "", "\U0010ffff\x01\x7f", "\r", "\\"])
def test_the_comment_comes_back_as_it_was(tmp_path: Path, comment: str) -> None:
    write(tmp_path / "a.mp4", picture(2), tone(100), comment=comment)
    assert (read_comment(tmp_path / "a.mp4") or "") == comment


@pytest.mark.parametrize("comment", ["nul \0 inside", "lone \ud800 surrogate"])
def test_a_comment_that_cannot_be_stored_is_refused(tmp_path: Path, comment: str) -> None:
    with pytest.raises(RequestError, match="comment"):
        write(tmp_path / "a.mp4", picture(2), comment=comment)
    assert listing(tmp_path) == []


def test_companions_are_bit_exact(tmp_path: Path) -> None:
    path, encoding = tmp_path / "a.b.mp4", Encoding(crf=40, lossless=True, save_frames=True)
    frames = np.random.default_rng(0).integers(0, 256, (7, 34, 38, 3), np.uint8)
    audio = tone(round(7 / 24 * RATE))
    write(path, frames, audio, encoding=encoding)
    files = encode_files(path, encoding)
    assert [file.name for file in files] == ["a.b.mp4", "a.b.lossless.mkv", "a.b.frames"] and listing(tmp_path) == sorted(
        f.name for f in files
    )
    assert np.array_equal(read_frames(files[1]), frames) and np.array_equal(read_audio(files[1], RATE), audio)
    assert listing(files[2]) == [f"{index:05d}.png" for index in range(7)]
    for index, frame in enumerate(frames):
        assert np.array_equal(np.asarray(Image.open(files[2] / f"{index:05d}.png")), frame)
    assert encode_files(path, Encoding()) == [path]


def test_views_and_relative_names_with_colons_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frames = np.random.default_rng(0).integers(0, 256, (32, 64, 2, 3), np.uint8).transpose(2, 0, 1, 3)[:, ::2]
    write(Path("data:-a.mp4"), frames, encoding=FULL)
    assert np.array_equal(read_frames(Path("data:-a.lossless.mkv")), frames) and probe(Path("data:-a.mp4")).frames == 2


def test_no_frame_is_dropped_or_repeated_when_times_are_uneven(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", picture(8))
    uneven = ("-vf", "setpts=N*N/24/TB", "-fps_mode", "passthrough", "-c:v", "ffv1", ffmpeg.file_url(tmp_path / "b.mkv"))
    ffmpeg.run_ffmpeg("-i", ffmpeg.file_url(tmp_path / "a.mp4"), *uneven)
    assert len(read_frames(tmp_path / "b.mkv")) == probe(tmp_path / "b.mkv").frames == 8


def test_only_global_tags_are_read() -> None:
    text = ";FFMETADATA1\nTitle=a\\=b\ncomment=c\n[STREAM]\ncomment=Cover (front)\n"
    assert ffmpeg._parse_metadata(text) == {"title": "a=b", "comment": "c"}


def test_crf_decides_size_and_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    sizes = []
    for name, crf in (("a", 16), ("b", 16), ("c", 40)):
        write(tmp_path / f"{name}.mp4", picture(), tone(RATE), encoding=Encoding(crf=crf))
        sizes.append((tmp_path / f"{name}.mp4").stat().st_size)
    assert sizes[2] < sizes[0] and (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize("crf", [-1, 52, 16.0, True, "16"])
def test_crf_is_checked(crf: Any) -> None:
    with pytest.raises(RequestError, match="crf"):
        Encoding(crf=crf)


def test_to_uint8_rounds_and_clips(tmp_path: Path) -> None:
    values = np.array([0.0, -0.01, 1.0, 1.004, 0.5, 0.4 / 255, 0.6 / 255, 199.6 / 255, 1.4], np.float32)
    for dtype in (np.float16, np.float32, np.float64):
        got = to_uint8(values.astype(dtype).reshape(1, 3, 1, 3))
        assert got.ravel().tolist() == [0, 0, 255, 255, 128, 0, 1, 200, 255] and got.dtype == np.uint8
    whole = np.full((2, 4, 4, 3), 200, np.uint8)
    assert to_uint8(whole) is whole


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 200.0, -1.0])
def test_a_frame_out_of_range_is_refused_and_named(value: float) -> None:
    frames = picture(3, 4, 4)
    frames[1, 2, 3, 0] = value
    with pytest.raises(RequestError, match=r"frame 1: got 'values from .* expected finite values in"):
        to_uint8(frames)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (1, 0, 4, 3), (4, 4, 3), (1, 4, 4, 4), (1, 3, 4, 4), (0,)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="frames: got"):
        to_uint8(np.zeros(shape, np.float32))


def test_other_integers_are_refused() -> None:
    with pytest.raises(RequestError, match="int64"):
        to_uint8(np.zeros((1, 4, 4, 3), np.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": picture(2, 45, 64)}, "64x45"),
        ({"frames": picture(2, 64, 67)}, "67x64"),
        ({"fps": 0.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"sampling_rate": 20_000}, "sampling rate"),
        ({"audio": np.full((2, 100), np.nan, np.float32)}, "audio"),
        ({"audio": np.full((2, 100), 3000.0, np.float32)}, "audio"),
        ({"audio": np.zeros((2, 100), np.int16)}, "int16"),
        ({"audio": np.zeros((100, 2), np.float32)}, "channels, samples"),
        ({"audio": np.zeros((2, 0), np.float32)}, "channels, samples"),
        ({"audio": np.zeros(100, np.float32)}, "channels, samples"),
        ({"name": "a.avi"}, ".mp4"),
        ({"name": "missing/a.mp4"}, "existing folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"frames": picture(2), "audio": tone(100), "name": "a.mp4"} | changes
    with pytest.raises(RequestError, match=message):
        write(tmp_path / given.pop("name"), given.pop("frames"), given.pop("audio"), **given)
    assert listing(tmp_path) == []


def fake_binary(folder: Path, script: str) -> str:
    binary = folder / "ffmpeg"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    return str(binary)


def test_files_are_on_disk_before_they_have_names_and_the_clip_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    named: list[str] = []
    sync, move = os.fsync, os.replace

    def watch_move(source: Path, target: Path) -> None:
        assert source.stat().st_ino in synced
        named.append(target.name)
        move(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), sync(descriptor)))
    monkeypatch.setattr(os, "replace", watch_move)
    write(tmp_path / "a.mp4", picture(2), encoding=FULL)
    assert named == ["a.frames", "a.lossless.mkv", "a.mp4"] and synced[-1] == tmp_path.stat().st_ino
    assert (tmp_path / "a.frames" / "00001.png").stat().st_ino in synced


def test_a_folder_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").mkdir()
    with pytest.raises(RequestError, match="file name ending"):
        write(tmp_path / "a.mp4", picture(2))


def test_ffmpeg_is_out_of_reach_of_our_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffmpeg, "_binary", lambda: fake_binary(tmp_path, "ps -o pgid= $$ || cut -d' ' -f5 /proc/$$/stat"))
    group, _ = ffmpeg.run_ffmpeg()
    assert int(group) != os.getpgid(0)


def test_a_file_without_a_frame_is_no_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = fake_binary(tmp_path, "exit 0")
    monkeypatch.setattr(ffmpeg, "_binary", lambda: binary)
    for read in (probe, read_frames):
        with pytest.raises(RequestError, match="no frame"):
            read(Path(binary))


def test_a_failing_ffmpeg_leaves_the_old_clip_and_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.mp4").write_bytes(b"old")
    monkeypatch.setattr(ffmpeg, "_binary", lambda: fake_binary(tmp_path, "echo No space left on device >&2; exit 228"))
    with pytest.raises(EnvironmentFault, match=r"(?s)exit status 228.*No space left"):
        write(out / "a.mp4", picture(2), tone(100), encoding=FULL)
    assert listing(out) == ["a.mp4"] and (out / "a.mp4").read_bytes() == b"old"


@pytest.mark.parametrize(
    "lie",
    [{"frames": 21}, {"audio_samples": 3}, {"faststart": False}, {"duration_s": 0.9}, {"audio_codec": None}, {"pixel_format": "yuv444p"}],
)
def test_a_clip_that_reads_back_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any]) -> None:
    monkeypatch.setattr(media, "probe", lambda path: replace(probe(path), **lie))
    with pytest.raises(EnvironmentFault, match="read back"):
        write(tmp_path / "a.mp4", picture(), tone(100))
    assert listing(tmp_path) == []


def test_a_comment_that_reads_back_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "read_comment", lambda _: None)
    with pytest.raises(EnvironmentFault, match="comment tag"):
        write(tmp_path / "a.mp4", picture(2))
    assert listing(tmp_path) == []


@pytest.mark.parametrize("broken", ["ffv1", "image2"])
def test_a_companion_that_is_not_exact_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def other_pixels(*args: str, stdin: memoryview | None = None, **options: Any) -> tuple[bytes, str]:
        if broken in args and stdin is not None:
            stdin = bytes(stdin[:-1]) + b"\x07"  # type: ignore[assignment]
        return ffmpeg.run_ffmpeg(*args, stdin=stdin, **options)

    monkeypatch.setattr(media, "run_ffmpeg", other_pixels)
    with pytest.raises(EnvironmentFault, match="read back"):
        write(tmp_path / "a.mp4", picture(2), encoding=FULL)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_rename_takes_its_companions_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    move = os.replace

    def fail_on_the_clip(source: Path, target: Path) -> None:
        if target.suffix == ".mp4":
            raise fault
        move(source, target)

    monkeypatch.setattr(os, "replace", fail_on_the_clip)
    with pytest.raises(EnvironmentFault if isinstance(fault, OSError) else KeyboardInterrupt):
        write(tmp_path / "a.mp4", picture(2), encoding=FULL)
    assert listing(tmp_path) == []


def test_leftovers_of_a_killed_run_are_replaced_but_foreign_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    for name in ("a.mp4.part", ".a.mp4.f32", ".a.mp4.tags", "a.lossless.mkv.part"):
        (tmp_path / name).write_bytes(b"half")
    for folder in ("a.frames.part", "a.frames"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "00099.png").write_bytes(b"half")
    write(path, picture(2), tone(100), encoding=FULL)
    assert listing(tmp_path) == ["a.frames", "a.lossless.mkv", "a.mp4"] and listing(tmp_path / "a.frames") == ["00000.png", "00001.png"]
    (tmp_path / "a.frames" / "notes.txt").write_text("mine")
    with pytest.raises(EnvironmentFault, match="not empty"):
        write(path, picture(2), encoding=FULL)
    assert (tmp_path / "a.frames" / "notes.txt").read_text() == "mine"


def test_a_hung_ffmpeg_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffmpeg, "_binary", lambda: fake_binary(tmp_path, "echo still here >&2; exec sleep 60"))
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"(?s)no end after 0\.3 s.*still here"):
        ffmpeg.run_ffmpeg("-version", limit_s=0.3)
    assert time.monotonic() - started < 10


def test_what_is_no_clip_is_refused_by_every_reader(tmp_path: Path) -> None:
    whole, text, cut = tmp_path / "a.mp4", tmp_path / "text.mp4", tmp_path / "cut.mp4"
    write(whole, picture(), tone(RATE))
    text.write_text("hello")
    cut.write_bytes(whole.read_bytes()[:-6000])
    for path in (text, cut, tmp_path / "none.mp4", tmp_path):
        for read in (probe, read_frames, lambda path: read_audio(path, RATE)):
            with pytest.raises(RequestError, match="clip '"):
                read(path)
    with pytest.raises(RequestError, match="clip '"):
        read_comment(text)


def test_an_index_at_the_end_is_not_faststart(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", picture(2))
    slow = ("-i", ffmpeg.file_url(tmp_path / "a.mp4"), "-c", "copy", ffmpeg.file_url(tmp_path / "slow.mp4"))
    ffmpeg.run_ffmpeg(*slow)
    assert ffmpeg.is_faststart(tmp_path / "a.mp4") and not ffmpeg.is_faststart(tmp_path / "slow.mp4")
    (tmp_path / "large.mp4").write_bytes(
        b"\0\0\0\x08ftyp" + b"\0\0\0\1free" + (24).to_bytes(8, "big") + b"12345678" + b"\0\0\0\x08moov\0\0\0\x08mdat"
    )
    assert ffmpeg.is_faststart(tmp_path / "large.mp4")
