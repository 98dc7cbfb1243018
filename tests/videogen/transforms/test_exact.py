"""Every saving on its own and all together leave the clip as it was, bit for bit, and each one saves what it says."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.conftest import TINY
from videogen import Request, Result
from videogen.config import Adapters, AdapterUse, Recipe
from videogen.errors import RequestError
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline
from videogen.recipes import EXACT
from videogen.transforms.adaln import TableShelf, adaln_tables
from videogen.transforms.encodings import Encodings, on_device
from videogen.transforms.options import Savings

PLAIN = Request("a large red circle moves right on a navy background, a low tone", seed=3, **TINY)  # type: ignore[arg-type]
PARTS = ("adaln_tables", "refined_text", "rope_tables", "text_cut", "lean_loop")


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    picture = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(picture)
    return {"t2va": PLAIN, "fl2va": replace(PLAIN, image=picture), "ref2va": replace(PLAIN, references=(picture,))}


def make(pipeline: Pipeline, request: Request, savings: Savings, adapters: Adapters | None = None) -> Result:
    return pipeline.sharing(Recipe("test", savings=savings, adapters=adapters or Adapters())).render(request)


def same(a: Result, b: Result) -> bool:
    return bool(np.array_equal(a.frames, b.frames) and np.array_equal(a.audio, b.audio))


@contextmanager
def counting(pipe: Any) -> Iterator[dict[str, int]]:
    """How often the parts that savings spare run inside the scope."""
    model, layers = transformer_of(pipe), pipe.text_encoder.model.language_model.layers
    watched = {"adaln": model.transformer_blocks[1].adaln_proj.linear, "refiner": model.token_refiner.refiner_blocks[0].ff}
    watched |= {"layer 50": layers[50].mlp, "layer 49": layers[49].mlp}
    seen = dict.fromkeys([*watched, "rope", "lookup"], 0)

    def bump(name: str) -> Any:
        def hook(*_: Any) -> None:
            seen[name] += 1

        return hook

    stock_rope, stock_lookup = type(model.rope).forward, type(pipe.scheduler).index_for_timestep

    def rope(self: Any, position_ids: torch.Tensor) -> Any:
        seen["rope"] += 1
        return stock_rope(self, position_ids)

    def lookup(self: Any, timestep: torch.Tensor) -> int:
        seen["lookup"] += 1
        return int(stock_lookup(self, timestep))

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, module in watched.items():
            stack.callback(module.register_forward_hook(bump(name)).remove)
        patch.setattr(type(model.rope), "forward", rope)
        patch.setattr(type(pipe.scheduler), "index_for_timestep", lookup)
        yield seen


def test_each_part_alone_is_bit_identical_and_spares_its_work(tiny_pipeline: Pipeline, requests: dict[str, Request]) -> None:
    request = requests["t2va"]
    found = {}
    for name in ("", *PARTS):
        with counting(tiny_pipeline.load("t2va")) as seen:
            found[name] = make(tiny_pipeline, request, Savings(**({name: True} if name else {})))
        spared = {
            "adaln_tables": "adaln_tables" in found[name].record["savings"],
            "refined_text": seen["refiner"] == 1,
            "rope_tables": seen["rope"] == 1,
            "text_cut": seen["layer 50"] == 0,
            "lean_loop": seen["lookup"] == 0,
        }
        assert seen["layer 49"] == 1 and found[name].record["forwards"] == 2
        assert {part for part, is_spared in spared.items() if is_spared} == ({name} if name else set())
        assert same(found[name], found[""]), name


def owning(pipe: Any) -> list[str]:
    return [name for name, module in transformer_of(pipe).named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("workflow", ["t2va", "fl2va", "ref2va"])
def test_all_parts_together_are_bit_identical_and_leave_no_trace(
    workflow: str, tiny_pipeline: Pipeline, requests: dict[str, Request]
) -> None:
    pipe, request = tiny_pipeline.load(workflow), requests[workflow]
    before = owning(pipe)  # diffusers' own caches leave some behind, in a pipeline that tests share
    plain = make(tiny_pipeline, request, Savings())
    with counting(pipe) as seen:
        first, again = (make(tiny_pipeline, request, EXACT) for _ in range(2))
    assert same(first, plain) and same(again, plain)
    told = {"encodings text_encoder": "kept", "adaln_tables": "kept"}
    assert seen["layer 49"] <= 1 and seen["adaln"] <= 2 and again.record["savings"].items() >= told.items()
    assert owning(pipe) == before and not transformer_of(pipe)._forward_pre_hooks


def test_tables_follow_the_weights_an_adapter_and_a_write_change(tiny_pipeline: Pipeline, tmp_path: Path) -> None:
    module = "transformer_blocks.1.adaln_proj.linear"
    weight = transformer_of(tiny_pipeline.load("t2va")).get_submodule(module).weight
    rng = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, weight.shape[1], generator=rng), torch.randn(weight.shape[0], 2, generator=rng)
    save_file({f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, tmp_path / "a.safetensors", {"alpha": "2"})
    adapted = Adapters((AdapterUse(str(tmp_path / "a.safetensors"), 4),))
    tables = Savings(adaln_tables=True)
    base, changed = make(tiny_pipeline, PLAIN, tables), make(tiny_pipeline, PLAIN, tables, adapted)
    assert not same(base, changed) and same(changed, make(tiny_pipeline, PLAIN, Savings(), adapted))
    original = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(3)
    try:
        written = make(tiny_pipeline, PLAIN, tables)
        assert not same(base, written) and same(written, make(tiny_pipeline, PLAIN, Savings()))
    finally:
        with torch.no_grad():
            weight.copy_(original)


def test_another_tensor_than_the_schedules_is_computed_in_full(tiny_pipeline: Pipeline) -> None:
    model = transformer_of(tiny_pipeline.load("t2va"))
    block, step = model.transformer_blocks[1], torch.tensor([0.25, 0.5])
    shelf, temb = TableShelf(), model.time_embedder(model.time_proj(torch.tensor([0.75])))
    with torch.no_grad(), adaln_tables(model, [step], shelf) as is_new:
        assert is_new and len(block.adaln_proj(temb)[0]) == 3  # no forward of the transformer named a step
    with torch.no_grad(), adaln_tables(model, [step.clone()], shelf) as is_new:
        assert not is_new and len(shelf.kept) == 1 and next(iter(shelf.kept.values())).num_bytes == 3 * 6 * 6 * 64 * 4
    with torch.no_grad():
        next(block.adaln_proj.parameters()).mul_(1)  # a write that changes nothing, but the shelf cannot know
    with torch.no_grad(), adaln_tables(model, [step], shelf) as is_new:
        assert is_new and len(shelf.kept) == 1  # the tables of before can never be asked for again


def test_savings_are_off_by_default_and_parking_needs_tables() -> None:
    assert not any(value for value in (getattr(Savings(), field.name) for field in fields(Savings)) if value != "model")
    with pytest.raises(RequestError, match="savings park_adaln without adaln_tables"):
        Savings(park_adaln=True)
    with pytest.raises(RequestError, match="savings matmul: got 'int8', expected one of"):
        Savings(matmul="int8")


def test_encodings_are_kept_by_content_within_bounds_and_are_copies() -> None:
    kept, computed = Encodings(max_bytes=100), []

    def values(size: int) -> Any:
        def compute() -> dict[str, Any]:
            computed.append(size)
            return {"a": torch.zeros(size, dtype=torch.uint8), "b": [torch.ones(1, dtype=torch.uint8)]}

        return compute

    first, was_kept = kept.take(("a",), 2, values(40))
    first["a"].add_(7)
    second, is_kept = kept.take(("a",), 2, values(40))
    second["b"][0].add_(7)
    assert not was_kept and is_kept and not second["a"].any() and kept.take(("a",), 2, values(40))[0]["b"][0].item() == 1
    kept.take(("b",), 2, values(40))
    kept.take(("a",), 2, values(40))
    kept.take(("c",), 2, values(40))  # b goes: least recently used
    kept.take(("d",), 2, values(200))  # too large alone
    assert list(kept.kept) == [("a",), ("c",)] and computed == [40, 40, 40, 200]
    kept.take(("e",), 2, values(90))
    assert list(kept.kept) == [("e",)]


def test_embeddings_follow_the_device_and_tags_stay_where_the_layout_is_made() -> None:
    values = {"prompt_embeds": torch.zeros(1, 2, 3), "text_token_tags": torch.zeros(2, dtype=torch.long), "latents": [torch.zeros(1)]}
    moved = on_device(values, torch.device("meta"))
    assert moved["prompt_embeds"].is_meta and moved["latents"][0].is_meta and not moved["text_token_tags"].is_meta
