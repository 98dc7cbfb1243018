"""The doctor on a real model: planted faults are seen in what ran, and what it saves is what an opened pipeline uses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import TINY
from videogen import Request
from videogen.cli.main import main
from videogen.config import Recipe, read_environment
from videogen.device_profile import DeviceProfile, Winners, as_text, device_key, profile_path, read_profile
from videogen.doctor.examine import Examination
from videogen.doctor.report import Row
from videogen.doctor.rules import check_compile, check_convolution
from videogen.doctor.seen import see
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline
from videogen.transforms import float8
from videogen.transforms.cpu_bfloat16 import Bfloat16Processor
from videogen.transforms.options import UNTOUCHED, Savings

CPU = torch.device("cpu")
REQUEST = Request("a large red circle", **TINY)  # type: ignore[arg-type]


def examined(pipeline: Pipeline, recipe: Recipe) -> Examination:
    opened = pipeline.sharing(recipe)
    resolved = opened.family.resolve(REQUEST, opened.recipe)
    found = Examination(opened.load("t2va"), resolved, opened.transforms_for(resolved), CPU, {}, True)
    found.look()
    return found


def looked(pipeline: Pipeline, savings: Savings = UNTOUCHED) -> dict[str, Row]:
    return {row.area: row for row in examined(pipeline, Recipe(savings=savings)).rows}


def only(areas: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at these areas alone."""
    for area in {"attention", "linears", "elementwise", "video_vae", "process"} - set(areas.split()):
        monkeypatch.setattr(Examination, area, lambda *_, **__: None)
    if "text" not in areas:
        monkeypatch.setattr(Examination, "text", lambda _, encode: encode())


def test_a_mask_that_masks_nothing_and_math_are_seen_in_what_ran(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    only("attention linears", monkeypatch)
    sound = looked(tiny_pipeline)
    assert sound["dense attention"].executed == "flash (CPU)" and "mask" not in sound["dense attention"].reason
    assert sound["linears"].executed.startswith("float32, aten::")
    attn = transformer_of(tiny_pipeline.load("t2va")).transformer_blocks[0].attn
    stock = attn.processor

    class Masking(type(stock)):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden: torch.Tensor, rope: Any = None, mask: Any = None) -> Any:
            rows = hidden.shape[1]
            return super().__call__(attn, hidden, rope, torch.ones(1, 1, rows, rows, dtype=torch.bool))

    attn.processor = Masking()
    try:
        masked = looked(tiny_pipeline)["dense attention"]
    finally:
        attn.processor = stock
    assert masked.is_slow and "all-True mask" in masked.reason and "pass no mask" in masked.fix
    with sdpa_kernel(SDPBackend.MATH):
        math = looked(tiny_pipeline)["dense attention"]
    assert math.is_slow and math.executed == "math" and "sdpa_kernel(MATH)" in math.fix


def test_a_softmax_of_somebodys_own_is_eager_and_ours_are_tiles(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    only("attention elementwise", monkeypatch)
    tiles = looked(tiny_pipeline, Savings(matmul="bfloat16"))
    assert tiles["dense attention"].executed == "bfloat16 tiles" and tiles["q/k norm + RoPE"].executed == "with the bfloat16 attention"
    assert tiles["SwiGLU"].executed.startswith("torch, ")
    attn = transformer_of(tiny_pipeline.load("t2va")).transformer_blocks[0].attn
    stock = attn.processor

    class Theirs(type(stock)):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden: torch.Tensor, rope: Any = None, mask: Any = None) -> Any:
            low = hidden.to(torch.bfloat16)
            torch.softmax(low @ low.mT, -1)  # such products alone make nobody's attention ours
            return hidden

    class Ours(Bfloat16Processor):
        def __call__(self, attn: Any, hidden: torch.Tensor, rope: Any = None, mask: Any = None) -> Any:
            torch.softmax(hidden @ hidden.mT, -1)  # and neither does the processor without them
            return hidden

    for planted in (Theirs(), Ours(stock, attn)):
        attn.processor = planted
        try:
            eager = looked(tiny_pipeline)
        finally:
            attn.processor = stock
        row = eager["dense attention"]
        assert row.executed == "eager softmax" and row.is_slow and "scaled_dot_product_attention" in row.fix
        assert eager["q/k norm + RoPE"].executed.startswith("torch, ")


