"""Wan's real classes at toy size: what is settled, that a clip equals diffusers' own bit for bit, and the command line."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.wan import pipeline_wan_i2v
from PIL import Image

from videogen.cli.main import main
from videogen.config import Recipe, Request
from videogen.errors import CancelledRender, RequestError
from videogen.ffmpeg import probe
from videogen.media import to_uint8
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event, StopFlag
from videogen.recipes import EXACT
from videogen.source import find_model, open_family

SMALL: dict[str, Any] = {"size": (64, 32), "frames": 5, "steps": 8, "seed": 3}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))


def diffusers_clip(folder: Path, request: Request, scales: tuple[float, ...], dtypes: Any = torch.float32) -> Any:
    kind = WanPipeline if request.image is None else WanImageToVideoPipeline
    pipe = kind.from_pretrained(folder, torch_dtype=dtypes)
    pipe.set_progress_bar_config(disable=True)
    assert request.size is not None and request.seed is not None
    given: dict[str, Any] = {"prompt": request.prompt, "negative_prompt": request.negative_prompt, "num_frames": request.frames}
    given |= {} if request.image is None else {"image": request.image}
    given |= {"guidance_scale": scales[0]} | ({"guidance_scale_2": scales[1]} if len(scales) == 2 else {})
    generator = torch.Generator("cpu").manual_seed(request.seed)
    width, height = request.size
    return pipe(**given, width=width, height=height, num_inference_steps=request.steps, generator=generator).frames[0]


@pytest.mark.parametrize(
    ("kind", "has_image", "scales"),
    [
        ("one", False, (1.0,)),
        ("two", False, (4.0, 3.0)),
        ("i2v", True, (3.5, 3.5)),
        ("clip", True, (5.0,)),
        ("5b", False, (5.0,)),
        ("5b", True, (5.0,)),
    ],
)
def test_a_plain_clip_equals_diffusers(
    folders: dict[str, Path], kind: str, has_image: bool, scales: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", SimpleNamespace(fix_text=lambda text: text), raising=False)  # its text step needs it
    negative = "" if scales[0] <= 1 else "blur"
    request = Request("a fox runs", image=PICTURE if has_image else None, negative_prompt=negative, guidance=scales, **SMALL)
    pipeline = open_pipeline(str(folders[kind]), "plain", device="cpu")
    result = pipeline.render(request)
    assert result.audio is None and result.record["forwards"] == 8 * (1 if scales[0] <= 1 else 2)
    assert np.array_equal(result.frames, to_uint8(diffusers_clip(folders[kind], request, scales)))


def test_in_bfloat16_the_same_parts_stay_in_float32(folders: dict[str, Path]) -> None:
    request = Request("a fox runs", guidance=(4.0, 3.0), **SMALL)
    result = open_pipeline(str(folders["two"]), Recipe("half", dtype="bfloat16"), device="cpu").render(request)
    clip = diffusers_clip(folders["two"], request, (4.0, 3.0), {"default": torch.bfloat16, "vae": torch.float32})
    assert np.array_equal(result.frames, to_uint8(clip))


def test_both_experts_and_both_scales_decide_the_clip(two: Pipeline, folders: dict[str, Path]) -> None:
    clips = [two.render(Request("a fox", guidance=scales, **SMALL)).frames for scales in ((4.0, 3.0), (4.0, 2.0), (5.0, 3.0))]
    assert not np.array_equal(clips[0], clips[1]) and not np.array_equal(clips[0], clips[2])
    one = open_pipeline(str(folders["one"]), "plain", device="cpu").render(Request("a fox", guidance=(4.0,), **SMALL)).frames
    assert not np.array_equal(one, two.render(Request("a fox", guidance=(4.0, 4.0), **SMALL)).frames)


def test_prompts_are_encoded_once_and_the_clip_stays(two: Pipeline) -> None:
    kept, encoder = two.sharing(Recipe("kept", savings=EXACT)), two.load("t2v").pipe.text_encoder
    calls: list[int] = []
    hook = encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    requests = [Request(prompt, negative_prompt="blur", **SMALL) for prompt in ("a fox", "a bear", "a fox")]
    results = [kept.render(request) for request in requests]
    hook.remove()
    assert len(calls) == 3  # two prompts, one negative prompt
    told = results[2].record["savings"]
    assert (told["encodings prompt"], told["encodings negative prompt"]) == ("kept", "kept")
    assert told["lean_loop"] == "not for Wan"
    named = two.sharing(Recipe("named", savings=replace(EXACT, attention="native"))).render(requests[0])
    assert named.record["savings"]["attention"] == "native" and np.array_equal(named.frames, results[0].frames)
    for request, result in zip(requests, results):
        assert np.array_equal(result.frames, two.render(request).frames)


def test_a_stop_is_taken_between_steps(two: Pipeline) -> None:
    stop, seen = StopFlag(), list[Event]()

    def hear(event: Event) -> None:
        seen.append(event)
        if event.step == 2:
            stop.set()

    with pytest.raises(CancelledRender):
        two.render(Request("a fox", **SMALL), on_event=hear, stop=stop)
    assert [event.phase for event in seen if not event.total] == ["load", "text", "prepare", "denoise"] and seen[-1].step == 2
    assert "progress_bar" not in vars(two.load("t2v").pipe)
    assert [event.step for event in seen if event.total] == [0, 1, 2] and seen[-1].total == 8


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("one", {"size": (65, 64)}, "multiples of 16"),
        ("one", {"size": (64, 16 * 130)}, "at most 2048"),
        ("one", {"frames": 510}, "at most 509"),
        ("one", {"image": PICTURE}, "text to video"),
        ("i2v", {}, "a first frame"),
        ("clip", {"image": PICTURE, "last_image": PICTURE}, "trained for both"),
        ("one", {"references": (PICTURE,)}, "none"),
        ("one", {"guidance": (4.0, 3.0)}, "one expert"),
        ("two", {"guidance": (1.0, 3.0)}, "above 1"),
        ("two", {"guidance": (1.0,), "negative_prompt": "blur"}, "guidance above 1"),
    ],
)
def test_what_diffusers_would_leave_to_crash_or_to_round_is_refused(
    folders: dict[str, Path], kind: str, values: dict[str, Any], told: str
) -> None:
    family = open_family(find_model(str(folders[kind])))
    with pytest.raises(RequestError, match=told):
        family.resolve(Request("p", **values), Recipe())


def test_settled_values(folders: dict[str, Path], two: Pipeline) -> None:
    family = open_family(find_model(str(folders["5b"])))
    resolved = family.resolve(Request("p", image=PICTURE), Recipe())
    assert (resolved.workflow, resolved.fps, resolved.frames) == ("i2v", 24, 121)
    assert resolved.width % 32 == resolved.height % 32 == 0 and abs(resolved.width / resolved.height - 4 / 3) < 0.1
    settled = two.family.resolve(Request("p", frames=6), Recipe())
    assert (settled.frames, settled.guidance, settled.boundary, settled.shifts) == (9, (4.0, 3.0), 0.875, (3.0, 3.0)) and settled.notes
    full = two.family.resolve(Request("p", size=(1280, 720), steps=20), Recipe())
    assert two.family.estimate(full).rows == 80 * 45 * 21
    unguided = replace(full, guidance=(1.0, 1.0))
    assert two.family.estimate(full).tflop == 2 * two.family.estimate(unguided).tflop
    with pytest.raises(RequestError, match="512"):
        two.render(Request("fox " * 600, **SMALL))


def test_the_command_line_finds_the_family_and_writes_no_sound(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["render", "--model", str(folders["two"]), "--prompt", "a fox", "--size", "64x64", "--frames", "9", "--steps", "8"]
    words += ["--negative-prompt", "blur", "--guidance", "4,3", "--seed", "3", "--name", "clip", "-o", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--progress", "none"]) == 0
    info = probe(tmp_path / "clip.mp4")
    assert (info.frames, info.audio_codec, round(info.fps)) == (9, None, 16)
    record = json.loads((tmp_path / "clip.json").read_text())
    assert record["resolved"]["guidance"] == [4.0, 3.0] and record["output"]["audio_sha256"] is None
    capsys.readouterr()
    assert main(["models", str(folders["i2v"])]) == 0 and "i2v" in capsys.readouterr().out
    assert main(["doctor", "--model", str(folders["one"]), "--device", "cpu"]) == 2 and "MiniMax-H3" in capsys.readouterr().err
    assert main(["render", "--prompt", "a fox", "--guidance", "4", "-o", str(tmp_path)]) == 2 and "MiniMax-H3" in capsys.readouterr().err
