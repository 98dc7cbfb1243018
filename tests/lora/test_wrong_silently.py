"""What diffusers 0.42.1 loads wrong without a word is exact here, or refused aloud: S1 to S20 of our notes, and the hard errors."""

import math
from pathlib import Path

import pytest
import torch

from lora.adapter import Adapter, Factors
from lora.apply import Use, attach, attached
from lora.contract import resolve_contract
from lora.convert import ReadOptions, load_adapter
from tests.lora.toys import (
    MODULES,
    TARGET,
    Tensors,
    check,
    diffusers,
    fingerprint,
    flat,
    forward,
    make_model,
    make_truth,
    original,
    save,
    with_alpha,
)

TRUTH = make_truth()
SOME = "transformer.transformer_blocks.0.ff.net.2"


def refuse(tmp_path: Path, tensors: Tensors, match: str, metadata: dict[str, str] | None = None) -> None:
    """The file is refused, and a model that was about to take it is untouched."""
    with pytest.raises(ValueError, match=match) as caught:
        load_adapter(save(tmp_path / "refused.safetensors", tensors, metadata), TARGET)
    assert ": got " in str(caught.value) and ", expected " in str(caught.value) and "; " in str(caught.value)


def test_s1_bare_diffusers_names_bind_all(tmp_path: Path) -> None:
    check(load_adapter(save(tmp_path / "a.safetensors", diffusers(TRUTH, "")), TARGET), TRUTH)


def test_s2_a_file_that_binds_nothing_is_an_error(tmp_path: Path) -> None:
    tensors = {f"unknown.{name}": tensor for name, tensor in original(TRUTH).items()}
    refuse(tmp_path, tensors, r"54 of 54 without a place \(unknown\.audio_patch_proj.*\(54 in all\)\).*closest layout: .*\(0 of 54 keys\)")


@pytest.mark.parametrize("key", ["alpha", "lora_alpha", "ss_network_alpha"])
def test_s3_every_spelling_of_alpha_in_the_metadata_counts(key: str, tmp_path: Path) -> None:
    truth = make_truth(adaln_rank=4)
    adapter = load_adapter(save(tmp_path / "a.safetensors", original(truth), {key: "0.25", "ss_network_dim": "4"}), TARGET)
    check(adapter, truth, 0.0625)
    assert adapter.scales() == {(0.0625, f"metadata {key}"): len(MODULES)} and adapter.notes == ()
    refuse(tmp_path, original(truth), "one value", {"alpha": "8", "lora_alpha": "128"})


def test_s4_a_state_dict_is_not_taken_for_a_file() -> None:
    with pytest.raises(ValueError, match="a dict has lost the file's alpha"):
        load_adapter(diffusers(TRUTH), TARGET)  # type: ignore[arg-type]


def test_s5_a_published_file_without_metadata_gets_its_alpha_by_name(tmp_path: Path) -> None:
    truth = make_truth(rank=16, adaln_rank=16)
    adapter = load_adapter(save(tmp_path / "minimax_h3_fl2v_4step_v0.1.safetensors", diffusers(truth, "", ".default")), TARGET)
    check(adapter, truth, 0.5)
    assert adapter.scales() == {(0.5, "table of published files"): len(MODULES)}
    renamed = load_adapter(save(tmp_path / "renamed.safetensors", diffusers(truth, "", ".default")), TARGET)
    check(renamed, truth)
    assert any("alpha = rank" in note for note in renamed.notes)
    path = save(tmp_path / "minimax_h3_fl2v_4step_v1.2_768p.safetensors", diffusers(truth, ""), {"alpha": "128"})
    check(load_adapter(path, TARGET), truth, 8.0)
    assert load_adapter(path, TARGET).notes == ("alpha 128 by the file is followed; published files of this name have 8",)


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-2", "rank", "8/16", ""])
def test_s6_an_alpha_that_is_no_positive_number(text: str, tmp_path: Path) -> None:
    refuse(tmp_path, diffusers(TRUTH), "metadata alpha: got .* expected a finite number above 0", {"alpha": text})
    if text and text[-1].isalnum() and text not in ("rank", "8/16"):
        refuse(tmp_path, with_alpha(diffusers(TRUTH), float(text)), "alpha: got|NaN or infinity")


