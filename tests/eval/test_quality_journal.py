"""An evaluation that is stopped goes on, and shards make the report of one run; what answers another question is measured again."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.metrics.registry import METRICS
from eval.quality_cases import Shape
from eval.quality_journal import NAME
from eval.quality_run import Output, Rendering, evaluate_rendering
from videogen.config import Recipe, Request
from videogen.errors import EnvironmentFault, RequestError
from videogen.pipeline import Pipeline
from videogen.result import Result

SHAPE = Shape((96, 64), 22, None, 1)
RENDERED: dict[str, Result] = {}  # one clip is one clip: what counts here is who asks for it


class Counted:
    """A pipeline that counts its clips and can be stopped before one of them."""

    def __init__(self, pipeline: Pipeline, made: list[str], stop_at: int | None) -> None:
        self.pipeline, self.made, self.stop_at, self.device = pipeline, made, stop_at, pipeline.device

    def render(self, request: Request) -> Result:
        if len(self.made) == self.stop_at:
            raise KeyboardInterrupt
        self.made.append(request.prompt)
        key = repr((self.pipeline.recipe, request))
        if key not in RENDERED:
            RENDERED[key] = self.pipeline.render(request)
        return RENDERED[key]


@pytest.fixture
def evaluate(tiny_pipeline: Pipeline, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluates two prompts into a folder: the report, and how many clips were rendered for it."""
    fast = tuple(metric for metric in METRICS if metric.name in ("psnr", "motion_ratio", "audio_snr"))
    monkeypatch.setattr("eval.quality_run.usable", lambda: fast)

    def call(folder: Path, shard: str | None = None, stop_at: int | None = None, **changes: Any) -> tuple[Any, int]:
        made: list[str] = []

        def open_arms(_model: object, recipes: dict[str, Recipe], _device: str) -> dict[str, Counted]:
            return {arm: Counted(tiny_pipeline.sharing(recipe), made, stop_at) for arm, recipe in recipes.items()}

        monkeypatch.setattr("eval.quality_run.open_arms", open_arms)
        settings = {"recipe": "exact", "vs": "plain", "prompts": "2", "anchors": 1, "shape": SHAPE, "model": str(tiny_model)} | changes
        output = Output(folder, overwrite=bool(settings.pop("overwrite", False)))
        try:
            return evaluate_rendering(Rendering(**settings), output, lambda _: None, shard)[0], len(made)
        except KeyboardInterrupt:
            return None, len(made)

    return call


def without_seconds(report: dict[str, Any]) -> dict[str, Any]:
    """A report less what differs between two runs of one thing."""
    text = json.dumps({name: report[name] for name in ("summary", "oracle", "gate", "class", "clips", "curves") if name in report})
    found = json.loads(text)
    for clip in found["clips"]:
        for name in ("seconds", "files", "cache"):
            clip.pop(name, None)
    found["summary"].pop("seconds", None)
    return found  # type: ignore[no-any-return]


def test_a_stopped_run_goes_on_and_shards_make_the_same_report(evaluate: Any, tmp_path: Path) -> None:
    whole, made = evaluate(tmp_path / "whole")
    assert made == 6  # two prompts in two arms, one with both anchors
    assert evaluate(tmp_path / "cut", stop_at=5) == (None, 5)
    with (tmp_path / "cut" / NAME).open("a") as file:
        file.write('{"question": "cut o')
    report, made = evaluate(tmp_path / "cut")
    assert made == 2 and without_seconds(report) == without_seconds(whole)
    for shard, expected in (("0/2", 4), ("1/2", 2)):
        found, made = evaluate(tmp_path / "parts", shard=shard)
        assert made == expected and found["prompts"] == 1 and not (tmp_path / "parts" / "eval.json").exists()
    report, made = evaluate(tmp_path / "parts")
    assert made == 0 and without_seconds(report) == without_seconds(whole)
    lines = (tmp_path / "cut" / NAME).read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[0])["name"] == "t2va-0000"


def test_another_question_is_measured_again_and_a_lost_clip_too(evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(**changes: Any) -> int:
        return int(evaluate(tmp_path / "a", shard="0/1", **{"prompts": "1", "anchors": 0} | changes)[1])

    assert (shard(), shard()) == (2, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # which of several devices, as shards on one machine are started
    assert shard() == 0
    assert shard(cache_lambda=9.0) == 2
    assert shard() == 2  # its line is there, its clips were replaced
    assert (shard(anchors=1), shard(anchors=1)) == (4, 0)
    (tmp_path / "a" / "new" / "t2va-0000.mp4").unlink()
    assert shard(anchors=1) == 4
    monkeypatch.setattr("eval.quality_run._code", lambda: "other")
    assert shard() == 2
    for given, word in (("2/2", "I/N"), ("x", "I/N")):
        with pytest.raises(RequestError, match=word):
            evaluate(tmp_path / "b", shard=given)
    with pytest.raises(RequestError, match="remove the folder"):
        evaluate(tmp_path / "b", shard="0/2", overwrite=True)


def test_who_completes_the_prompts_is_part_of_the_question(evaluate: Any, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    made = []
    for more in ({}, {"expand": "template"}, {"expand": "template"}):
        jobs.write_text(json.dumps({"prompt": "a red circle", "seed": 1} | more))
        made.append(evaluate(tmp_path / "a", shard="0/1", prompts=str(jobs), anchors=0)[1])
    assert made == [2, 2, 0]


def test_a_report_that_is_replaced_can_be_stopped_too_and_a_disk_that_refuses_is_met_first(evaluate: Any, tmp_path: Path) -> None:
    assert evaluate(tmp_path / "a", anchors=0)[1] == 4
    assert evaluate(tmp_path / "a", anchors=0, overwrite=True, stop_at=2) == (None, 2)
    assert not (tmp_path / "a" / "eval.json").exists()  # its clips are replaced
    report, made = evaluate(tmp_path / "a", anchors=0)
    assert made == 2 and len(report["clips"]) == 2
    (tmp_path / "b" / NAME).mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="can be read and written"):
        evaluate(tmp_path / "b", stop_at=0)
