"""Calibration end to end at tiny size: what is lost is measured, the walk stops, a rerun measures nothing twice."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caches.certificate import read_certificate
from eval.cache_loss import Tolerances, loss, loss_parts
from eval.metrics.pair import Clip, Pair
from videogen.cli.main import main
from videogen.errors import RequestError


def clip(frames: np.ndarray, audio: np.ndarray) -> Clip:
    return Clip(frames, audio, 8000, 24.0)


@pytest.fixture
def good() -> Clip:
    rng = np.random.default_rng(0)
    base = rng.integers(40, 200, (32, 32, 3))
    frames = np.stack([np.roll(base, k, axis=1) for k in range(22)]).astype(np.uint8)
    tone = 0.5 * np.sin(2 * np.pi * 480 * np.arange(7333) / 8000)
    return clip(frames, np.stack([tone, tone]).astype(np.float32))


def test_identical_clips_lose_nothing_and_each_damage_its_own_part(good: Clip) -> None:
    assert max(loss_parts(Pair(good, good)).values()) < 1e-6
    one_bad_second = good.frames.copy()
    one_bad_second[:4] = 255 - one_bad_second[:4]
    frozen = np.repeat(good.frames[:1], 22, axis=0)
    for frames, audio, part in (
        (one_bad_second, good.audio, "video"),
        (frozen, good.audio, "motion"),
        (good.frames, good.audio * 0.5, "level"),
        (good.frames, np.sign(good.audio) * 0.35, "spectrum"),
    ):
        parts = loss_parts(Pair(clip(frames, audio.astype(np.float32)), good))
        assert loss(parts, Tolerances()) > 1 and parts[part] > getattr(Tolerances(), part), part
    with pytest.raises(RequestError, match="tolerance video"):
        Tolerances(video=0.0)


def calibrate(model: Path, output: Path, *more: str) -> int:
    shape = ["--size", "96x64", "--frames", "22", "--steps", "7", "--model", str(model)]
    return main(["calibrate", *shape, "--clips", "3", "--alpha", "0.6", "--delta", "0.1", "-o", str(output), *more])


def test_a_certificate_is_written_and_a_rerun_measures_nothing_twice(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--video", "9", "--motion", "999", "--spectrum", "999", "--level", "999"]
    output = tmp_path / "c.json"
    assert calibrate(tiny_model, output, "--lambdas", "5,50", *wide) == 0
    told = capsys.readouterr().out
    certificate = read_certificate(output.read_text(), "c.json")
    assert certificate.lam == 50 and certificate.n == 3 and certificate.violations == 0 and "with confidence 0.9" in told
    assert certificate.fingerprint.canvas == "96x64x22" and certificate.fingerprint.steps == 7
    losses = output.with_suffix(".losses.jsonl")
    before = losses.read_text()
    assert calibrate(tiny_model, output, "--lambdas", "5,50", *wide) == 2
    assert calibrate(tiny_model, output, "--lambdas", "5,50", "--overwrite", *wide) == 0
    assert losses.read_text() == before and len(before.splitlines()) == 6
    assert read_certificate(output.read_text(), "c.json") == certificate
    assert replace(certificate.fingerprint, steps=9) != certificate.fingerprint


def test_a_loss_above_tolerance_ends_the_walk_with_4(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(tiny_model, tmp_path / "c.json", "--lambdas", "50,60", "--video", "1e-9") == 4
    assert "no lambda certified" in capsys.readouterr().out and not (tmp_path / "c.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "c.losses.jsonl").read_text().splitlines()]
    assert {row["lam"] for row in rows} == {50.0}


def test_a_second_test_sees_other_clips(tiny_model: Path, tmp_path: Path) -> None:
    seen = []
    for skipped in ("0", "3"):
        output = tmp_path / f"{skipped}.json"
        assert calibrate(tiny_model, output, "--lambdas", "50", "--shard", "0/1", "--skip", skipped) == 0
        seen.append({json.loads(line)["case"] for line in output.with_suffix(".losses.jsonl").read_text().splitlines()})
    assert len(seen[0]) == len(seen[1]) == 3 and not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--skip", "-1"], "--skip"),
        (["--skip", "3", "--prior-only"], "--skip"),
        (["--clips", "1"], "--clips"),
        (["--lambdas", "0.2,0.1"], "--lambdas"),
        (["--lambdas", "0,0.1"], "--lambdas"),
        (["--lambdas", "x"], "--lambdas"),
        (["--alpha", "2"], "--alpha"),
        (["--video", "0"], "tolerance video"),
    ],
)
def test_wrong_options_end_with_2(options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "c.json"), *options]) == 2
    assert word in capsys.readouterr().err
