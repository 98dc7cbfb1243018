"""Weights read from their files again are those that were loaded; an adapter written into them keeps no copy, and never the wrong one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora.apply import Attachment, Use, attach, attached, attached_to
from tests.lora.test_apply import adapter_of
from tests.lora.toys import fingerprint, make_model, make_truth
from videogen.config import Recipe
from videogen.errors import EnvironmentFault
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import open_pipeline
from videogen.source import POCKET_FOLDER
from videogen.stored import StoredWeights, remember, stored_of


def num_copies(attachment: Attachment) -> int:
    """Parameters of which a second copy lies in memory."""
    cells: list[list[Any]] = [[cell.cell_contents for cell in way.__closure__ or ()] for _, way in attachment._saved]
    return sum(any(isinstance(each, torch.Tensor) for each in found) for found in cells)


def test_every_tensor_of_one_file_or_several_is_what_is_stored(tmp_path: Path) -> None:
    folder = POCKET_FOLDER / "transformer"
    stored, index = StoredWeights(folder), json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 2
    for file in sorted(set(index.values())):
        for name, wanted in load_file(folder / file).items():
            assert torch.equal(stored(name), wanted)  # type: ignore[arg-type]
    save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    one = StoredWeights(tmp_path)
    assert one("a").tolist() == [0, 1, 2] and one("b") is None and StoredWeights(tmp_path / "none")("a") is None  # type: ignore[union-attr]


def test_another_file_is_not_taken_for_the_one_that_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    stored, late = StoredWeights(tmp_path), StoredWeights(tmp_path)
    assert stored("a").tolist() == [0, 0, 0]  # type: ignore[union-attr]
    save_file({"a": torch.ones(3)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert stored("a").tolist() == [0, 0, 0] and late("a").tolist() == [1, 1, 1]  # type: ignore[union-attr]
    os.utime(path, (1, 1))
    with pytest.raises(EnvironmentFault, match="written into"):
        late("a")
    path.unlink()
    assert stored("a").tolist() == [0, 0, 0] and StoredWeights(tmp_path)("a") is None  # type: ignore[union-attr]


def test_the_index_without_a_variant_is_the_models_own(tmp_path: Path) -> None:
    for file, value in (("m.safetensors", 1.0), ("m.fp16.safetensors", 2.0)):
        save_file({"a": torch.tensor([value])}, tmp_path / file)
        (tmp_path / f"{file}.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert StoredWeights(tmp_path)("a").tolist() == [1.0]  # type: ignore[union-attr]
    for index in tmp_path.glob("*.json"):
        index.unlink()
    assert StoredWeights(tmp_path)("a").tolist() == [1.0]  # type: ignore[union-attr]


def test_what_cannot_be_taken_off_is_of_no_known_identity_until_it_is() -> None:
    model, adapter = make_model(), adapter_of(make_truth())
    before, kept = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    asked, lasting = list[str](), 3

    def origin(name: str) -> torch.Tensor:
        asked.append(name)
        if len(asked) > len(adapter.factors) + lasting:
            raise EnvironmentFault("gone")
        return kept[name]

    attachment = attach(model, [Use(adapter)], fuse=True, origin=origin)
    identity = attachment.identity
    with pytest.raises(EnvironmentFault, match="gone"):
        attachment.detach()
    assert attached_to(model) is attachment and attachment.identity not in ("", identity) and fingerprint(model) != before
    lasting = 1000
    attachment.detach()
    assert attached_to(model) is None and fingerprint(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_what_a_file_has_and_one_of_what_was_changed_since(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    model = model.to(dtype)
    remember(model, tmp_path)
    origin, adapter = stored_of(model), adapter_of(make_truth())
    assert origin is not None
    changed = f"{next(iter(adapter.factors))}.weight"
    with torch.no_grad():
        model.get_parameter(changed)[0] += 1
    before = fingerprint(model)
    for _ in range(3):
        with attached(model, [Use(adapter)], fuse=True, origin=origin) as attachment:
            assert fingerprint(model) != before and num_copies(attachment) == 1 < len(attachment._saved)
        assert fingerprint(model) == before
    with attached(model, [Use(adapter)], fuse=True) as attachment:
        assert num_copies(attachment) == len(attachment._saved)


@pytest.mark.parametrize(("model", "is_copied"), [("pocket", False), ("random", True)])
def test_a_recipe_with_a_fused_adapter_takes_no_second_model(model: str, is_copied: bool) -> None:
    exact = open_pipeline(model, "exact", device="cpu")
    transformer = transformer_of(exact.load("t2va"))
    before = fingerprint(transformer)
    pocket = open_pipeline("pocket", "turbo", device="cpu").recipe.adapters
    turbo = exact.sharing(Recipe("t", adapters=pocket))
    turbo.load("t2va")
    attachment = attached_to(transformer)
    assert attachment is not None and attachment.is_fused and len(attachment._saved) > 10
    assert num_copies(attachment) == (len(attachment._saved) if is_copied else 0)
    assert fingerprint(transformer) != before
    exact.load("t2va")
    assert fingerprint(transformer) == before and attached_to(transformer) is None
