"""The step cache inside the real H3 loop: off is diffusers, on is compared with the uncached clip, nothing stays behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY
from videogen import Recipe, Request, Result
from videogen.config import StepCache
from videogen.errors import CancelledRender, RequestError
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event, StopFlag

PROMPT = "two small green squares move up on a brown background, silence"
STEPS = 14


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Pipeline) -> Pipeline:
    """A small random transformer in the real loop: what is reused is decided and put back the same way."""
    return tiny_pipeline


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(path)
    return path


def cached(pipeline: Pipeline, **options: Any) -> Pipeline:
    """The same weights under a recipe with a step cache."""
    return pipeline.sharing(Recipe(name="cached", cache=StepCache(**options)))


def request(workflow: str, picture: Path, **more: Any) -> Request:
    media = {"t2va": {}, "fl2va": {"image": picture}, "ref2va": {"references": (picture,)}}[workflow]
    return Request(PROMPT, **({"seed": 3} | TINY | {"steps": STEPS} | media | more))


def same(a: Result, b: Result) -> bool:
    return bool(np.array_equal(a.frames, b.frames) and np.array_equal(a.audio, b.audio))


def distance(a: Result, b: Result) -> float:
    """Relative root mean square of the pixel difference."""
    x, y = a.frames.astype(np.float64), b.frames.astype(np.float64)
    return float(np.sqrt(((x - y) ** 2).mean()) / y.std())


@pytest.mark.parametrize("workflow", ["t2va", "fl2va", "ref2va"])
def test_off_and_never_reusing_are_bit_identical(workflow: str, pipeline: Pipeline, picture: Path) -> None:
    wanted = pipeline.render(request(workflow, picture))
    watched = cached(pipeline, lam=1e-9).render(request(workflow, picture))
    assert same(wanted, watched)
    assert wanted.record["cache"]["lambda"] == 0 and watched.record["cache"]["reused"] == 0
    assert "reused nothing" in watched.record["cache"]["warning"]


@pytest.mark.parametrize(
    ("workflow", "canvas"),
    [("t2va", (96, 64, 22)), ("t2va", (112, 80, 39)), ("fl2va", (96, 64, 22)), ("ref2va", (96, 64, 22))],
)
def test_reusing_stays_near_the_uncached_clip(workflow: str, canvas: tuple[int, int, int], pipeline: Pipeline, picture: Path) -> None:
    wanted = request(workflow, picture, size=canvas[:2], frames=canvas[2])
    uncached, other_seed = pipeline.render(wanted), pipeline.render(replace(wanted, seed=9))
    result = cached(pipeline, lam=100.0, max_streak=1).render(wanted)
    record = result.record["cache"]
    assert record["reused"] == 6 and record["computed"] == STEPS - 6
    assert 0 < distance(result, uncached) < 0.5 * distance(other_seed, uncached)


def test_requests_of_other_shapes_and_a_cancel_leave_no_state(pipeline: Pipeline, picture: Path) -> None:
    cache = cached(pipeline, lam=0.3)
    alone = cache.render(request("t2va", picture))
    cache.render(request("t2va", picture, size=(160, 96), steps=8))
    stop = StopFlag()

    def on_event(event: Event) -> None:
        if event.step == 4:
            stop.set()

    with pytest.raises(CancelledRender):
        cache.render(request("t2va", picture), on_event=on_event, stop=stop)
    assert isinstance(cache.load("t2va").transformer.transformer_blocks[1], torch.nn.Module)
    assert len(cache.load("t2va").transformer.transformer_blocks) == pipeline.load("t2va").transformer.config.num_layers
    assert same(alone, cache.render(request("t2va", picture)))


def test_steps_left_to_the_recipe_are_the_caches_too_whatever_ran_before(pipeline: Pipeline, picture: Path) -> None:
    opened = pipeline.sharing(Recipe(name="cached", steps=STEPS, cache=StepCache(lam=100.0)))
    opened.render(request("t2va", picture, steps=1))  # as a warm-up would
    left_out, named = opened.render(request("t2va", picture, steps=None)), opened.render(request("t2va", picture))
    assert same(left_out, named) and left_out.record["cache"]["reused"] > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7, 10])
def test_short_schedules_follow_the_few_step_rule(steps: int, pipeline: Pipeline, picture: Path) -> None:
    record = cached(pipeline, lam=100.0).render(request("t2va", picture, steps=steps)).record["cache"]
    assert record["reused"] == (1 if steps >= 7 else 0) and len(record["steps"]) == steps
    assert all(step["ms"] > 0 for step in record["steps"])


def test_the_record_tells_every_step(pipeline: Pipeline, picture: Path) -> None:
    record = cached(pipeline, lam=100.0).render(request("t2va", picture)).record
    steps = record["cache"]["steps"]
    assert [step["action"] for step in steps[:3]] == ["compute", "compute", "reuse"] and steps[-1]["reason"] == "last"
    assert set(steps[2]["drift"]) == {"audio", "video"} and steps[2]["risk"] == max(steps[2]["drift"].values())
    assert record["cache"]["certificate"] is None


@pytest.mark.parametrize(
    "options", [{"lam": -1.0}, {"lam": float("nan")}, {"lam": 0.1, "max_streak": 0}, {"video_order": 3}, {"warm_up": 2.0}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"cache .*: got .*, expected .*; "):
        StepCache(**options)


def test_a_cached_recipe_is_another_clip_in_the_same_folder(short_model: Path) -> None:
    exact, with_cache = open_pipeline(str(short_model)), open_pipeline(str(short_model), Recipe(cache=StepCache(lam=0.2)))
    assert exact.recipe != with_cache.recipe
