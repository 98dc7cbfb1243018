"""Where each value of a contract comes from, and that two sources never differ in silence."""

import pytest
from diffusers import MiniMaxH3Scheduler
from hypothesis import given
from hypothesis import strategies as st

from lora.contract import Contract, common, parse_value, resolve_contract, shifted_grid
from lora.published import PUBLISHED, find_published, words_of

OURS = {"nfe": "4", "shift_video": "6", "shift_audio": "3", "partition": "transformer", "strength": "1", "trained_size": "160x96"}


@pytest.mark.parametrize(("forwards", "shift"), [(1, 12.0), (4, 12.0), (4, 6.0), (4, 3.0), (8, 12.0)])
def test_the_grid_is_the_schedulers_at_one_point_more(forwards: int, shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(forwards + 1)
    assert shifted_grid(forwards, shift) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)
    assert len(shifted_grid(forwards, shift)) == forwards + 1


def test_the_grid_by_hand() -> None:
    assert shifted_grid(4, 6.0) == pytest.approx((1, 0.9474, 0.8571, 0.6667, 0), abs=1e-4)


def test_metadata_is_read_and_written_back() -> None:
    contract = resolve_contract("x.safetensors", OURS)
    assert contract == resolve_contract("x.safetensors", contract.to_metadata())
    assert contract.to_metadata().keys() == OURS.keys() and contract.to_metadata()["nfe"] == "4"
    assert (contract.forwards, contract.grid_points(), contract.size) == (4, 5, (160, 96))
    assert contract.sources == dict.fromkeys(contract.sources, "file metadata")
    schedule = contract.schedule()
    assert schedule is not None and schedule["video"] == shifted_grid(4, 6.0) and schedule["audio"] == shifted_grid(4, 3.0)
    exact = resolve_contract("x", OURS | {"sigmas": str(list(schedule["video"]))})
    assert exact.schedule() == schedule and resolve_contract("x", exact.to_metadata()) == exact


def test_explicit_sigmas_stand_for_both_and_give_the_forwards() -> None:
    contract = resolve_contract("minimax-h3-4step-lora-flashgen.safetensors", {})
    sigmas = (1.0, 0.7, 0.4, 0.15, 0.0)
    assert contract.schedule() == {"video": sigmas, "audio": sigmas} and contract.forwards == 4
    assert resolve_contract("x", {"sigmas": "1, .5, 0"}).grid_points() == 3
    assert resolve_contract("x", {}).schedule() is None and Contract(forwards=4, shift_video=6.0).schedule() is None
    assert resolve_contract("x", {}).grid_points() is None


def test_two_firm_sources_that_differ_are_both_named() -> None:
    name = "minimax_h3_fl2v_4step_v1.0_768p.safetensors"
    agreed = resolve_contract(name, {"nfe": "4"}, flags={"shift_video": 6.0})
    assert agreed.sources["forwards"] == "file metadata" and agreed.sources["shift_video"] == "flag"
    assert agreed.sources["shift_audio"] == "table of published files (lightx2v fl2v 4step v1.0 768p)"
    with pytest.raises(ValueError, match=r"forwards: got 8 by file metadata and 4 by table of published files \(lightx2v"):
        resolve_contract(name, {"nfe": "8"})
    with pytest.raises(ValueError, match=r"shift_video: got 12\.0 by flag and 6 by table"):
        resolve_contract(name, {}, flags={"shift_video": 12.0})
    with pytest.raises(ValueError, match="transformer by flag and transformer_ref by prefix"):
        resolve_contract("x", {}, partition="transformer_ref", flags={"partition": "transformer"})
    with pytest.raises(ValueError, match=r"forwards: got \{'nfe': 4, 'forwards': 8\}"):
        resolve_contract("x", {"nfe": "4", "forwards": "8"})


def test_what_is_contested_gives_way() -> None:
    name = "lightx2v/Minimax-h3-Turbo/ref2v_8step_v1.0_768p.safetensors"
    assert resolve_contract(name, {}).shift_video == 6 and "contested" in resolve_contract(name, {}).notes[0]
    assert resolve_contract(name, {}, flags={"shift_video": 12.0}).shift_video == 12
    assert resolve_contract("x", {"partition": "transformer_ref"}, partition="transformer").partition == "transformer_ref"
    assert resolve_contract("x", {}, partition="transformer").partition == "transformer"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("minimax_h3_turbo_v4_step600_ema", "larryvrh v4"),
        ("minimax_h3_turbo_4step_ema", "larryvrh v1"),
        ("minimax_h3_turbo_ckpt850", "larryvrh v1 ckpt850"),
        ("h3_fl2v_4step_v0.1", "lightx2v fl2v 4step v0.1"),
        ("h3-fl2v-8step-v1.0", "lightx2v fl2v 8step v1.0"),
        ("h3-fl2v-8step-v1.0-768p", "lightx2v fl2v 8step v1.0 768p"),
        ("h3-fl2v-4step-v1.2-768p-comfyui", "lightx2v fl2v 4step v1.2 768p"),
        ("h3 fl2v 4step v0.1 768p sla", "lightx2v SLA"),
        ("FastVideo-FastH3-4-step-Preview-v1-LoRA", "FastH3"),
        ("MiniMax-H3-FastH3-Preview-LoRA", "FastH3 extract"),
        ("h3_hyperflow_ref2va", "HyperFlow ref2va"),
        ("Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model", "Wan2.2-Lightning"),
        ("Wan2.2-Lightning_I2V-A14B-4steps-lora_LOW_fp16", "Wan2.2-Lightning for ComfyUI"),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise", "Wan2.2 lightx2v"),
        ("wan2.2_t2v_A14b_low_noise_lora_rank64_lightx2v_4step_1217", "Wan2.2-Distill-Loras"),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_260412_rank_64_fp16", "Wan2.2-Distill-Loras for ComfyUI"),
        ("lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16", "Wan2.1 lightx2v"),
        ("Wan21_CausVid_14B_T2V_lora_rank32", "CausVid"),
        ("wan_fl2v_4step_v0.1", None),
        ("my_style", None),
    ],
)
def test_published_files_by_name(name: str, title: str | None) -> None:
    row = find_published(f"loras/{name}.safetensors")
    assert (row.title if row else None) == title
    assert find_published(f"loras/{name}.safetensors.part") == row


