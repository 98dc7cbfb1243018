"""The program that compares places for weights: equal clips are said to be equal, others not, and a failure costs its row only."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import placements
from eval.cases import WORKLOADS, Workload
from videogen.config import Request
from videogen.errors import RequestError
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline


@pytest.fixture(autouse=True)
def _tiny(short_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("tiny", str(short_model), (96, 64), 22, 49))


def run(out: Path, *words: str) -> list[dict[str, object]]:
    placements.main(["--workload", "tiny", "--steps", "1", "--device", "cpu", "--out", str(out), *words])
    report = json.loads((out / "placements.json").read_text())
    assert (report["workload"], report["steps"], report["recipe"]) == ("tiny", 1, "exact")
    rows: list[dict[str, object]] = report["rows"]
    return rows


class Made:
    """What a clip's record says; weights elsewhere make another clip of the same words where `kind` is parked."""

    def __init__(self, pipeline: Pipeline, request: Request) -> None:
        words = f"{request.prompt} {request.seed} {request.steps} {pipeline.placement.kind == 'parked'}"
        self.record: dict[str, Any] = {"stages_s": {"text": 0.5, "denoise": 2.0}, "output": {"frames_sha256": words, "audio_sha256": words}}
        if pipeline.placement.text == "visiting":
            self.record["memory"] = {"attempts": 2, "first": "no room"}


def test_equal_clips_are_said_to_be_equal_and_refusals_and_second_attempts_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "load", lambda *_: None)
    monkeypatch.setattr(Pipeline, "render", lambda pipeline, request: Made(pipeline, request))
    kinds = ("whole", "offload,offload", "offload-idle", "parked", "offload,visiting")
    whole, offload, idle, other, second = run(tmp_path, *(word for kind in kinds for word in ("--weights", kind)))
    assert [row.get("is_equal") for row in (whole, offload, idle, other, second)] == [True, True, None, False, None]
    assert "two experts" in str(idle["error"]) and (offload["weights"], offload["text_encoder"]) == ("offload", "offload")
    assert "at the second attempt: no room" in str(second["error"])
    first, last = whole["clips"]  # type: ignore[misc]
    assert first["frames_sha256"] != last["frames_sha256"] and first["frames_sha256"].endswith("Part 1. 0 1 False")
    assert first["seconds"] > 0 and first["allocated_gib"] is None and 0.1 < first["host_gib"] < 20
    told = (tmp_path / "placements.md").read_text()
    assert told.count("| True |") == 2 and told.count("| False |") == 1 and "| offload-idle, resident | | RequestError" in told
    with pytest.raises(RequestError, match="--out"):
        run(tmp_path, "--weights", "whole")


def test_words_and_limits_are_checked(tmp_path: Path) -> None:
    assert [placements.placement_of(word) for word in ("whole", "offload,visiting")] == [Placement(), Placement("offload", text="visiting")]
    for words in (["--weights", "cloud"], ["--weights", "whole,none"], ["--weights", "whole", "--memory-gib", "4"]):
        with pytest.raises(RequestError):
            run(tmp_path / "a", *words)
    assert not (tmp_path / "a").exists()
