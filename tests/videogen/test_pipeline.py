"""The opened pipeline is diffusers' own, bit for bit, in all three workflows; requests share nothing but weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from PIL import Image

from tests.conftest import TINY
from videogen import Request, Result
from videogen.errors import CancelledRender, RequestError
from videogen.images import load_image
from videogen.media import to_uint8
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event, PhaseClock, StopFlag

PROMPT = "a large red circle moves right on a navy background, a low tone"


class ShortH3(MiniMaxH3ModularPipeline):  # type: ignore[misc]
    """Plain diffusers, with clips under 5 s allowed."""

    min_duration = property(lambda _self: 0.0)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def media_of(workflow: str, picture: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pictures of a workflow, for a Request and for plain diffusers."""
    if workflow == "t2va":
        return {}, {}
    if workflow == "ref2va":
        return {"references": (picture,)}, {"references": [MiniMaxH3ImageReference(load_image(picture))]}
    return {"image": picture, "last_image": picture}, {"image": load_image(picture), "last_image": load_image(picture)}


@pytest.mark.parametrize("workflow", ["t2va", "fl2va", "ref2va"])
@pytest.mark.parametrize("canvas", [(96, 64, 22), (160, 96, 39)])
def test_the_exact_recipe_is_plain_diffusers(
    workflow: str, canvas: tuple[int, int, int], pipeline: Pipeline, short_model: Path, picture: Path
) -> None:
    width, height, frames = canvas
    ours, theirs = media_of(workflow, picture)
    result = pipeline.render(Request(PROMPT, size=(width, height), frames=frames, steps=2, seed=5, **ours))
    plain = ShortH3.from_pretrained(str(short_model), workflow=workflow)
    plain.load_components(dtype=torch.float32)
    plain._blocks.sub_blocks["denoise.denoise"].set_progress_bar_config(disable=True)
    state = plain(
        prompt=PROMPT,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
        height=height,
        width=width,
        num_frames=frames,
        **theirs,
    )
    assert np.array_equal(result.frames, to_uint8(state.get("videos")[0]))
    assert np.array_equal(result.audio, state.get("audio")[0].numpy().clip(-1, 1))
    assert result.record["resolved"]["workflow"] == workflow


def test_a_request_is_the_same_alone_and_after_others(pipeline: Pipeline, picture: Path) -> None:
    def make(seed: int, **more: Any) -> Result:
        return pipeline.render(Request(PROMPT, seed=seed, **(TINY | more)))

    first = make(1)
    make(2, size=(160, 96), steps=3)
    make(3, references=(picture,))
    again = make(1)
    assert np.array_equal(first.frames, again.frames) and np.array_equal(first.audio, again.audio)
    assert not np.array_equal(first.frames, make(2).frames)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_steps_are_forwards(steps: int, pipeline: Pipeline) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = pipeline.load("t2va").transformer.register_forward_pre_hook(count)
    try:
        record = pipeline.render(Request(PROMPT, seed=1, **(TINY | {"steps": steps}))).record
    finally:
        handle.remove()
    assert calls == record["forwards"] == steps
    sigmas = record["sigmas"]
    assert len(sigmas["video"]) == len(sigmas["audio"]) == steps + 1
    assert sigmas["video"][0] == 1.0 and sigmas["video"][-1] == 0.0


def test_noise_comes_from_a_cpu_generator(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    draw = torch.randn

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        generator = kwargs.get("generator")
        seen.append(generator.device.type if generator is not None else "global")
        return draw(*args, **kwargs)

    monkeypatch.setattr(torch, "randn", spy)
    pipeline.render(Request(PROMPT, seed=1, **TINY))
    assert seen and set(seen) == {"cpu"}


def test_every_phase_and_step_is_told_in_order(pipeline: Pipeline) -> None:
    events: list[Event] = []
    record = pipeline.render(Request(PROMPT, seed=1, **TINY), on_event=events.append).record
    phases = [event.phase for event in events if event.total == 0]
    assert phases == ["load", "text", "prepare", "denoise", "decode"]
    assert [(e.step, e.total) for e in events if e.total] == [(0, 2), (1, 2), (2, 2)]
    assert set(record["stages_s"]) == set(phases)


def test_a_stop_comes_between_steps_and_leaves_nothing_behind(pipeline: Pipeline) -> None:
    before = pipeline.render(Request(PROMPT, seed=1, **TINY))
    stop, steps = StopFlag(), []

    def on_event(event: Event) -> None:
        if event.step == 1:
            stop.set()
        steps.append(event.step)

    with pytest.raises(CancelledRender):
        pipeline.render(Request(PROMPT, seed=1, **(TINY | {"steps": 5})), on_event=on_event, stop=stop)
    assert max(steps) == 1
    assert "progress_bar" not in vars(pipeline.load("t2va")._blocks.sub_blocks["denoise.denoise"])
    after = pipeline.render(Request(PROMPT, seed=1, **TINY))
    assert np.array_equal(before.frames, after.frames)


def test_both_partitions_stored_once_are_in_memory_once(pipeline: Pipeline) -> None:
    assert pipeline.load("ref2va").transformer_ref is pipeline.load("t2va").transformer
    assert pipeline.load("fl2va").vae is pipeline.load("t2va").vae


def test_a_drawn_seed_is_in_the_record_and_makes_the_clip_again(pipeline: Pipeline) -> None:
    drawn = pipeline.render(Request(PROMPT, **TINY))
    again = pipeline.render(Request(PROMPT, seed=drawn.record["resolved"]["seed"], **TINY))
    assert np.array_equal(drawn.frames, again.frames)


def test_wrong_requests_fail_before_any_weight_loads(short_model: Path, tmp_path: Path) -> None:
    unopened = open_pipeline(str(short_model))
    for wrong in ({"frames": 346}, {"size": (97, 64)}, {"image": tmp_path / "none.png"}):
        with pytest.raises(RequestError):
            unopened.render(Request(PROMPT, **wrong))  # type: ignore[arg-type]
    assert not unopened._opened and not unopened._shared


def test_hard_prompts_render(pipeline: Pipeline) -> None:
    for prompt in ("nul\0byte / \\ \"quotes\" 'x'\n\n🦊", "é" * 300, "x"):
        assert pipeline.render(Request(prompt, seed=1, **(TINY | {"steps": 1}))).frames.shape == (22, 64, 96, 3)


def test_a_phase_lasts_until_the_device_is_done() -> None:
    waited: list[dict[str, float]] = []
    clock = PhaseClock(lambda _event: None, StopFlag(), lambda: waited.append(dict(clock.stages_s)))
    clock.enter("denoise")
    clock.enter("decode")
    clock.close()
    assert [set(each) for each in waited] == [set(), {"denoise"}] and set(clock.stages_s) == {"denoise", "decode"}