def test_wan_rows_hold_the_grid_their_makers_trained_on() -> None:
    contract = resolve_contract("wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors", {})
    assert contract.sigmas == pytest.approx(shifted_grid(4, 5.0)) and contract.forwards == 4
    eight = ", ".join(map(str, shifted_grid(8, 5.0)))
    other = resolve_contract("wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors", {"sigmas": eight})
    assert other.forwards == 8  # what users also take


def test_every_row_is_a_lawful_contract_that_its_own_words_find() -> None:
    for row in PUBLISHED:
        name = "_".join(sorted(row.words))
        assert find_published(name) is row, row.title
        contract = resolve_contract(name, {})
        assert contract.shift_audio in (None, 3) and contract.shift_video in (None, 6, 7, 12)
        assert contract.forwards is not None and words_of(name) == row.words | ({"h3"} if "fasth3" in row.words else set())


def test_the_wild_alphas() -> None:
    alphas = {row.title: row.alpha for row in PUBLISHED if row.title.startswith("lightx2v")}
    assert alphas["lightx2v fl2v 4step v0.1"] == alphas["lightx2v fl2v 4step v1.2 768p"] == alphas["lightx2v fl2v 8step v1.0"] == 8
    assert alphas["lightx2v fl2v 4step v1.0 768p"] == alphas["lightx2v fl2v 4step v1.1 768p"] == alphas["lightx2v SLA"] == 128


def test_a_request_as_trained_passes_and_others_are_listed() -> None:
    contract = resolve_contract("x", OURS)
    contract.require(workflow="fl2va", forwards=4, shift_video=6.0, shift_audio=3.0, strength=1.0)
    found = contract.disagreements(workflow="ref2va", forwards=5, shift_video=12.0, shift_audio=3.0, strength=0.8)
    assert [each.partition(":")[0] for each in found] == ["partition", "forwards", "shift_video", "strength"]
    assert found[1] == "forwards: 5 asked, 4 trained for (by file metadata)"
    with pytest.raises(ValueError, match="forwards: 5 asked, 4 trained for"):
        contract.require(forwards=5)
    Contract().require(workflow="ref2va", forwards=7, shift_video=1.0)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("nfe", text) for text in ("0", "four", "1001", "4.5")),
        *(("shift_video", text) for text in ("nan", "0", "-6", "inf")),
        *(("sigmas", text) for text in ("[1, 1, 0]", "[1, 0.5]", "[2, 0]", "[]", "x")),
        *(("partition", "both"), ("strength", "0"), ("trained_size", "160")),
    ],
)
def test_values_that_make_no_sense(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"adapter contract .*: got .*, expected .*; "):
        resolve_contract("x", {field: text})


def test_sigmas_against_forwards_and_shift() -> None:
    with pytest.raises(ValueError, match=r"3 sigmas \(file metadata\) and 4 forwards \(file metadata\)"):
        resolve_contract("x", {"sigmas": "1,.5,0", "nfe": "4"})
    with pytest.raises(ValueError, match="that shift 12 does not give"):
        resolve_contract("x", {"sigmas": str(list(shifted_grid(4, 6.0))), "shift_video": "12"})
    with pytest.raises(ValueError, match="got steps, expected only forwards"):
        resolve_contract("x", {}, flags={"steps": 4})


@given(st.integers(1, 60), st.floats(0.5, 20))
def test_grids_fall_from_1_to_0(forwards: int, shift: float) -> None:
    grid = shifted_grid(forwards, shift)
    assert grid[0] == pytest.approx(1) and grid[-1] == 0
    assert Contract(forwards=forwards, sigmas=tuple(min(s, 1.0) for s in grid), shift_video=shift).sigmas is not None


def test_merged_contracts_keep_what_all_say() -> None:
    one, two = resolve_contract("x", OURS), resolve_contract("y", OURS | {"nfe": "8"})
    merged = common([one, two])
    assert merged.shift_video == 6 and merged.forwards is None and merged.notes == ("forwards differs (4, 8): dropped",)


def test_values_from_options() -> None:
    assert parse_value("forwards", "4") == 4 and parse_value("size", "1344X768") == (1344, 768)
    assert parse_value("sigmas", "[1, 0]") == (1.0, 0.0) and parse_value("partition", "transformer") == "transformer"
