"""The forecast of a cached clip's time against made-up clips, and the command at tiny size."""

import json
import sys
from pathlib import Path

import pytest

from eval import cache_wall
from eval.cache_wall import Timed, figures, verdict
from eval.stats import Interval
from videogen.errors import RequestError
from videogen.pipeline import Pipeline

REUSED = [False, False, True, True, False, True, True, False, False, False]


def test_a_clip_as_foretold_has_no_gap_and_what_reused_steps_cost_is_told_apart() -> None:
    """Machines of three speeds: the gap is within each pair, so that none of them moves it."""
    full = [Timed(12.0 * k, 10.0 * k, (1.0 * k,) * 10) for k in (1, 2, 3)]
    for cost_s, gap in ((0.0, 1.0), (0.2, 8.8 / 8.0)):
        steps = [tuple((cost_s if reused else 1.0) * k for reused in REUSED) for k in (1, 1, 1)]
        cached = [Timed((2.0 + sum(step)) * k, sum(step) * k, step) for k, step in zip((1, 2, 3), steps)]
        found = figures(full, cached, REUSED)
        alone, both = (found["forecasts"][name] for name in cache_wall.FORECASTS)
        assert alone["speed_up"] == pytest.approx(1.5) and found["speed_up"]["value"] == pytest.approx(12 / (8 + 4 * cost_s))
        assert alone["gap"]["value"] == pytest.approx(gap) and alone["is_within_target"] == ("yes" if gap == 1 else "no")
        assert found["step_ms"]["reused"] == pytest.approx(1e3 * cost_s) and found["fixed_s"] == {"in full": 4.0, "cached": 4.0}
        assert both["gap"]["value"] == pytest.approx(1.0, abs=0.06)
    assert [verdict(Interval(1.0, *bounds, 6)) for bounds in ((0.96, 1.04), (0.96, 1.06), (1.06, 1.2), (0.8, 0.94))] == [
        *("yes", "undecided: measure more pairs", "no", "no")
    ]


def test_the_command_times_both_arms_of_one_request(tiny_pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_wall, "open_pipeline", lambda _model, recipe, **_: tiny_pipeline.sharing(recipe))
    shape = ["--size", "96x64", "--frames", "22", "--steps", "8"]

    def run(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["x", *shape, "--pairs", "1", "--out", str(tmp_path), *more])
        cache_wall.main()

    run("--cache-lambda", "50")
    report = json.loads((tmp_path / "cache-wall.json").read_text())
    assert report["computed"] == 7 / 8 and {name: len(own) for name, own in report["clips"].items()} == {"in full": 1, "cached": 1}
    for clock in ("wall", "cpu"):
        for clip in [*report["clips"]["in full"], *report["clips"]["cached"]]:
            timed = clip[clock]
            assert len(timed["steps_s"]) == 8 and 0 < sum(timed["steps_s"]) <= timed["denoise_s"] < timed["total_s"]
        assert report["clocks"][clock]["forecasts"]["computed steps alone"]["speed_up"] > 1
    for options in (["--cache-lambda", "50"], ["--overwrite"], ["--overwrite", "--cache-lambda", "1e-9"]):
        with pytest.raises(RequestError, match=r"cache-wall.json|--cache-lambda and --certificate|no step reused"):
            run(*options)