def test_s7_alpha_tensors_on_some_modules_and_metadata_for_the_rest(tmp_path: Path) -> None:
    truth = make_truth(adaln_rank=4)
    tensors = diffusers(truth) | {f"{SOME}.alpha": torch.tensor([8])}
    adapter = load_adapter(save(tmp_path / "a.safetensors", tensors, {"alpha": "2"}), TARGET)
    name = SOME.removeprefix("transformer.")
    assert adapter.factors.pop(name).scale == 2.0  # type: ignore[attr-defined]
    check(adapter, {key: pair for key, pair in truth.items() if key != name}, 0.5)


@pytest.mark.parametrize("form", [".alpha", ".lora.alpha"])
def test_s8_alpha_beside_diffusers_names(form: str, tmp_path: Path) -> None:
    truth = make_truth(adaln_rank=4)
    tensors = with_alpha(diffusers(truth, halves=("lora.down", "lora.up")), 2.0, form)
    check(load_adapter(save(tmp_path / "a.safetensors", tensors), TARGET), truth, 0.5)


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_s9_stacked_rows_under_an_infix_are_not_guessed(prefix: str, tmp_path: Path) -> None:
    refuse(tmp_path, original(TRUTH, prefix, ".default"), "q/k/v order: got fused rows .* say --qkv-order stacked")
    spread = make_truth(is_spread=True)
    check(load_adapter(save(tmp_path / "a.safetensors", original(spread, prefix, ".default")), TARGET), spread)
    path = save(tmp_path / "b.safetensors", original(TRUTH, prefix, ".default"))
    check(load_adapter(path, TARGET, ReadOptions(qkv_order="stacked")), TRUTH)


def test_s10_interleaved_rows_without_their_infix(tmp_path: Path) -> None:
    refuse(tmp_path, original(make_truth(is_spread=True), order="interleaved"), "rows that look interleaved")
    refuse(tmp_path, original(make_truth(is_shared=False), order="interleaved"), "rows that look interleaved .the zeros")


@pytest.mark.parametrize("gone", ["A", "B"])
@pytest.mark.parametrize("make", [diffusers, original])
def test_s11_half_a_pair(make: object, gone: str, tmp_path: Path) -> None:
    tensors = make(TRUTH)  # type: ignore[operator]
    key = next(name for name in sorted(tensors) if f"lora_{gone}" in name)
    other = key.replace(f"lora_{gone}", "lora_B" if gone == "A" else "lora_A")
    del tensors[key]
    refuse(tmp_path, tensors, f"adapter pairs: got {other} alone")


def test_s12_more_blocks_than_the_model_has(tmp_path: Path) -> None:
    deeper = {name.replace("_blocks.2.", "_blocks.7."): tensor for name, tensor in diffusers(TRUTH).items()}
    refuse(tmp_path, deeper, "14 of 70 without a place .* a model with more blocks")


def test_s13_one_unknown_module(tmp_path: Path) -> None:
    pair = {f"transformer.foo.bar.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}
    refuse(tmp_path, diffusers(TRUTH) | pair, r"2 of 72 without a place \(transformer.foo.bar.lora_A.weight, .*70 of 72 keys")


@pytest.mark.parametrize("key", ["text_encoder.layers.0.q_proj.lora_A.weight", "lora_te_layers_0.lora_down.weight", "lora_te1_x.alpha"])
def test_s14_text_encoder_keys(key: str, tmp_path: Path) -> None:
    refuse(tmp_path, diffusers(TRUTH) | {key: torch.zeros(4, 4)}, "text-encoder keys: ")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_s15_nan_never_reaches_the_model(value: float, tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    before = fingerprint(model)
    tensors = {name: tensor.clone() for name, tensor in diffusers(TRUTH).items()}
    tensors[f"{SOME}.lora_B.weight"][3, 1] = value
    refuse(tmp_path, tensors, f"NaN or infinity in {SOME}.lora_B.weight")
    broken = Adapter("a", "a", "toy", {"proj_in": Factors(TRUTH["proj_in"][0] * value, TRUTH["proj_in"][1], 1.0)}, {})
    for fuse in (True, False):
        with pytest.raises(ValueError, match="NaN or infinity in proj_in"):
            attach(model, [Use(broken)], fuse=fuse)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dora_scale", "a DoRA"),
        ("lora_magnitude_vector.default.weight", "a DoRA"),
        ("lokr_w1", "a LoKr"),
        ("hada_w1_a", "a LoHa"),
    ],
)
def test_s16_other_kinds_are_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    refuse(tmp_path, diffusers(TRUTH) | {f"{SOME}.{name}": torch.ones(4)}, f"adapter: got {kind}")


