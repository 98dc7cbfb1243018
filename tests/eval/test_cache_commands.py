"""The commands that measure the step cache, end to end at tiny size."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from caches.certificate import Certificate
from eval import cache_fit, cache_heldout, cache_overhead
from eval.batched_engine import Batch
from eval.cases import Workload
from videogen.config import Request
from videogen.errors import RequestError
from videogen.pipeline import Pipeline

Run = Callable[..., None]
SHAPE = ["--size", "96x64", "--frames", "22", "--steps", "12"]


@pytest.fixture
def run(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Run:
    for module in (cache_fit, cache_heldout):
        monkeypatch.setattr(module, "open_pipeline", lambda *_, **__: tiny_pipeline)

    def call(module: object, *args: object) -> None:
        monkeypatch.setattr(sys, "argv", ["x", *map(str, args)])
        module.main()  # type: ignore[attr-defined]

    return call


def test_fit_tells_every_setting(run: Run, tmp_path: Path) -> None:
    run(cache_fit, *SHAPE, "--clips", 2, "--lambdas", "1e-9,50", "--orders", "221,000", "--out", tmp_path)
    report = json.loads((tmp_path / "cache-fit.json").read_text())
    rows = {(row["video_order"], row["lambda"]): row for row in report["rows"]}
    assert len(rows) == 4 and {row["clips"] for row in rows.values()} == {2}
    assert rows[2, 1e-9]["computed"] == 1 and rows[2, 50]["computed"] < 0.6
    assert rows[2, 1e-9]["loss"] < rows[2, 50]["loss"] and rows[0, 50]["parts"]["video"]["q95"] >= rows[0, 50]["parts"]["video"]["q50"]
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {f"warm-up-0.08-streak-3-orders-{o}.losses.jsonl" for o in ("221", "000")}


def test_fit_measures_again_what_another_question_answers(run: Run, tmp_path: Path) -> None:
    asked = [*SHAPE, "--clips", 1, "--lambdas", "50", "--orders", "221", "--out", tmp_path]
    path = tmp_path / "warm-up-0.08-streak-3-orders-221.losses.jsonl"
    for more, count in (([], 1), ([], 1), (["--steps", 13], 2), ([], 2)):
        run(cache_fit, *asked, *more)
        assert len(path.read_text().splitlines()) == count


def test_held_out_clips_are_held_against_the_promise(run: Run, tiny_pipeline: Pipeline, tmp_path: Path) -> None:
    request = Request("x", size=(96, 64), frames=22, steps=12)
    stratum = tiny_pipeline.stratum(tiny_pipeline.family.resolve(request, tiny_pipeline.recipe))
    tight = Certificate(
        replace(stratum, parallel=Batch().parallel),
        50.0,
        3,
        2,
        2,
        0.1,
        0.1,
        {"video": 1e-12, "motion": 1, "spectrum": 1, "level": 1},
        52,
        0,
        0.5,
        "c",
    )
    loose = replace(tight, tolerances={"video": 1, "motion": 99, "spectrum": 99, "level": 99})
    files = []
    for name, certificate in (("tight", tight), ("loose", loose)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(certificate.to_json())
    run(cache_heldout, "--certificate", *files, "--clips", 2, "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "cache-heldout.json").read_text())["certificates"]
    assert (found["tight.json"]["violations"], found["loose.json"]["violations"]) == (2, 0)
    assert not found["tight.json"]["is_within_alpha"] and found["loose.json"]["is_within_alpha"]
    assert found["loose.json"]["clopper_pearson_95"] == pytest.approx([0.0, 0.8419], abs=1e-3)
    path = tmp_path / "out" / "loose.losses.jsonl"
    for orders, count in ((2, 2), (1, 4)):  # a certificate of the same name with other orders asks another question
        files[1].write_text(replace(loose, video_order=orders).to_json())
        run(cache_heldout, "--certificate", files[1], "--clips", 2, "--out", tmp_path / "out")
        assert len(path.read_text().splitlines()) == count
    files[0].write_text(replace(tight, fingerprint=replace(tight.fingerprint, weights="x")).to_json())
    with pytest.raises(RequestError, match=r"certificate tight.json: got 'weights "):
        run(cache_heldout, "--certificate", files[0], "--clips", 2, "--out", tmp_path / "out")


def test_the_overhead_of_a_replayed_list(run: Run, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_overhead, "find_workload", lambda _: Workload("tiny", "tiny", (96, 64), 22, 12))
    run(cache_overhead, "--model", f"random:{tiny_model}", "--device", "cpu", "--forwards", 3, "--out", tmp_path)
    report = json.loads((tmp_path / "cache-overhead.json").read_text())
    assert len(report["computed_step"]["all_ms"]) == 3 and len(report["reused_step"]["all_ms"]) == cache_overhead.STREAK
    rows = report["rows"]["video"] + report["rows"]["audio"]
    assert report["cache_bytes"] == rows * 64 * 4 * (2 + 3)  # float32, width 64: two probes, three residuals
    assert all(report["parts"][name]["median_ms"] > 0 for name in ("score", "keep", "predict"))
    with pytest.raises(RequestError, match="--forwards"):
        run(cache_overhead, "--forwards", 2)
