"""8-bit products on Wan: within their bound of the experts they stand for, kept for each, gone afterwards; refused where they cannot be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.videogen.families.wan_toy import save
from videogen.config import Recipe, Request
from videogen.errors import RequestError
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