def test_text_encoder_and_decoder_held_to_math_are_slow(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    only("text video_vae", monkeypatch)
    with sdpa_kernel(SDPBackend.MATH):
        math = looked(tiny_pipeline)
    for area in ("text encoder", "video VAE attention"):
        assert math[area].is_slow and math[area].executed == "math" and "sdpa_kernel(MATH)" in math[area].fix


def test_back_ends_from_the_hub_are_told_first_and_not_called(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    only("attention linears elementwise video_vae", monkeypatch)
    sound = looked(tiny_pipeline)
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH_HUB)
    found = examined(tiny_pipeline, Recipe())
    areas = {row.area: row for row in found.rows}
    for component in ("transformer", "vae", "audio_vae"):
        row = areas[f"back end of {component}"]
        assert row.is_slow and "offline" in row.reason and f"{component}.set_attention_backend('native')" in row.fix
        assert row.area not in sound
    assert "video VAE encode" in areas and not areas.keys() & {"dense attention", "linears", "video VAE attention"}
    assert found.winners() is None and (found.measured["rows"], found.measured["attention"]) == (0, [])


def test_nothing_is_saved_where_the_denoiser_cannot_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    only("attention", monkeypatch)
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", str(tmp_path))
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH_HUB)
    ask = ["doctor", "-m", str(tiny_model), "--size", "96x64", "--frames", "22", "--device", "cpu", "--save", "--strict"]
    assert main(ask) == 4 and "nothing saved: the denoiser could not run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_each_timed_product_scales_rows_of_its_own(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    only("linears", monkeypatch)
    rows, scaled = list[int](), float8._rows
    monkeypatch.setattr(float8, "_rows", lambda given: rows.append(len(given)) or scaled(given))  # type: ignore[func-returns-value]
    looked(tiny_pipeline, Savings(matmul="float8"))
    assert len(rows) >= 7  # profiled, warmed up, five times timed


@torch.no_grad()
def test_slow_convolution_and_a_graph_break_are_read_from_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv3d(4, 4, 3)
    row = check_convolution("VAE", "float32", see(lambda: conv(torch.zeros(1, 4, 5, 8, 8)), CPU), is_cuda=False)
    assert "conv3d" in row.executed and row.is_slow == ("slow_conv3d" in row.executed)
    from torch._dynamo import config, reset
    from torch._dynamo.utils import counters

    counters.clear()

    def broken(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * n
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(broken, backend="eager", dynamic=False)
    with config.patch(recompile_limit=2):
        for n in range(2, 6):
            compiled(torch.ones(3), n)
    found = check_compile({name: dict(group) for name, group in counters.items()})
    counters.clear()
    reset()
    assert found is not None and "graph breaks" in found.reason and "recompile limit was hit" in found.reason


def test_what_is_saved_is_read_again_beside_what_other_sizes_have(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", str(tmp_path))
    ask = ["doctor", "-m", str(tiny_model), "--size", "96x64", "--frames", "22", "--json", "--save", "--strict"]
    path, other = profile_path(CPU, read_environment()), Winners("bfloat16", 40000, "_native_flash")
    assert path is not None
    path.write_text(as_text(DeviceProfile(device_key(CPU), (other,))))
    code = main(ask)
    told = json.loads(capsys.readouterr().out)
    areas = {
        "text encoder",
        "text engine",
        "dense attention",
        "linears",
        "norms + modulation",
        "q/k norm + RoPE",
        "gated residual",
        "SwiGLU",
        "threads",
    }
    assert {row["area"] for row in told["areas"]} >= areas | {"video VAE attention", "video VAE decode", "video VAE encode"}
    for row in told["areas"]:
        if row["area"] in ("text encoder", "video VAE attention"):
            assert row["executed"] == "flash (CPU)" and not row["is_slow"]
    assert told["schema"] == "videogen.doctor/1" and code == (4 if any(row["is_slow"] for row in told["areas"]) else 0)
    profile = read_profile(CPU, read_environment())
    assert profile is not None and [(each.dtype, each.rows) for each in profile.entries] == [("bfloat16", 40000), ("float32", told["rows"])]
    assert profile.device == device_key(CPU) and Path(told["saved"]) == path and profile.entries[0] == other
    assert {row["name"] for row in profile.entries[1].measured["attention"]} >= {"native", "bfloat16 tiles", "flash_4_hub"}
    took = profile.entries[1].measured["block"]
    assert profile.entries[1].matmul == ("bfloat16" if took["bfloat16"] * 1.05 < took["model"] else "model")
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", "")
    assert profile_path(CPU, read_environment()) is None and main([*ask[:1], "--save", "-m", str(tiny_model)]) == 2
