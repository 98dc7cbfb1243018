"""What is opened and what is not: broken files, pickles, pointers, folders, and configs beside and inside."""

import json
from pathlib import Path

import pytest
import torch

from lora.convert import load_adapter
from tests.lora.toys import TARGET, check, diffusers, make_truth, save

TRUTH = make_truth()


def test_files_that_are_no_adapters(tmp_path: Path) -> None:
    for name, content, match in (
        ("a.pt", b"PK\x03\x04" + bytes(100), "pickled files"),
        ("b.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ("c.safetensors", b"", "a safetensors file"),
        ("d.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "a safetensors file"),
        ("e.safetensors", (2).to_bytes(8, "little") + b"{}", "0 tensors"),
        ("f.safetensors", (9).to_bytes(8, "little") + b"{nonsense", "a whole safetensors file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=match):
            load_adapter(tmp_path / name, TARGET)
    whole = save(tmp_path / "g.safetensors", diffusers(TRUTH))
    whole.write_bytes(whole.read_bytes()[:-10])
    for path, match in ((whole, "a whole safetensors"), (tmp_path / "none.safetensors", "an existing"), (tmp_path, "adapter folder")):
        with pytest.raises(ValueError, match=match):
            load_adapter(path, TARGET)
    save(tmp_path / "adapter_model.safetensors", diffusers(TRUTH))
    with pytest.raises(ValueError, match=r"adapter folder: got .* expected adapter_model.safetensors and adapter_config.json"):
        load_adapter(tmp_path, TARGET)  # its alpha lived in the config
    for text in ("[]", "{nonsense"):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match="a JSON object"):
            load_adapter(tmp_path, TARGET)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "alpha_pattern": {"(": 1}}))
    with pytest.raises(ValueError, match="alpha_pattern: got"):
        load_adapter(tmp_path, TARGET)
    inside = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer_ref.lora_alpha": 4})}
    with pytest.raises(ValueError, match="one component"):
        load_adapter(save(tmp_path / "h.safetensors", diffusers(TRUTH), inside), TARGET)


def test_8_bit_floats_are_read_exactly(tmp_path: Path) -> None:
    truth = {name: (down.to(torch.float8_e4m3fn), up.to(torch.float8_e4m3fn)) for name, (down, up) in TRUTH.items()}
    path = save(tmp_path / "a.safetensors", diffusers(truth))
    check(load_adapter(path, TARGET), {name: (down.float(), up.float()) for name, (down, up) in truth.items()})
