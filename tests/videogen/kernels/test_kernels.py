"""The Triton kernels under Triton's interpreter against their definitions, and the definitions against the stock block."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from videogen import Request
from videogen.config import Recipe
from videogen.families.h3_pipeline import transformer_of
from videogen.kernels import check, definitions, fused, triton_kernels
from videogen.kernels.check import Shape, arguments, exact, relative_l2
from videogen.kernels.ops import FUSED, TORCH, Ops
from videogen.pipeline import Pipeline
from videogen.transforms.fused_blocks import FusedProcessor, fused_blocks
from videogen.transforms.fused_decoder import fused_decoder
from videogen.transforms.options import Savings
from videogen.transforms.settle import settled

PLAIN = Request("a large red circle moves right on a navy background, a low tone", seed=3, **TINY)  # type: ignore[arg-type]


def is_triton(name: str) -> bool:
    return name.partition(".")[0] == "triton" and not name.startswith("triton._C")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`fused` over kernels of an interpreted Triton, which must be chosen before Triton is imported."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if is_triton(name)}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_elementwise", triton_kernels.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        monkeypatch.setattr(fused, "triton_kernels", module)
        yield fused
    finally:
        for name in [name for name in sys.modules if is_triton(name)]:
            del sys.modules[name]
        sys.modules.update(mine)


@pytest.mark.skipif(not triton_kernels.IS_AVAILABLE, reason="no Triton for this platform")
def test_every_kernel_is_its_definition(interpreted: ModuleType) -> None:
    cpu = torch.device("cpu")
    shapes = Shape(rows=3, width=20, heads=2, head_width=8, rotated=6, ffn=20), Shape(2, 2, 33, 9, 8, 4, 33)
    for shape, dtype in ((shapes[0], torch.float32), (shapes[1], torch.float32), (shapes[0], torch.float16)):
        for name, given in arguments(shape, dtype, cpu).items():
            made, wanted = getattr(interpreted, name)(*given), exact(name, given)
            assert made.dtype == dtype and made.shape == getattr(definitions, name)(*given).shape
            assert relative_l2(made, wanted) < (1e-6 if dtype == torch.float32 else 5e-4), name


@pytest.mark.skipif(not triton_kernels.IS_AVAILABLE, reason="no Triton for this platform")
def test_a_wrong_or_broken_kernel_is_found_before_it_is_used(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(fused, "refusal", lambda *_: "")
    monkeypatch.setattr(check, "Shape", lambda: Shape(rows=2, width=20, heads=2, head_width=8, rotated=6, ffn=20))
    assert check.fault.__wrapped__(cpu, torch.float32) == ""
    wrong = replace(FUSED, gated_add=lambda *given: 1.01 * FUSED.gated_add(*given))
    monkeypatch.setattr(check, "FUSED", wrong)
    assert "gated_add is 1.0e-02 from its definition" in check.fault.__wrapped__(cpu, torch.float32)
    monkeypatch.setattr(check, "FUSED", replace(FUSED, swiglu=lambda: None))
    assert check.fault.__wrapped__(cpu, torch.float32).startswith("swiglu failed: TypeError")


def test_the_definitions_are_the_stock_blocks_bit_for_bit(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, int] = {}

    def counted(name: str) -> Callable[..., torch.Tensor]:
        def call(*given: Any) -> torch.Tensor:
            calls[name] = calls.get(name, 0) + 1
            return getattr(TORCH, name)(*given)  # type: ignore[no-any-return]

        return call

    ops = Ops("counted", *(counted(name) for name in ("rms_modulate", "rms_norm", "gated_add", "qk_rotate", "swiglu")))
    model = transformer_of(tiny_pipeline.load("t2va"))
    before = ["forward" in vars(module) for module in model.modules()]
    rng = torch.Generator().manual_seed(1)
    hidden, temb, which = torch.randn(1, 41, 64, generator=rng), torch.randn(2, 32, generator=rng), torch.arange(41) % 6
    rope = model.rope(torch.rand(41, 3, generator=rng) * 40)
    with torch.no_grad():
        for block in model.transformer_blocks:
            wanted = block(hidden, temb, which, rope)
            with fused_blocks(model, ops):
                assert isinstance(block.attn.processor, FusedProcessor) and torch.equal(block(hidden, temb, which, rope), wanted)
    assert calls == {"rms_modulate": 6, "gated_add": 6, "qk_rotate": 6, "swiglu": 3}
    assert ["forward" in vars(module) for module in model.modules()] == before
    assert not isinstance(model.transformer_blocks[0].attn.processor, FusedProcessor)


def test_the_definitions_are_the_stock_decoder_block_bit_for_bit(tiny_pipeline: Pipeline) -> None:
    vae = tiny_pipeline.load("t2va").vae
    latents = torch.randn(2, vae.config.latent_channels, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = vae.decoder(latents)
        broken = replace(TORCH, rms_norm=lambda *given: 1.5 * definitions.rms_norm(*given))
        with fused_decoder(vae, TORCH):
            assert torch.equal(vae.decoder(latents), wanted)
        with fused_decoder(vae, broken):
            assert not torch.equal(vae.decoder(latents), wanted)
        assert torch.equal(vae.decoder(latents), wanted)


def test_a_whole_clip_through_the_definitions_is_bit_identical(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videogen.transforms.settle.fault", lambda *_: "")
    monkeypatch.setattr("videogen.transforms.attach.FUSED", TORCH)
    one = tiny_pipeline.sharing(Recipe("fused", savings=Savings(kernels=True))).render(PLAIN)
    plain = tiny_pipeline.sharing(Recipe()).render(PLAIN)
    assert one.record["savings"] == {"kernels": "torch"} and (one.frames == plain.frames).all() and (one.audio == plain.audio).all()


def test_the_kernels_refuse_by_name_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, savings = torch.device("cpu"), Savings(kernels=True)
    settled_savings, reasons = settled(savings, cpu, torch.float32)
    assert not settled_savings.kernels and reasons["kernels"].startswith("off: Triton ")
    assert not fused.refusal(torch.device("cuda"), torch.bfloat16) or not triton_kernels.IS_AVAILABLE
    assert "float64" in fused.refusal(torch.device("cuda"), torch.float64)
    monkeypatch.setattr(triton_kernels, "IS_AVAILABLE", False)
    assert fused.refusal(torch.device("cuda"), torch.bfloat16) == "Triton is not installed"
    with pytest.raises(ValueError, match="tables: got strides"):
        fused.gated_add(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(4, 6).t(), torch.zeros(1, dtype=torch.long))
    assert FUSED.name == "triton"
