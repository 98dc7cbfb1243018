"""What doctor saved decides clips of about as many rows, and no others; a back end that is gone fails none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.arms import in_full
from tests.conftest import TINY
from videogen import Request
from videogen.config import Recipe, read_environment
from videogen.device_profile import DeviceProfile, Winners, as_text, device_key, profile_path
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline, open_pipeline
from videogen.transforms.options import Savings

CPU = torch.device("cpu")
REQUEST = Request("a large red circle", **TINY | {"steps": 1})  # type: ignore[arg-type]


def opened(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: Winners) -> Pipeline:
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", str(folder))
    path = profile_path(CPU, read_environment())
    assert path is not None
    path.write_text(as_text(DeviceProfile(device_key(CPU), entries)))
    return open_pipeline(str(model), Recipe("a", savings=Savings(matmul="auto", attention="auto")))


@pytest.mark.parametrize("matmul", ["bfloat16", "model"])
def test_a_winner_holds_for_about_as_many_rows(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matmul: str) -> None:
    monkeypatch.setattr("videogen.transforms.settle.has_fast_bfloat16", lambda: matmul == "model")
    pipeline = opened(tiny_model, tmp_path, monkeypatch, Winners("float32", 300, "_native_flash", matmul))
    near = pipeline.family.resolve(REQUEST, pipeline.recipe)
    far = pipeline.family.resolve(replace(REQUEST, size=(160, 96), frames=124), pipeline.recipe)
    for resolved, is_near in ((near, True), (far, False)):
        used = pipeline.transforms_for(resolved)
        assert (used.savings.attention == "_native_flash") is is_near and (used.savings.matmul == matmul) is is_near
        assert ("nothing near" in used.told.get("attention", "")) is not is_near
        assert ("bfloat16 products" in pipeline.stratum(resolved).dtype) is (used.savings.matmul == "bfloat16")
        assert in_full(pipeline).transforms_for(resolved).savings == used.savings
    assert pipeline.render(near).record["savings"]["attention"] == "_native_flash"
    assert transformer_of(pipeline.load("t2va")).transformer_blocks[0].attn.processor._attention_backend is None
    assert pipeline.sharing(Recipe()).transforms_for(near).savings == Savings()


def test_a_clip_does_not_fail_for_a_back_end_that_is_gone(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = opened(tiny_model, tmp_path, monkeypatch, Winners("float32", 300, "flash"))
    assert pipeline.render(REQUEST).record["savings"]["attention"].startswith("model: the device profile names flash, ")
