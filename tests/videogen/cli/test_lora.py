"""`videogen lora` from the command line to the exit code, on the shipped model's config and small files."""

import json
import re
from pathlib import Path

import pytest
import torch

from lora.convert import ReadOptions, load_adapter
from lora.merge import METHODS
from lora.write import LAYOUTS
from tests.lora.toys import Tensors, save
from videogen.cli import lora as command
from videogen.cli.main import ENVIRONMENT, OK, USAGE, main
from videogen.config import AdapterUse
from videogen.errors import RequestError
from videogen.recipes import parse_adapter

MODULE = "blocks.1.mlp.fc2"  # of pocket: 576 to 256


def pair(seed: int = 0, module: str = MODULE, rows: int = 256, columns: int = 576) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    down, up = torch.randn(4, columns, generator=rng), torch.randn(rows, 4, generator=rng)
    return {f"diffusion_model.{module}.lora_A.weight": down, f"diffusion_model.{module}.lora_B.weight": up}


def test_inspect_says_layout_scale_contract_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "minimax_h3_fl2v_4step_v1.0_768p.safetensors", pair(), {"alpha": "2"})
    assert main(["lora", "inspect", str(path)]) == OK
    text = capsys.readouterr().out
    assert "layout    original names, prefix diffusion_model." in text
    assert "modules   1 low-rank, 0 full-rank payloads; ranks 4 (1)\n" in text
    assert "scale     0.5 on 1 modules, by metadata alpha" in text
    assert re.search(r"delta     norm [\d.]+ in all\n          [\d.]+ transformer_blocks.1.ff.net.2\n", text)
    assert "contract  shift_video 6, by table of published files (lightx2v fl2v 4step v1.0 768p)" in text
    assert "run with  4 forwards (num_inference_steps 5 in diffusers)" in text
    assert "sigmas    video 1.0000 0.9474 0.8571 0.6667 0.0000" in text
    assert main(["lora", "inspect", str(path), "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "videogen.adapter/1" and report["ranks"] == {"4": 1} and report["modules"] == 1
    assert list(report["largest_deltas"]) == ["transformer_blocks.1.ff.net.2"]
    assert report["contract"]["forwards"] == {"value": 4, "from": "table of published files (lightx2v fl2v 4step v1.0 768p)"}


def test_inspect_of_an_unknown_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "inspect", str(save(tmp_path / "a.safetensors", pair()))]) == OK
    text = capsys.readouterr().out
    assert "contract  none" in text and "note      no alpha anywhere" in text and "run with" not in text


