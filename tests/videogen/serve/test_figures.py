"""What the page says of a recipe: this queue's clips, with what may not count left out; published figures only where they hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.videogen.serve.fakes import services_in
from videogen.jobs.claims import Claims
from videogen.media import Encoding, write_clip
from videogen.serve import figures as module
from videogen.serve.comparing import pooled
from videogen.serve.figures import Figures
from videogen.serve.published import PUBLISHED
from videogen.serve.reports import Reports

DOCS = Path(__file__).parents[3]
CLIP = {"prompt": "x", "size": "96x64", "frames": 22, "seed": 5}


def made(root: Path, recipe: str, denoise_s: float, shade: int, **more: int) -> None:
    """One finished clip of one grey, in the queue of `root`."""
    services = services_in(root)
    job, _ = services.desk.submit("local", CLIP | {"recipe": recipe} | more)
    claims = Claims(services.store.database, "0", retention_s=1e6)
    taken = claims.claim()
    assert taken is not None
    frames = np.full((22, 64, 96, 3), shade, np.uint8)
    services.options.clips.mkdir(exist_ok=True)
    path = services.options.clips / f"{job.id}.mp4"
    write_clip(path, frames, None, fps=24, sampling_rate=8000, encoding=Encoding(crf=0), comment="")
    claims.complete(taken, {"stages_s": {"load": 100.0, "denoise": denoise_s}}, 1)


def figures_in(root: Path) -> Figures:
    services = services_in(root)
    return Figures(services.store, services.desk.source, services.options.clips, Reports(None))


def test_a_queue_says_how_fast_and_how_near_a_recipe_was(tmp_path: Path) -> None:
    assert figures_in(tmp_path).label("plain") == "plain: not measured"
    made(tmp_path, "exact", 8.0, 100)
    made(tmp_path, "plain", 2.0, 110)
    made(tmp_path, "exact", 0.1, 100, steps=2)  # other steps than the recipe's: another measurement
    made(tmp_path, "plain", 0.1, 250, steps=2)
    (figure,) = figures_in(tmp_path).known("plain")
    times, _, near, *rest = figure.short.split()
    assert (figure.source, times, rest) == ("measured on this queue", "4.0", ["dB,", "n=1"]) and abs(float(near) - 28.13) < 1
    assert figures_in(tmp_path).label("exact").startswith("exact: 1.54 times plain [published in docs/speed.md]")


def test_a_published_figure_stands_in_its_page_and_goes_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_in(tmp_path)
    for each in PUBLISHED:
        if any(known.full == each.full for known in figures.known(each.recipe)):
            page = (DOCS / each.page).read_text(encoding="utf-8")
            assert all(number in page and number in each.full for number in each.figures), each
    monkeypatch.setattr(module, "PUBLISHED", tuple(replace(each, adapter="0" * 64) for each in PUBLISHED))
    assert figures.label("turbo") == "turbo: not measured" and figures.known("turbo8") == []


def test_the_error_of_a_clip_is_pooled_over_its_frames() -> None:
    assert pooled([20.0, float("inf")]) == pytest.approx(23.01, abs=0.01) and pooled([float("inf")] * 2) == float("inf")
