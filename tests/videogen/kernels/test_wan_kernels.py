"""Wan's kernels under Triton's interpreter against their definitions, and the definitions against the stock block."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.videogen.families.wan_toy import transformer
from tests.videogen.kernels.interpreter import loaded
from videogen.kernels import fused, wan, wan_triton
from videogen.kernels.check import relative_l2
from videogen.transforms.fused_wan import WanFusedProcessor, fused_wan

CPU = torch.device("cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    with loaded(wan_triton.__file__, monkeypatch) as module:
        monkeypatch.setattr(wan, "wan_triton", module)
        yield wan


@pytest.mark.skipif(wan_triton.triton is None, reason="no Triton for this platform")
def test_every_kernel_is_its_definition(interpreted: ModuleType) -> None:
    for dtype, sizes in ((torch.float32, (2, 3, 3, 6)), (torch.float16, (1, 2, 2, 8)), (torch.float32, (1, 3, 1, 4))):
        batch, rows, heads, width = sizes
        for name, given in wan.arguments(dtype, CPU, batch=batch, rows=rows, heads=heads, width=width).items():
            kind = name.split()[0]
            made, stock = getattr(interpreted.FUSED, kind)(*given), getattr(wan.TORCH, kind)(*given)
            assert made.dtype == dtype and made.shape == stock.shape
            assert relative_l2(made, wan.exact(name, given)) < (1e-6 if dtype == torch.float32 else 6e-4), (name, sizes)


@pytest.mark.skipif(wan_triton.triton is None, reason="no Triton for this platform")
def test_a_wrong_or_broken_kernel_is_found_before_it_is_used(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "refusal", lambda *_: "")
    small = wan.arguments(torch.float32, CPU, rows=2, heads=2, width=4)
    monkeypatch.setattr(wan, "arguments", lambda *_: small)
    assert wan.fault.__wrapped__(CPU, torch.float32) == ""
    monkeypatch.setattr(wan, "FUSED", replace(wan.FUSED, gate_add=lambda *given: 1.01 * wan.TORCH.gate_add(*given)))
    assert "gate_add is 1.0e-02 from its definition" in wan.fault.__wrapped__(CPU, torch.float32)
    monkeypatch.setattr(wan, "FUSED", replace(wan.FUSED, layer_norm=lambda: None))
    assert wan.fault.__wrapped__(CPU, torch.float32).startswith("layer_norm failed: TypeError")


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definitions_are_the_stock_blocks_bit_for_bit(has_norm: bool, dtype: torch.dtype) -> None:
    with torch.random.fork_rng():
        model = transformer(0, cross_attn_norm=has_norm)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")):
            parameter.data = parameter.data.to(dtype)
    draw = torch.Generator().manual_seed(0)
    latents, text = (torch.randn(size, generator=draw).to(dtype) for size in ((1, 16, 3, 4, 8), (1, 9, 32)))
    for timestep in (torch.tensor([500.0]), torch.linspace(10, 900, 24)[None]):
        with torch.no_grad():
            stock = model(latents, timestep, text, return_dict=False)[0]
            with fused_wan(model, wan.TORCH):
                assert type(model.blocks[0].attn1.processor) is WanFusedProcessor
                assert torch.equal(model(latents, timestep, text, return_dict=False)[0], stock)
            assert torch.equal(model(latents, timestep, text, return_dict=False)[0], stock)
    assert not any("forward" in vars(block) for block in model.blocks) and type(model.blocks[0].attn1.processor) is not WanFusedProcessor
