"""Calibration end to end at tiny size: what is lost is measured, the walk stops, a rerun measures nothing twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from caches.certificate import read_certificate
from caches.prior import Prior
from eval import calibrate_command
from eval.cache_cases import cases_of
from eval.cache_loss import Tolerances, loss, loss_parts
from eval.cache_prior import measure_prior
from eval.calibration import stratum_of
from eval.losses import Losses, questions, settings_of
from eval.metrics.pair import Clip, Pair
from eval.quality_cases import Case, Shape
from videogen.cli.main import main
from videogen.config import Request, StepCache
from videogen.errors import RequestError
from videogen.pipeline import Pipeline
from videogen.priors import open_prior, prior_text


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


def calibrate(model: Path, output: Path, *more: str, steps: int = 7) -> int:
    shape = ["--size", "96x64", "--frames", "22", "--steps", str(steps), "--model", str(model)]
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


WIDE = ("--lambdas", "50", "--video", "9", "--motion", "999", "--spectrum", "999", "--level", "999", "--overwrite")
ONE = (*WIDE, "--clips", "1", "--alpha", "0.95", "--prior", "none")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_losses_of_another_question_are_measured_again(tiny_model: Path, tmp_path: Path) -> None:
    used, fresh = tmp_path / "used.json", tmp_path / "fresh.json"
    journal, asked = used.with_suffix(".losses.jsonl"), [*ONE, "--max-streak", "5"]
    assert calibrate(tiny_model, used, *ONE) == 0
    assert calibrate(tiny_model, used, *asked, steps=12) == 0
    assert calibrate(tiny_model, fresh, *asked, steps=12) == 0
    assert used.read_text() == fresh.read_text() and read_certificate(used.read_text(), "c").mean_reused > 0.5
    before = journal.read_text()
    assert len({row["question"] for row in lines(journal)}) == len(lines(journal)) == 2
    assert calibrate(tiny_model, used, *ONE) == 0 and journal.read_text() == before  # the first question's row is still there


def test_rows_without_a_question_or_of_another_request_count_as_not_measured(tiny_pipeline: Pipeline, tmp_path: Path) -> None:
    path, prior = tmp_path / "a.losses.jsonl", Prior({"video": (1.0,)}, {"video": ((1.0,),)}, {"video": ((1.0,),)}, 1)
    case = Case("a", Request("a red circle", size=(96, 64), frames=22, steps=8), 1)
    row = {"lam": 0.1, "case": "a", "parts": {"video": 0.1}, "reused": 0.5}

    def known(case: Case = case, parallel: str = "1", pipeline: Pipeline = tiny_pipeline, **options: object) -> Losses:
        return Losses(path, questions(pipeline, [case], settings_of(StepCache(lam=0.1, **options)), parallel))  # type: ignore[arg-type]

    path.write_text(json.dumps(row) + "\n")
    assert not known().rows and len(Losses(path).rows) == 1
    known().add(row)
    other = tiny_pipeline.sharing(replace(tiny_pipeline.recipe, savings=replace(tiny_pipeline.savings, matmul="bfloat16")))
    assert known().rows[0.1, "a"]["parts"] == row["parts"] and len(known(streams="each").rows) == 1
    for odd in (
        known(replace(case, seed=2)),
        known(replace(case, request=replace(case.request, prompt="a blue circle"))),
        known(replace(case, request=replace(case.request, size=(112, 80)))),
        known(replace(case, request=replace(case.request, image=Image.new("RGB", (96, 64), "red")))),
        known(parallel="batched 8"),
        known(pipeline=other),
        known(max_streak=4),
        known(video_order=1),
        known(audio_order=1),
        known(drift_order=0),
        known(warm_up=0.5),
        known(prior=prior),
    ):
        assert not odd.rows
    assert known(prior=prior).questions == known(prior=prior, prior_file="b").questions != known(prior=replace(prior, clips=2)).questions
    red, blue = (replace(case, request=replace(case.request, image=Image.new("RGB", (96, 64), each))) for each in ("red", "blue"))
    assert known(red).questions != known(blue).questions


def test_a_measured_prior_is_kept_for_shards_and_the_last_call(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, measured = tmp_path / "c.json", []

    def counted(*args: Any) -> Prior:
        measured.append(1)
        return measure_prior(*args)

    monkeypatch.setattr(calibrate_command, "measure_prior", counted)
    monkeypatch.setattr(calibrate_command, "PRIOR_CLIPS", 1)
    two, kept = ("--clips", "2", "--alpha", "0.8", *WIDE), tmp_path / "c.prior.json"
    for shard in ("0/2", "1/2"):
        assert calibrate(tiny_model, output, *two[:-1], "--shard", shard) == 0
    assert calibrate(tiny_model, output, *two) == 0 and len(measured) == 1 and len(lines(tmp_path / "c.losses.jsonl")) == 2
    assert read_certificate(output.read_text(), "c").prior == open_prior(kept).prior
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.losses.jsonl", "c.prior.json"]
    kept_text = kept.read_text()
    output.unlink()
    assert calibrate(tiny_model, output, *two[:-1], steps=8) == 2 and kept.read_text() == kept_text  # nor is it anyone's to replace
    for broken, count in ((kept_text, 2), ("{", 3)):
        kept.write_text(broken)
        assert calibrate(tiny_model, output, *two, "--shard", "0/9", steps=8) == 0 and len(measured) == count
        assert open_prior(kept).of.steps == 8  # type: ignore[union-attr]


def test_the_faster_shards_prior_is_taken(tiny_pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cases = tmp_path / "c.prior.json", cases_of("fit", 1, "t2va", Shape(size=(96, 64), frames=22, steps=7), tiny_pipeline)
    mine = measure_prior(tiny_pipeline, cases)
    theirs = replace(mine, probe=mine.rest)

    def late(*_: Any) -> Prior:
        path.write_text(prior_text(theirs, stratum_of(tiny_pipeline, cases, "1")))
        return mine

    monkeypatch.setattr(calibrate_command, "measure_prior", late)
    assert calibrate_command._kept_prior(path, tiny_pipeline, cases, False).digest == theirs.digest != mine.digest
    assert [each.name for each in tmp_path.iterdir()] == ["c.prior.json"]


def job_file(path: Path, *jobs: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return str(path)


def test_other_strata_are_named_before_anything_is_rendered(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pipeline, "load", lambda *_: pytest.fail("a weight was loaded"))
    jobs = [{"prompt": "a", "steps": 7}, {"prompt": "b", "steps": 7}, {"prompt": "c", "steps": 9}]
    asked = ["calibrate", "--model", str(tiny_model), "--size", "96x64", "--frames", "22", "-o", str(tmp_path / "c.json")]
    rates = ["--clips", "3", "--alpha", "0.6", "--prompts", job_file(tmp_path / "j.jsonl", *jobs)]
    for more in ([], ["--shard", "0/3"], ["--prior-only"]):
        assert main([*asked, *rates, *more]) == 2
        assert "2 strata (steps 9 instead of 7)" in capsys.readouterr().err


def test_seeds_of_one_prompt_are_told(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for prompts in ("aa", "ab"):
        jobs = job_file(tmp_path / f"{prompts}.jsonl", *({"prompt": each, "seed": k} for k, each in enumerate(prompts)))
        assert calibrate(tiny_model, tmp_path / f"{prompts}.json", *ONE, "--clips", "2", "--shard", "1/9", "--prompts", jobs) == 0
        told.append("seeds of one prompt are not independent" in capsys.readouterr().err)
    assert told == [True, False]


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
        (["--skip", "500", "--recipe", "plain"], "--skip plus --clips: got '500 + 52', expected at most the calibrate part"),
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
