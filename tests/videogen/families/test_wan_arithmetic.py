"""8-bit products and fused kernels on Wan: within their bound of the experts, gone afterwards, refused where they cannot be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from tests.videogen.families.wan_toy import save
from videogen.attention.options import SparseAttention
from videogen.config import Recipe, Request, StepCache
from videogen.errors import RequestError
from videogen.families import wan_pipeline
from videogen.kernels.wan import TORCH
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.transforms.float8 import products
from videogen.transforms.options import Savings

REQUEST = Request("a fox runs", size=(64, 32), frames=5, steps=4, seed=3, guidance=(4.0, 3.0))
EIGHT = Recipe("eight", savings=Savings(matmul="float8"))


def test_both_experts_multiply_in_8_bits_and_are_themselves_afterwards(tmp_path: Path) -> None:
    model = open_pipeline(str(save(tmp_path / "wide", "two", num_attention_heads=4)), "plain", device="cpu")
    plain, eight = model.render(REQUEST), model.sharing(EIGHT)
    found = eight.render(REQUEST)
    experts = model.load("t2v").transformers
    shelves = [model._kept.eight(expert) for expert in (0, 1)]
    assert [len(shelf.kept) for shelf in shelves] == [4 * 8] * 2
    assert found.record["savings"]["matmul"].startswith("float8") and plain.record["savings"].get("matmul") is None
    assert 0 < np.abs(found.frames.astype(float) - plain.frames).mean() < 4
    made = shelves[1].kept["0.up"][0]
    assert np.array_equal(eight.render(REQUEST).frames, found.frames) and shelves[1].kept["0.up"][0] is made
    assert np.array_equal(model.render(REQUEST).frames, plain.frames)
    assert not any("forward" in vars(module) for expert in experts for module in expert.modules())
    rows = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    for expert, shelf in zip(experts, shelves):
        for name, linear in products(expert):
            if linear.in_features == 48:
                low, scale = shelf.kept[name]
                apart = (rows @ (low.float() * scale).T - rows @ linear.weight.T).norm() / (rows @ linear.weight.T).norm()
                assert 0 < apart < 0.05, name


def test_widths_and_places_that_cannot_are_refused(folders: dict[str, Path], two: Pipeline) -> None:
    with pytest.raises(RequestError, match=r"widths \[24\] are no multiple of 16"):
        two.sharing(EIGHT).render(REQUEST)
    with pytest.raises(RequestError, match="float8 products"):
        open_pipeline(str(folders["two"]), EIGHT, device="cpu", placement=Placement("offload-idle"))


def test_kernels_stand_under_sparse_attention_and_the_cache(two: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = SparseAttention(budget=0.5, min_rows=0, tile=(2, 2, 2), block=(4, 2), dense_first=0.2, guard=None)
    recipe = Recipe("x", savings=Savings(attention="native"), sparse=sparse, cache=StepCache(lam=1e9, max_streak=1))
    plain, fused = two.sharing(recipe), two.sharing(recipe)
    fused.savings = replace(fused.savings, kernels=True)
    request = replace(REQUEST, frames=9, steps=8)
    wanted = plain.render(request)
    assert fused.render(request).record["savings"]["kernels"] == "off: Triton has no cpu back end here"
    calls: list[str] = []
    monkeypatch.setattr(wan_pipeline, "fault", lambda *_: "")
    monkeypatch.setattr(wan_pipeline, "FUSED", replace(TORCH, norm_rotate=lambda *given: calls.append("x") or TORCH.norm_rotate(*given)))
    found = fused.render(request)
    assert found.record["savings"]["kernels"] == "torch" and calls and np.array_equal(found.frames, wanted.frames)
    assert found.record["attention"] == wanted.record["attention"] and found.record["cache"] == wanted.record["cache"]
    assert all(isinstance(block.attn1.processor, WanAttnProcessor) for each in two.load("t2v").transformers for block in each.blocks)
