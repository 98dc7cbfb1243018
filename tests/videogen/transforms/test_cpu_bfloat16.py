"""bfloat16 products stay within their bound of the float32 model, with and without an adapter beside the weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.conftest import TINY
from tests.videogen.test_adapters import write
from videogen import Request
from videogen.attention.install import project
from videogen.config import Adapters, AdapterUse, Recipe
from videogen.errors import RequestError
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline
from videogen.transforms import cpu_bfloat16, settle
from videogen.transforms.cpu_bfloat16 import Bfloat16Processor, attend, bfloat16_products
from videogen.transforms.options import Savings
from videogen.transforms.settle import arithmetic, settled

LOW = Savings(matmul="bfloat16")
PLAIN = Request("a large red circle moves right on a navy background, a low tone", seed=3, **(TINY | {"steps": 1}))  # type: ignore[arg-type]


def apart(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new.double() - old.double()).norm() / old.double().norm())


@pytest.mark.parametrize("rows", [141, 300])
def test_a_forward_of_the_shipped_model_is_close(rows: int, pipeline: Pipeline) -> None:
    model = transformer_of(pipeline.load("t2va"))
    rng = torch.Generator().manual_seed(rows)
    hidden, temb = torch.randn(1, rows, 256, generator=rng), torch.randn(2, 32, generator=rng)
    rope = model.rope(torch.rand(rows, 3, generator=rng) * 40)
    which = torch.arange(rows) % 6
    with torch.no_grad():
        for block in model.transformer_blocks[::5]:
            old = block(hidden, temb, which, rope) - hidden
            with bfloat16_products(model):
                new = block(hidden, temb, which, rope) - hidden
                queries = block.attn.processor.project(block.attn, hidden, rope)
            assert 0 < apart(new, old) < 0.01
            for low, full in zip(queries, project(block.attn, hidden, rope)):
                assert low.shape == full.shape and apart(low, full) < 0.01
            assert torch.equal(block(hidden, temb, which, rope) - hidden, old)
    assert not any("forward" in vars(module) for module in model.modules())


def test_tiles_are_softmax_attention_and_a_mask_goes_to_the_stock_processor(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 2, 300, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=1.0)
    assert apart(attend(query, key, value).transpose(0, 1), wanted) < 0.02
    whole = torch.stack([torch.softmax(q @ k.t(), -1) @ v for q, k, v in zip(query, key, value)])
    for size in (cpu_bfloat16.SCORE_BYTES, 70 * 300 * 2):  # one tile, five of them
        monkeypatch.setattr(cpu_bfloat16, "SCORE_BYTES", size)
        assert apart(attend(query, key, value).transpose(0, 1), whole) < 1e-3
    attn = transformer_of(pipeline.load("t2va")).transformer_blocks[0].attn
    hidden, rope, mask = torch.randn(1, 5, 256), (torch.ones(5, 48), torch.zeros(5, 48)), torch.ones(5, 5, dtype=torch.bool).tril()
    processor = Bfloat16Processor(attn.processor, attn)
    assert torch.equal(processor(attn, hidden, rope, mask), attn.processor(attn, hidden, rope, mask))


def test_a_clip_is_close_and_an_adapter_keeps_its_effect(pipeline: Pipeline, tmp_path: Path) -> None:
    adapters = Adapters((AdapterUse(write(tmp_path / "a.safetensors"), 8),))
    for used in (Adapters(), adapters):
        new = pipeline.sharing(Recipe("low", savings=LOW, adapters=used)).render(PLAIN)
        old = pipeline.sharing(Recipe("full", adapters=used)).render(PLAIN)
        assert new.record["savings"] == {"matmul": "bfloat16"} and old.record["savings"] == {}
        assert np.abs(new.frames.astype(int) - old.frames).mean() < 0.5
        assert apart(torch.from_numpy(new.audio), torch.from_numpy(old.audio)) < 0.02


def test_auto_is_settled_by_what_the_cpu_can_do_and_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, auto = torch.device("cpu"), Savings(matmul="auto")
    for can, found in ((True, "bfloat16"), (False, "model")):
        monkeypatch.setattr(settle, "has_fast_bfloat16", lambda can=can: can)
        savings, reasons = settled(auto, cpu, torch.float32)
        assert savings.matmul == found and ("matmul" in reasons) is not can
    monkeypatch.setattr(settle, "has_fast_bfloat16", lambda: True)
    for dtype, found in (("float32", "model"), ("float32, bfloat16 products", "bfloat16")):
        assert settled(auto, cpu, torch.float32, [dtype])[0].matmul == found
    assert settled(auto, cpu, torch.bfloat16)[0].matmul == "model"
    assert settled(auto, torch.device("cuda"), torch.float32)[0].matmul == "model"
    with pytest.raises(RequestError, match=r"savings matmul: got 'bfloat16 with torch\.bfloat16 on cpu'"):
        settled(LOW, cpu, torch.bfloat16)
    assert arithmetic(LOW, torch.float32) == "float32, bfloat16 products" and arithmetic(Savings(), torch.float32) == "float32"
    parked, reasons = settled(replace(auto, adaln_tables=True, park_adaln=True), cpu, torch.float32)
    assert not parked.park_adaln and "host memory" in reasons["park_adaln"]
