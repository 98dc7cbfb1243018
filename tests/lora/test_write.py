"""Every layout we write reads back to the same updates, with and without our hints, and no half-written file is left."""

from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers as theirs
from safetensors.torch import load_file

from lora import write
from lora.adapter import Adapter, Factors, Patch
from lora.apply import Use, attached
from lora.contract import resolve_contract
from lora.convert import load_adapter
from lora.files import open_file
from lora.write import LAYOUTS, export, write_adapter
from tests.lora.toys import MODULES, TARGET, check, forward, make_model, make_truth


def adapter_of(scale: float = 1.0, is_shared: bool = True, dtype: torch.dtype = torch.float32) -> Adapter:
    truth = make_truth(is_shared=is_shared)
    return Adapter("a", "a", "toy", {name: Factors(down.to(dtype), up.to(dtype), scale) for name, (down, up) in truth.items()}, {})


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_reads_back(layout: str, is_shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "minimax_h3_fl2v_4step_v0.1.safetensors"  # a name for which the table would say alpha 8
    write_adapter(adapter_of(0.3, is_shared), TARGET, layout, path, {"nfe": "4"})
    again = load_adapter(path, TARGET)
    check(again, make_truth(is_shared=is_shared), 0.3)
    assert {scale for scale, _ in again.scales()} == {1.0} and resolve_contract("x", again.metadata).forwards == 4
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("layout", ["original", "comfyui", "kohya"])
def test_diffusers_own_converter_agrees_with_what_we_write(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_adapter(adapter_of(0.5), TARGET, layout, path, {})
    converted = theirs(load_file(path))
    assert len(converted) == 2 * len(MODULES)
    for name, (down, up) in make_truth().items():
        delta = converted[f"transformer.{name}.lora_B.weight"] @ converted[f"transformer.{name}.lora_A.weight"]
        assert torch.allclose(delta, 0.5 * up @ down, rtol=1e-5, atol=1e-7), name


def test_peft_computes_the_same_as_our_branches(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_adapter(adapter_of(0.5), TARGET, "diffusers", path, {})
    model: MiniMaxH3Transformer3DModel = make_model()
    with attached(model, [Use(load_adapter(path, TARGET))]):
        ours = forward(model)
    model.load_lora_adapter(load_file(path), prefix="transformer")
    assert torch.allclose(forward(model), ours, rtol=1e-4, atol=1e-5)


def test_a_power_of_two_folds_without_a_wider_type(tmp_path: Path) -> None:
    for scale, dtype in ((0.0625, torch.bfloat16), (0.3, torch.float32)):
        tensors = export(adapter_of(scale, dtype=torch.bfloat16), TARGET, "diffusers")
        assert tensors["transformer.proj_in.lora_B.weight"].dtype == dtype
        assert tensors["transformer.proj_in.lora_A.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_payloads_and_lone_projections(layout: str, tmp_path: Path) -> None:
    whole = adapter_of()
    rng = torch.Generator().manual_seed(3)
    patches = {
        "proj_out.weight": Patch(torch.randn(16, 64, generator=rng), False),
        "proj_out.bias": Patch(torch.randn(16, generator=rng), False),
        "norm_out.norm.weight": Patch(torch.randn(64, generator=rng), True),
        "transformer_blocks.0.ff.net.0.proj.weight": Patch(torch.randn(192, 64, generator=rng), True),
    }
    only_q = {name: whole.factors[name] for name in ("transformer_blocks.1.attn.to_q", "transformer_blocks.2.attn.to_k")}
    path = tmp_path / "a.safetensors"
    write_adapter(Adapter("a", "a", "toy", only_q, patches), TARGET, layout, path, {})
    again = load_adapter(path, TARGET)
    assert set(again.patches) == set(patches)
    assert all(torch.equal(again.patches[name].value, patch.value) for name, patch in patches.items())
    assert {name for name, factors in again.factors.items() if factors.norm() > 0} == set(only_q)


@pytest.mark.parametrize("layout", ["comfyui", "diffsynth"])
def test_unequal_ranks_and_scales_of_one_attention(layout: str, tmp_path: Path) -> None:
    parts = {}
    for i, (letter, rank) in enumerate(zip("qkv", (4, 2, 3))):
        name = f"transformer_blocks.0.attn.to_{letter}"
        down, up = make_truth((name,), rank=rank, is_shared=False, seed=i)[name]
        parts[name] = Factors(down, up, 0.5 + i)
    path = tmp_path / "a.safetensors"
    write_adapter(Adapter("a", "a", "toy", parts, {}), TARGET, layout, path, {})
    for name, factors in load_adapter(path, TARGET).factors.items():
        assert torch.allclose(factors.delta(), parts[name].delta(), rtol=1e-5, atol=1e-7)


def test_a_value_first_file_by_name_is_not_swapped_twice(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        path = tmp_path / f"FastVideo_FastH3_{layout}.safetensors"  # the table says [value; gate] for that name
        write_adapter(adapter_of(), TARGET, layout, path, {})
        check(load_adapter(path, TARGET), make_truth())


def test_what_exists_is_kept_and_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="pass --overwrite"):
        write_adapter(adapter_of(), TARGET, "diffusers", path, {})
    with pytest.raises(ValueError, match="layout: got sideways"):
        write_adapter(adapter_of(), TARGET, "sideways", path, {}, overwrite=True)
    with pytest.raises(ValueError, match="existing folder"):
        write_adapter(adapter_of(), TARGET, "diffusers", tmp_path / "none" / "a.safetensors", {})
    lone = Adapter("a", "a", "toy", {}, {"transformer_blocks.0.attn.to_q.weight": Patch(torch.ones(64, 64), False)})
    with pytest.raises(ValueError, match="keeps q, k and v apart"):
        write_adapter(lone, TARGET, "comfyui", path, {}, overwrite=True)
    monkeypatch.setattr(write, "swap_halves", lambda rows: rows)  # a writer with a fault
    with pytest.raises(ValueError, match=r"written adapter: got .*ff.net.0.proj off by"):
        write_adapter(adapter_of(), TARGET, "comfyui", path, {}, overwrite=True)
    assert path.read_bytes() == b"mine" and [item.name for item in tmp_path.iterdir()] == ["a.safetensors"]
    write_adapter(adapter_of(), TARGET, "diffusers", path, {}, overwrite=True)
    assert open_file(path).metadata["scale_folded"] == "true"


def test_files_that_differ_are_told_apart() -> None:
    one, two = adapter_of(), adapter_of(1.00001)
    write.compare(one, adapter_of())
    with pytest.raises(ValueError, match="off by"):
        write.compare(one, two)
    with pytest.raises(ValueError, match="other modules"):
        write.compare(one, Adapter("b", "b", "toy", {"proj_in": one.factors["proj_in"]}, {}))
    patch = {"proj_in.bias": Patch(torch.ones(64), False)}
    with pytest.raises(ValueError, match="another payload"):
        other = {"proj_in.bias": Patch(torch.zeros(64), False)}
        write.compare(Adapter("b", "b", "toy", {}, patch), Adapter("b", "b", "toy", {}, other))
