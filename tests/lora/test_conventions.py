"""Each producer's file, built from known factors, gives the known deltas; in any mix of prefix, infix and suffix."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora.convert import ReadOptions, load_adapter
from lora.layouts import decide_layout
from tests.lora.toys import HEAD_DIM, MODULES, TARGET, Tensors, Truth, check, diffusers, flat, make_truth, original, save, with_alpha

DOWN_UP = ("lora_down", "lora_up")
ADALN = r".*blocks\.\d+\.adaln_proj\.linear"
OLD = ("lora.down", "lora.up")


def _kohya(truth: Truth) -> Tensors:
    return flat(with_alpha(original(truth, halves=DOWN_UP), 4.0))


CONVENTIONS: dict[str, Callable[[Truth], Tensors]] = {
    "1 original, bare": original,
    "2 comfyui": lambda truth: original(truth, "diffusion_model."),
    "2b comfyui, kohya suffix": lambda truth: original(truth, "diffusion_model.", halves=DOWN_UP),
    "3 kohya flat": lambda truth: flat(original(truth, halves=DOWN_UP)),
    "3 kohya flat on diffusers names": lambda truth: flat(diffusers(truth, "", halves=DOWN_UP)),
    "4 diffusers": diffusers,
    "4 diffusers, old suffix": lambda truth: diffusers(truth, halves=OLD),
    "4 diffusers, kohya suffix": lambda truth: diffusers(truth, halves=DOWN_UP),
    "5 diffusers bare, infix": lambda truth: diffusers(truth, "", ".default"),
    "6 diffusers bare": lambda truth: diffusers(truth, ""),
    "7 raw peft": lambda truth: diffusers(truth, "base_model.model."),
    "7b peft on original names": lambda truth: original(truth, "base_model.model."),
    "9 original under transformer.": lambda truth: original(truth, "transformer."),
    "10 split q/k/v on original names": lambda truth: original(truth, "diffusion_model.", is_fused=False),
    "comfyui prefix on diffusers names": lambda truth: diffusers(truth, "diffusion_model."),
    "model.diffusion_model.": lambda truth: original(truth, "model.diffusion_model."),
    "dit.": lambda truth: original(truth, "dit."),
    "lycoris_": lambda truth: flat(original(truth, halves=DOWN_UP), "lycoris_"),
    "lora_transformer_": lambda truth: flat(diffusers(truth, "", halves=DOWN_UP), "lora_transformer_"),
    "model. and unet.": lambda truth: original(truth, "model.unet."),
    "transformer_ref.": lambda truth: diffusers(truth, "transformer_ref."),
    "peft prefix around transformer.": lambda truth: diffusers(truth, "base_model.model.transformer.", ".default"),
}

PARTITIONS = dict.fromkeys((name for name in CONVENTIONS if name.startswith("4 ") or name.endswith("transformer.")), "transformer")
PARTITIONS["transformer_ref."] = "transformer_ref"


@pytest.mark.parametrize("is_shared", [True, False], ids=["one down for q/k/v", "block-diagonal"])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_gives_the_known_deltas(name: str, is_shared: bool, tmp_path: Path) -> None:
    truth = make_truth(is_shared=is_shared)
    adapter = load_adapter(save(tmp_path / "a.safetensors", CONVENTIONS[name](truth)), TARGET)
    check(adapter, truth)
    for module, (down, up) in truth.items():  # exactly, not nearly: nothing was computed
        assert torch.equal(adapter.factors[module].down, down) and torch.equal(adapter.factors[module].up, up)
    assert adapter.ranks() == {2: 3, 4: len(MODULES) - 3}
    assert adapter.partition == PARTITIONS.get(name)


@pytest.mark.parametrize("halves", [("lora_A", "lora_B"), DOWN_UP])
def test_two_naming_rules_in_one_file(halves: tuple[str, str], tmp_path: Path) -> None:
    truth = make_truth()
    first = {name: pair for name, pair in truth.items() if name.startswith("transformer_blocks.")}
    rest = {name: pair for name, pair in truth.items() if name not in first}
    adapter = load_adapter(save(tmp_path / "a.safetensors", original(first, halves=halves) | diffusers(rest)), TARGET)
    check(adapter, truth)
    assert "original names + " in adapter.layout or " + original names" in adapter.layout


def test_8_diffsynth_by_flag_by_metadata_and_by_proof(tmp_path: Path) -> None:
    truth = make_truth()
    tensors = original(truth, infix=".default", order="interleaved")
    path = save(tmp_path / "a.safetensors", tensors)
    check(load_adapter(path, TARGET, ReadOptions(qkv_order="interleaved")), truth)
    check(load_adapter(save(tmp_path / "b.safetensors", tensors, {"qkv_order": "interleaved"}), TARGET), truth)
    apart = make_truth(is_shared=False)
    blocks = load_adapter(save(tmp_path / "c.safetensors", original(apart, infix=".default", order="interleaved")), TARGET)
    check(blocks, apart)
    assert any("interleaved: the zeros" in note for note in blocks.notes)
    with pytest.raises(ValueError, match="stacked by the file, interleaved by the option"):
        load_adapter(save(tmp_path / "d.safetensors", tensors, {"qkv_order": "stacked"}), TARGET, ReadOptions(qkv_order="interleaved"))


def test_8_diffsynth_by_the_norms_of_its_heads(tmp_path: Path) -> None:
    truth = make_truth(is_spread=True)
    for order in ("stacked", "interleaved"):
        adapter = load_adapter(save(tmp_path / f"{order}.safetensors", original(truth, infix=".default", order=order)), TARGET)
        check(adapter, truth)
        assert any(f"taken as {order}: block norms over 4 modules" in note for note in adapter.notes)


def test_the_head_width_is_the_models_own(tmp_path: Path) -> None:
    assert set(TARGET.head_dims.values()) == {HEAD_DIM}
    bare = type(TARGET)(TARGET.shapes, TARGET.linears, {})
    path = save(tmp_path / "a.safetensors", original(make_truth(), infix=".default", order="interleaved"))
    with pytest.raises(ValueError, match="no head width"):
        load_adapter(path, bare, ReadOptions(qkv_order="interleaved"))
    with pytest.raises(ValueError, match="q/k/v order"):
        load_adapter(path, bare)


def test_11_payloads_of_every_kind(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(2)
    qkv, fc1, norm, bias = (torch.randn(shape, generator=rng) for shape in ((192, 64), (192, 64), (64,), (16,)))
    prefix = "diffusion_model."
    payload = {
        f"{prefix}blocks.0.attn.qkv_proj.diff": qkv,
        f"{prefix}blocks.1.mlp.fc1.set_weight": fc1,
        f"{prefix}blocks.0.norm1.diff": norm,
        f"{prefix}blocks.0.attn.q_norm.diff": norm[:HEAD_DIM],
        f"{prefix}final_layer.video_out.diff_b": bias,
        f"{prefix}final_layer.audio_out.set_bias": bias[:8],
    }
    truth = make_truth(("proj_out",))
    adapter = load_adapter(save(tmp_path / "a.safetensors", original(truth, prefix) | payload), TARGET)
    check(adapter, truth)
    expected = {
        "transformer_blocks.0.attn.to_q.weight": qkv[:64],
        "transformer_blocks.0.attn.to_k.weight": qkv[64:128],
        "transformer_blocks.0.attn.to_v.weight": qkv[128:],
        "transformer_blocks.1.ff.net.0.proj.weight": torch.cat([fc1[96:], fc1[:96]]),
        "transformer_blocks.0.norm1.weight": norm,
        "transformer_blocks.0.attn.norm_q.weight": norm[:HEAD_DIM],
        "proj_out.bias": bias,
        "audio_proj_out.bias": bias[:8],
    }
    assert set(adapter.patches) == set(expected)
    for name, value in expected.items():
        assert torch.equal(adapter.patches[name].value, value), name
        assert adapter.patches[name].is_replacement == (name in ("transformer_blocks.1.ff.net.0.proj.weight", "audio_proj_out.bias"))


def test_11_payloads_of_fused_rows_follow_the_order_too(tmp_path: Path) -> None:
    qkv = torch.randn(192, 64, generator=torch.Generator().manual_seed(2))
    tensors = diffusers(make_truth(("proj_out",)), infix=".default") | {"blocks.0.attn.qkv_proj.set_weight": qkv}
    path = save(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ValueError, match="q/k/v order"):
        load_adapter(path, TARGET)
    adapter = load_adapter(path, TARGET, ReadOptions(qkv_order="interleaved"))
    wanted = torch.cat([qkv[48 * head + 16 : 48 * head + 32] for head in range(4)])
    assert torch.equal(adapter.patches["transformer_blocks.0.attn.to_k.weight"].value, wanted)


def test_a_file_with_both_partitions_is_chosen_from(tmp_path: Path) -> None:
    base, ref = make_truth(seed=1), make_truth(seed=2)
    path = save(tmp_path / "a.safetensors", diffusers(base) | diffusers(ref, "transformer_ref."))
    check(load_adapter(path, TARGET, ReadOptions(partition="transformer")), base)
    adapter = load_adapter(path, TARGET, ReadOptions(partition="transformer_ref"))
    check(adapter, ref)
    assert adapter.partition == "transformer_ref"
    with pytest.raises(ValueError, match="say which partition"):
        load_adapter(path, TARGET)


def test_a_peft_folder_brings_its_alpha_and_its_patterns(tmp_path: Path) -> None:
    truth = make_truth(is_shared=False)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "rank_pattern": {ADALN: 2}}
    config["alpha_pattern"] = {ADALN: 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save(tmp_path / "adapter_model.safetensors", diffusers(truth, "base_model.model."))
    adapter = load_adapter(tmp_path, TARGET)
    check(adapter, truth, 0.5)
    assert adapter.scales() == {(0.5, "adapter_config.json"): len(MODULES)} and adapter.name == tmp_path.name
    save(tmp_path / "adapter_model.safetensors", original(truth, "base_model.model."))
    check(load_adapter(tmp_path, TARGET), truth, 0.5)  # q/k/v at rank 12, fused from 4 by someone who left the config alone
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True, "alpha_pattern": {ADALN: 2**0.5}}))
    check(load_adapter(tmp_path, TARGET), truth, 1.0)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(ValueError, match=r"rank: got .* 8 by adapter_config.json"):
        load_adapter(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "factors for a changed base"),
        ({"fan_in_fan_out": True}, "transposed factors"),
    ],
)
def test_configs_that_mean_more_than_the_factors(entry: dict[str, object], kind: str, tmp_path: Path) -> None:
    save(tmp_path / "adapter_model.safetensors", diffusers(make_truth(adaln_rank=4), "base_model.model."))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": True, "fan_in_fan_out": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check(load_adapter(tmp_path, TARGET), make_truth(adaln_rank=4))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entry))
    with pytest.raises(ValueError, match=f"adapter: got {kind}.* by adapter_config.json"):
        load_adapter(tmp_path, TARGET)


def test_the_config_that_diffusers_writes_into_its_files(tmp_path: Path) -> None:
    truth = make_truth(adaln_rank=4)
    inside = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})}
    check(load_adapter(save(tmp_path / "a.safetensors", diffusers(truth), inside), TARGET), truth, 2.0)


def test_swiglu_halves_by_name_by_metadata_and_by_flag(tmp_path: Path) -> None:
    truth = make_truth(("transformer_blocks.0.ff.net.0.proj",))
    (down, up), name = truth["transformer_blocks.0.ff.net.0.proj"], "transformer_blocks.0.ff.net.0.proj"
    swapped = {name: (down, torch.cat([up[96:], up[:96]]))}
    value_first = {"blocks.0.mlp.fc1.lora_A.weight": down, "blocks.0.mlp.fc1.lora_B.weight": up}
    path = save(tmp_path / "a.safetensors", value_first)
    check(load_adapter(path, TARGET), swapped)
    check(load_adapter(path, TARGET, ReadOptions(gate_first=False)), truth)
    check(load_adapter(save(tmp_path / "b.safetensors", value_first, {"swiglu_gate_first": "False"}), TARGET), truth)
    check(load_adapter(save(tmp_path / "c.safetensors", diffusers(truth), {"swiglu_gate_first": "true"}), TARGET), swapped)
    check(load_adapter(save(tmp_path / "FastVideo_FastH3.safetensors", value_first), TARGET), truth)
    for text, flag in (("maybe", None), ("true", False)):
        with pytest.raises(ValueError, match="SwiGLU order"):
            load_adapter(save(tmp_path / "d.safetensors", value_first, {"swiglu_gate_first": text}), TARGET, ReadOptions(gate_first=flag))


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(CONVENTIONS)))
def test_the_order_of_keys_has_no_effect(random: object, name: str) -> None:
    keys = list(with_alpha(CONVENTIONS[name](make_truth()), 4.0))
    first = decide_layout(keys, TARGET)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert decide_layout(keys, TARGET) == first