def test_bad_files_and_options_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save(tmp_path / "a.safetensors", pair(module="blocks.99.mlp.fc2")))
    good = str(save(tmp_path / "b.safetensors", pair()))
    for arguments, words in (
        (["inspect", path], "adapter keys: got 2 of 2 without a place"),
        (["inspect", str(tmp_path / "none.safetensors")], "an existing safetensors file"),
        (["inspect", good, "--contract", "forwards"], "FIELD=VALUE"),
        (["inspect", good, "--contract", "forwards=x"], "adapter contract forwards"),
        (["inspect", good, "--alpha", "0"], "alpha given: got 0"),
        (["inspect", good, "--model", "nowhere"], "model: got 'nowhere'"),
        (["convert", good, good, "--to", "kohya"], "which exists"),
        (["merge", good, good], "two or more inputs and an output"),
        (["merge", good, good, str(tmp_path / "c.safetensors"), "--method", "ties"], "ties without a rank"),
    ):
        assert main(["lora", *arguments]) == USAGE, arguments
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["convert", "a", "b"], ["merge"], ["inspect"], ["merge", "a", "b", "c", "--method", "mean"]])
def test_a_command_line_that_is_not_whole(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lora", *arguments])
    assert caught.value.code == USAGE


def test_convert_carries_the_contract_and_leaves_scale_no_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save(tmp_path / "a.safetensors", pair(), {"alpha": "2"}), tmp_path / "b.safetensors"
    flags = ["--contract", "forwards=4", "--contract", "shift_video=6", "--contract", "sigmas=1,0.947368,0.857143,0.666667,0"]
    assert main(["lora", "convert", str(source), str(out), "--to", "kohya", *flags]) == OK
    assert "1 modules as kohya, read back and compared" in capsys.readouterr().out
    assert main(["lora", "inspect", str(out), "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["contract"]["forwards"] == {"value": 4, "from": "file metadata"} and report["contract"]["shift_video"]["value"] == 6
    assert [each["scale"] for each in report["scales"]] == [1.0] and not list(tmp_path.glob("*.part"))
    assert main(["lora", "convert", str(source), str(out), "--to", "original", "--overwrite"]) == OK


def test_convert_to_fewer_ranks_says_what_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save(tmp_path / "a.safetensors", pair()), tmp_path / "b.safetensors"
    assert main(["lora", "convert", str(source), str(out), "--to", "diffusers", "--rank", "3"]) == OK
    found = re.search(r"rank      3: ([\d.]+) % of the energy kept", capsys.readouterr().out)
    target = command._target("pocket")
    kept, whole = (load_adapter(path, target).factors["transformer_blocks.1.ff.net.2"].norm() for path in (out, source))
    assert found is not None and float(found[1]) == pytest.approx(100 * (kept / whole) ** 2, abs=0.01) and float(found[1]) < 95
    assert main(["lora", "convert", str(source), str(out), "--to", "diffusers", "--rank", "0", "--overwrite"]) == USAGE


def test_reading_options_reach_the_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = pair(module="blocks.0.attn.qkv_proj", rows=768, columns=256)
    tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    source, out = save(tmp_path / "a.safetensors", tensors), tmp_path / "b.safetensors"
    arguments = ["lora", "convert", str(source), str(out), "--to", "diffusers"]
    assert main(arguments) == USAGE and "--qkv-order" in capsys.readouterr().err
    assert main([*arguments, "--qkv-order", "interleaved", "--alpha", "8"]) == OK
    target = command._target("pocket")
    wanted = load_adapter(source, target, ReadOptions(qkv_order="interleaved", alpha=8)).factors["transformer_blocks.0.attn.to_k"]
    up = tensors["diffusion_model.blocks.0.attn.qkv_proj.lora_B.default.weight"]
    by_hand = torch.cat([up[192 * head + 64 : 192 * head + 128] for head in range(4)])  # pocket: 4 heads of 64
    assert torch.equal(wanted.up, by_hand) and wanted.scale == 2
    assert torch.allclose(load_adapter(out, target).factors["transformer_blocks.0.attn.to_k"].delta(), wanted.delta())
    fc1 = save(tmp_path / "c.safetensors", pair(module="blocks.0.mlp.fc1", rows=1152, columns=256))
    assert main(["lora", "convert", str(fc1), str(out), "--to", "diffusers", "--gate-first", "false", "--overwrite"]) == OK
    again = load_adapter(out, target).factors["transformer_blocks.0.ff.net.0.proj"]
    assert torch.equal(again.up, pair(module="blocks.0.mlp.fc1", rows=1152, columns=256)["diffusion_model.blocks.0.mlp.fc1.lora_B.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_merge_writes_one_file_and_says_what_it_kept(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save(tmp_path / "a.safetensors", pair(1), {"nfe": "4", "shift_video": "6"})
    two = save(tmp_path / "b:c.safetensors", pair(2), {"nfe": "8", "shift_video": "6"})
    out = tmp_path / "m.safetensors"
    arguments = ["lora", "merge", f"{one}:0.5", str(two), str(out), "--method", method, "--rank", "3"]
    assert main(arguments) == OK
    text = capsys.readouterr().out
    assert "forwards differs (4, 8): dropped" in text and f"1 modules by {method}," in text and "% of the energy kept" in text
    assert 5 < float(text.split()[-6]) < 99
    merged = load_adapter(out, command._target("pocket"))
    assert merged.ranks() == {3: 1} and merged.metadata["shift_video"] == "6.0" and "nfe" not in merged.metadata
    assert main(arguments) == USAGE


def test_weights_after_a_colon() -> None:
    assert parse_adapter("a.safetensors:0.5") == AdapterUse("a.safetensors", 0.5) and parse_adapter("a:-1") == AdapterUse("a", -1.0)
    for name in ("C:x", "a", ":0.5", "model:turbo4"):
        assert parse_adapter(name) == AdapterUse(name)
    with pytest.raises(RequestError, match="strength of a: got nan"):
        parse_adapter("a:nan")


def test_a_full_disk_is_the_environments_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    source = save(tmp_path / "a.safetensors", pair())
    monkeypatch.setattr("lora.write.save_file", fail)
    assert main(["lora", "convert", str(source), str(tmp_path / "b.safetensors"), "--to", "kohya"]) == ENVIRONMENT
    assert "No space left" in capsys.readouterr().err and sorted(item.name for item in tmp_path.iterdir()) == ["a.safetensors"]


def test_the_command_offers_what_the_package_has() -> None:
    assert command._LAYOUTS == LAYOUTS and command._METHODS == METHODS


def test_the_released_sizes_need_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a.safetensors", pair(module="blocks.49.mlp.fc2", rows=5376, columns=14336))
    assert main(["lora", "inspect", str(path), "--model", "random:h3"]) == OK
    assert "transformer_blocks.49.ff.net.2" in capsys.readouterr().out
