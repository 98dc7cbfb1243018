"""The doctor on a real model: planted faults are seen in what ran, and what it saves is what an opened pipeline uses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import TINY
from videogen import Request
from videogen.cli.main import main
from videogen.config import Recipe, read_environment
from videogen.device_profile import SCHEMA, DeviceProfile, as_text, device_key, profile_path, read_profile
from videogen.doctor.examine import Examination
from videogen.doctor.report import Row
from videogen.doctor.rules import check_compile, check_convolution
from videogen.doctor.seen import see
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline, open_pipeline
from videogen.transforms.options import Savings

CPU = torch.device("cpu")
REQUEST = Request("a large red circle", **TINY)  # type: ignore[arg-type]


def looked(pipeline: Pipeline) -> dict[str, Row]:
    plain = pipeline.sharing(Recipe())
    resolved = plain.family.resolve(REQUEST, plain.recipe)
    found = Examination(plain.load("t2va"), resolved, plain.transforms_for(resolved), CPU, {}, False)
    found.look()
    return {row.area: row for row in found.rows}


def test_a_mask_that_masks_nothing_and_math_are_seen_in_what_ran(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    for area in ("elementwise", "video_vae", "process"):
        monkeypatch.setattr(Examination, area, lambda *_: None)
    monkeypatch.setattr(Examination, "text", lambda _, encode: encode())
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


def test_what_is_saved_is_what_a_pipeline_uses(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", str(tmp_path))
    ask = ["doctor", "-m", str(tiny_model), "--size", "96x64", "--frames", "22", "--json", "--save", "--strict"]
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
    assert next(row["executed"] for row in told["areas"] if row["area"] == "text encoder") == "flash (CPU)"
    assert told["schema"] == "videogen.doctor/1" and code == (4 if any(row["is_slow"] for row in told["areas"]) else 0)
    profile = read_profile(CPU, read_environment())
    assert profile is not None and profile.device == device_key(CPU) and Path(told["saved"]) == profile_path(CPU, read_environment())
    assert {row["name"] for row in profile.measured["attention"]} >= {"native", "bfloat16 tiles", "flash_4_hub"}
    for matmul in ("bfloat16", "model"):
        Path(told["saved"]).write_text(as_text(DeviceProfile(device_key(CPU), "_native_flash", matmul)))
        opened = open_pipeline(str(tiny_model), Recipe("a", savings=Savings(matmul="auto", attention="auto")))
        assert opened.savings.matmul == matmul and opened.savings.attention == "_native_flash"
        assert opened.sharing(Recipe()).savings == Savings()
    assert opened.render(replace(REQUEST, steps=1)).record["savings"]["attention"] == "_native_flash"
    assert transformer_of(opened.load("t2va")).transformer_blocks[0].attn.processor._attention_backend is None
    for text in ("{", json.dumps({"schema": SCHEMA, "device": "another", "attention": None, "matmul": None, "measured": {}})):
        Path(told["saved"]).write_text(text)
        assert read_profile(CPU, read_environment()) is None
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", "")
    assert profile_path(CPU, read_environment()) is None and main([*ask[:1], "--save", "-m", str(tiny_model)]) == 2
