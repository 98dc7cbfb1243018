"""The program that compares places for weights: equal clips are said to be equal, others not, and a failure costs its row only."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import placements
from eval.cases import WORKLOADS, Workload
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


def test_every_place_makes_the_same_clips_and_a_refusal_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render, seeds = Pipeline.render, {"whole": 0, "offload": 0, "parked": 1}

    def rendered(pipeline: Pipeline, request, **values):  # type: ignore[no-untyped-def]
        """Parked weights make another clip here."""
        return render(pipeline, replace(request, seed=request.seed + seeds[pipeline.placement.kind]), **values)

    monkeypatch.setattr(Pipeline, "render", rendered)
    whole, offload, idle, other = run(
        tmp_path, *(w for k in ("whole", "offload,offload", "offload-idle", "parked") for w in ("--weights", k))
    )
    assert [row.get("is_equal") for row in (whole, offload, idle, other)] == [True, True, None, False]
    assert "two experts" in str(idle["error"]) and (offload["weights"], offload["text_encoder"]) == ("offload", "offload")
    for clip in whole["clips"]:  # type: ignore[attr-defined]
        assert clip["seconds"] > 0 and clip["allocated_gib"] is None and 0.1 < clip["host_gib"] < 20 and clip["stages_s"]["text"] > 0
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