def test_s17_an_adapter_of_the_other_partition(tmp_path: Path) -> None:
    path = save(tmp_path / "minimax_h3_fl2v_4step_v1.0_768p.safetensors", diffusers(TRUTH, ""), {"alpha": "4"})
    contract = resolve_contract(str(path), load_adapter(path, TARGET).metadata)
    contract.require(workflow="t2va")
    contract.require(workflow="fl2va")
    with pytest.raises(ValueError, match="partition: transformer_ref asked, transformer trained for"):
        contract.require(workflow="ref2va")
    prefixed = load_adapter(save(tmp_path / "a.safetensors", diffusers(TRUTH, "transformer_ref.")), TARGET)
    with pytest.raises(ValueError, match="partition: transformer asked"):
        resolve_contract("a.safetensors", prefixed.metadata, partition=prefixed.partition).require(workflow="t2va")


def test_s18_an_odd_scale_is_not_folded_in_bfloat16(tmp_path: Path) -> None:
    truth = {name: (down.bfloat16(), up.bfloat16()) for name, (down, up) in make_truth(adaln_rank=4).items()}
    adapter = load_adapter(save(tmp_path / "a.safetensors", with_alpha(original(truth, "diffusion_model."), 3.0)), TARGET)
    check(adapter, truth, 0.75, tolerance=1e-12)
    assert adapter.factors["proj_in"].up.dtype == torch.bfloat16


def test_s19_and_s20_adapters_add_up_and_the_next_may_have_another_rank(tmp_path: Path) -> None:
    model = make_model()
    turbo = load_adapter(save(tmp_path / "a.safetensors", diffusers(TRUTH)), TARGET)
    style = load_adapter(save(tmp_path / "b.safetensors", original(make_truth(rank=7, adaln_rank=3, seed=9))), TARGET)
    outputs = []
    for uses in ([Use(turbo)], [Use(style)], [Use(turbo), Use(style)]):
        with attached(model, uses):
            outputs.append(forward(model))
    assert not any(torch.allclose(outputs[2], single, rtol=1e-2) for single in outputs[:2])


# hard errors of diffusers that are valid files, and loud ones that must stay loud


