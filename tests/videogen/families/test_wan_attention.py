"""Sparse attention on Wan's self-attention: with every block kept it is dense attention, in tile order; cross-attention is left alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from videogen.attention.options import Guard, SparseAttention
from videogen.config import Recipe, Request, StepCache
from videogen.families.wan_attention import project, sites, wan_sparse
from videogen.families.wan_cache import Schedule
from videogen.families.wan_pipeline import schedule_of
from videogen.pipeline import Pipeline, open_pipeline

REQUEST = Request("a fox runs", size=(128, 64), frames=9, steps=10, seed=3, negative_prompt="blur")  # 3x4x8 rows
SPARSE = SparseAttention(budget=0.5, min_rows=0, tile=(2, 2, 2), block=(8, 4), dense_first=0.2)


def forward(transformer: Any, row_wise: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 5, 8, 16, generator=generator)
    text = torch.randn(1, 9, 32, generator=generator)
    timestep = torch.linspace(10, 900, 160)[None] if row_wise else torch.tensor([500.0])
    with torch.no_grad():
        return transformer(latents, timestep, text, return_dict=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("begin", [0, 32])
def test_with_every_block_kept_it_is_dense_attention(two: Pipeline, row_wise: bool, begin: int) -> None:
    transformer = two.load("t2v").pipe.transformer
    schedule = Schedule([1.0, 0.5, 0.0], 2, begin, (4 if begin else 5, 4, 8), False)
    options = replace(SPARSE, budget=1.0, dense_first=0.0)
    dense = forward(transformer, row_wise)
    with wan_sparse([transformer], [sites(transformer)], options, schedule) as told:
        whole = forward(transformer, row_wise)
    assert told["calls"] == {"sparse": 4} and told["kept_blocks"] == 1 and told["rows"] == {"all": 160, "exact": begin}
    torch.testing.assert_close(whole, dense, atol=2e-5, rtol=1e-4)
    assert torch.equal(forward(transformer, row_wise), dense)
    few = replace(options, budget=0.2, guard=None, tail="none")
    with wan_sparse([transformer], [sites(transformer)], few, schedule):
        assert 1e-4 < (forward(transformer, row_wise) - dense).norm() / dense.norm() < 0.5


def test_queries_keys_and_values_are_those_of_diffusers(two: Pipeline) -> None:
    transformer = two.load("t2v").pipe.transformer
    block, rows = transformer.blocks[0], torch.randn(1, 160, 24, generator=torch.Generator().manual_seed(1))
    rotary = transformer.rope(torch.zeros(1, 16, 5, 8, 16))
    with torch.no_grad():
        q, k, v = (x.transpose(1, 2) for x in project(block.attn1, rows, rotary))
        mixed = block.attn1.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3))
        torch.testing.assert_close(mixed, block.attn1(rows, None, None, rotary))


def test_a_clip_with_sparse_attention_and_the_cache(two: Pipeline) -> None:
    parts, plain = two.load("t2v"), two.render(REQUEST)
    before = [block.attn1.processor for each in parts.transformers for block in each.blocks]
    recipe = Recipe("sparse", sparse=SPARSE, cache=StepCache(lam=1e9, max_streak=1))
    result = two.sharing(recipe).render(REQUEST)
    told = result.record["attention"]
    assert [block.attn1.processor for each in parts.transformers for block in each.blocks] == before
    assert told["backend"] == "gather" and len(told["experts"]) == 2 and all(each["calls"]["sparse"] for each in told["experts"])
    assert told["experts"][0]["calls"]["first forwards"] == 4 * 4  # two steps of two streams, four layers
    assert "first forwards" not in told["experts"][1]["calls"]
    assert 0 < np.abs(result.frames.astype(float) - plain.frames).mean() < 4
    whole = two.sharing(Recipe("whole", sparse=replace(SPARSE, budget=1.0, guard=Guard(every=2)))).render(REQUEST)
    assert np.abs(whole.frames.astype(int) - plain.frames).max() <= 1 and whole.record["attention"]["reason"] == ""


def test_a_given_first_frame_is_exact_and_short_clips_stay_dense(folders: dict[str, Path], two: Pipeline) -> None:
    model = open_pipeline(str(folders["5b"]), "plain", device="cpu")
    request = replace(REQUEST, image=Image.new("RGB", (64, 32), (9, 200, 30)), size=(256, 128), steps=3)
    assert schedule_of(model.load("i2v").pipe, model.family.resolve(request, Recipe())).begin == 32
    told = model.sharing(Recipe("sparse", sparse=SPARSE)).render(request).record["attention"]
    assert told["rows"] == {"all": 96, "exact": 32} and told["calls"]["sparse"]
    short = two.sharing(Recipe("short", sparse=SparseAttention(budget=0.5))).render(replace(REQUEST, steps=2))
    assert short.record["attention"]["backend"] == "dense" and "short" in short.record["attention"]["reason"]
    assert np.array_equal(short.frames, two.render(replace(REQUEST, steps=2)).frames)
