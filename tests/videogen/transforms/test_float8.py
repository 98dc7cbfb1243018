"""8-bit products stay within their bound of the model they stand for, follow its weights, and leave nothing behind."""

import pytest
import torch

from tests.conftest import TINY
from videogen import Request
from videogen.config import Recipe
from videogen.errors import RequestError
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline
from videogen.transforms.float8 import MOST, Float8Shelf, float8_products, quantised, refusal
from videogen.transforms.options import Savings
from videogen.transforms.settle import arithmetic


def apart(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new.double() - old.double()).norm() / old.double().norm())


def test_a_row_is_scaled_to_the_formats_range_and_comes_back_within_its_rounding() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1, 50, 1e4, 0])[:, None]
    low, scale = quantised(rows)
    assert low.float().abs().amax(-1).tolist() == [MOST] * 4 + [0]
    back = low.float() * scale
    assert torch.all((back - rows).abs() <= rows.abs() / 16 + scale / 512)  # three bits of mantissa; below them, the smallest step


def test_a_block_is_close_follows_written_weights_and_is_the_stock_one_afterwards(pipeline: Pipeline) -> None:
    model, shelf = transformer_of(pipeline.load("t2va")), Float8Shelf()
    rng = torch.Generator().manual_seed(1)
    hidden, temb = torch.randn(1, 150, 256, generator=rng), torch.randn(2, 32, generator=rng)
    rope, which, block = model.rope(torch.rand(150, 3, generator=rng) * 40), torch.arange(150) % 6, model.transformer_blocks[0]
    assert not refusal(model, hidden.device)

    def update() -> torch.Tensor:
        return block(hidden, temb, which, rope) - hidden

    with torch.no_grad():
        old = update()
        with float8_products(model, shelf):
            new, made = update(), shelf.kept["0.up"][0]
        assert 0 < apart(new, old) < 0.08 and torch.equal(update(), old)
        with float8_products(model, shelf):
            assert torch.equal(update(), new) and shelf.kept["0.up"][0] is made
        block.ff.net[2].weight.mul_(2.0)
        try:
            with float8_products(model, shelf):
                assert apart(update(), update_of := update()) == 0 and apart(update_of, new) > 0.1
        finally:
            block.ff.net[2].weight.div_(2.0)
    assert torch.equal(update().detach(), old) and not any("forward" in vars(module) for module in model.modules())


def test_a_request_says_so_and_another_arithmetic_is_another_stratum(pipeline: Pipeline) -> None:
    request = Request("a large red circle moves right on a navy background, a low tone", seed=3, **(TINY | {"steps": 1}))  # type: ignore[arg-type]
    savings = Savings(matmul="float8")
    told = pipeline.sharing(Recipe("float8", savings=savings)).render(request).record["savings"]["matmul"]
    assert told.startswith("float8, 0.00") and told.endswith("GB of scaled weights")
    assert arithmetic(savings, torch.float32) == "float32, 8-bit products"


def test_widths_the_product_cannot_take_are_refused(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer_of(pipeline.load("t2va"))
    down = model.transformer_blocks[3].ff.net[2]
    # set as an attribute it would stay away: pytest puts back what was in __dict__, and no parameter is
    monkeypatch.setitem(down._parameters, "weight", torch.nn.Parameter(torch.zeros(250, 576)))
    assert "no multiple of 16" in refusal(model, torch.device("cpu"))
    request = Request("a large red circle moves right on a navy background, a low tone", seed=3, **(TINY | {"steps": 1}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"savings matmul: got 'float8, but widths \[250\]"):
        pipeline.sharing(Recipe("float8", savings=Savings(matmul="float8"))).render(request)