def test_orphan_alphas_and_transposed_factors_and_convolutions(tmp_path: Path) -> None:
    refuse(tmp_path, diffusers(TRUTH) | {"transformer.norm_out.norm.alpha": torch.tensor(1.0)}, "norm_out.norm.alpha alone")
    refuse(tmp_path, with_alpha({}, 1.0) | {"proj_in.alpha": torch.tensor(1.0)}, "only alphas")
    down, up = TRUTH["proj_in"]
    pair = {"proj_in.lora_A.weight": down.T, "proj_in.lora_B.weight": up.T}
    refuse(tmp_path, pair, "both look transposed")
    refuse(tmp_path, pair | {"proj_in.lora_A.weight": down.reshape(4, 4, 1, 2, 2)}, "a convolution's adapter")
    refuse(tmp_path, {"proj_in.lora_A.weight": down, "proj_in.lora_B.weight": up[:, :3]}, r"expected \(r, 16\) and \(64, r\)")
    refuse(tmp_path, {"norm1.lora_A.weight": down, "norm1.lora_B.weight": up}, "without a place")
    name = "transformer_blocks.0.norm1"
    refuse(tmp_path, {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, "a linear layer of the model")
    refuse(tmp_path, {"proj_in.lora_A.weight": down.to(torch.int8), "proj_in.lora_B.weight": up}, "is I8")
    refuse(tmp_path, diffusers({"proj_in": (down, up)}, "") | {"proj_in.alpha": torch.ones(2)}, "one number")


def test_an_adapter_of_a_pruned_base_is_named(tmp_path: Path) -> None:
    tensors = original(TRUTH, "diffusion_model.")
    key = "diffusion_model.blocks.0.adaln_proj.linear.lora_A.weight"
    refuse(tmp_path, tensors | {key: torch.zeros(2, 8)}, r"blocks.0.adaln_proj.linear.*\(2, 8\).*expected \(r, 20\).*pruned base")
    refuse(tmp_path, tensors | {"diffusion_model.adaln_t_table": torch.zeros(8)}, "a pruned base .it carries an AdaLN table")


def test_a_bank_of_heads_and_sparse_gates_are_all_or_nothing(tmp_path: Path) -> None:
    tensors = original(TRUTH, "diffusion_model.")
    bank = {"diffusion_model.final_layer.video_out.set_weight": torch.zeros(32 * 16, 64)}
    refuse(tmp_path, tensors | bank, "a bank of 32 output heads")
    gate = {"diffusion_model.blocks.0.attn.to_gate_compress.set_weight": torch.zeros(64, 64)}
    refuse(tmp_path, tensors | gate, "gates of variable sparse attention")
    refuse(tmp_path, tensors | {"diffusion_model.blocks.0.norm1.diff": torch.zeros(63)}, r"norm1.diff \(63,\)")
    refuse(tmp_path, tensors | {"diffusion_model.blocks.0.mlp.fc2.diff_b": torch.zeros(64)}, "has no bias")
    both = {f"diffusion_model.blocks.0.norm1.{part}": torch.zeros(64) for part in ("diff", "set_weight")}
    refuse(tmp_path, tensors | both, "a difference or a replacement")


def test_the_same_matrix_twice(tmp_path: Path) -> None:
    truth = {"proj_in": TRUTH["proj_in"]}
    refuse(tmp_path, diffusers(truth) | diffusers(truth, ""), "each matrix once")
    fused = {name: pair for name, pair in TRUTH.items() if name.startswith("transformer_blocks.0.attn.to_")}
    refuse(
        tmp_path,
        original(fused) | diffusers({"transformer_blocks.0.attn.to_k": TRUTH["transformer_blocks.0.attn.to_k"]}),
        "one matrix for each module",
    )
    refuse(tmp_path, diffusers(truth, infix=".one") | diffusers(truth, "", ".two"), "adapters named one, two")


def test_a_full_checkpoint_is_no_adapter(tmp_path: Path) -> None:
    refuse(tmp_path, {name: p.detach() for name, p in make_model().named_parameters()}, "a full checkpoint")


@pytest.mark.parametrize("reverse", [False, True])
def test_mixed_ranks_have_scale_1_in_any_order_of_keys(reverse: bool, tmp_path: Path) -> None:
    truth = make_truth(rank=16, adaln_rank=4)
    tensors = dict(sorted(original(truth).items(), reverse=reverse))
    check(load_adapter(save(tmp_path / "a.safetensors", tensors), TARGET), truth)


def test_alpha_of_a_fused_file(tmp_path: Path) -> None:
    """An alpha of the whole file is that of the rank before fusing; a module's own is taken as it stands."""
    truth = make_truth(is_shared=False, adaln_rank=4)
    check(load_adapter(save(tmp_path / "a.safetensors", original(truth), {"alpha": "2"}), TARGET), truth, 0.5)
    tripled = with_alpha(flat(original(truth, halves=("lora_down", "lora_up"))), 2.0)
    tripled |= {name: torch.tensor(6.0) for name in tripled if name.endswith("qkv_proj.alpha")}
    check(load_adapter(save(tmp_path / "b.safetensors", tripled), TARGET), truth, 0.5)


def test_a_users_alpha_fills_a_gap_and_never_contradicts(tmp_path: Path) -> None:
    truth = make_truth(adaln_rank=4)
    bare, declared = save(tmp_path / "a.safetensors", original(truth)), save(tmp_path / "b.safetensors", original(truth), {"alpha": "2"})
    check(load_adapter(bare, TARGET, ReadOptions(alpha=1)), truth, 0.25)
    check(load_adapter(declared, TARGET, ReadOptions(alpha=2)), truth, 0.5)
    with pytest.raises(ValueError, match="alpha 1 given, and another by metadata alpha"):
        load_adapter(declared, TARGET, ReadOptions(alpha=1))
    with pytest.raises(ValueError, match="alpha given: got nan"):
        load_adapter(bare, TARGET, ReadOptions(alpha=math.nan))
