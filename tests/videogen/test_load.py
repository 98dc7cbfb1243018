"""A model loads whole or not at all, and the error names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TINY
from videogen import Request
from videogen.errors import EnvironmentFault, RequestError
from videogen.pipeline import open_pipeline
from videogen.source import POCKET_FOLDER, find_model

MakeModel = Callable[..., Path]
VAE_FILE = "diffusion_pytorch_model.safetensors"


def own_copy(model: Path, part: str) -> Path:
    """Replace a linked part by a copy that may be broken."""
    (model / part).unlink()
    shutil.copytree(POCKET_FOLDER / part, model / part)
    return model / part


def load_error(model: Path, workflow: str = "t2va") -> str:
    with pytest.raises((EnvironmentFault, RequestError)) as caught:
        open_pipeline(str(model)).load(workflow)
    return str(caught.value)


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(make_model: MakeModel) -> None:
    model = make_model()
    file = own_copy(model, "vae") / VAE_FILE
    dropped = sorted(load_file(file))[0]
    rewrite(file, lambda tensors: tensors.__delitem__(dropped))
    message = load_error(model)
    assert "weights of vae: got 1 tensors missing" in message and dropped in message


def test_a_tensor_left_over_is_named(make_model: MakeModel) -> None:
    model = make_model()
    file = own_copy(model, "vae") / VAE_FILE
    rewrite(file, lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}))
    assert "1 tensors left over (extra.weight)" in load_error(model)


def test_nan_weights_are_refused(make_model: MakeModel) -> None:
    model = make_model()
    file = own_copy(model, "vae") / VAE_FILE

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")

    rewrite(file, spoil)
    assert "NaN" in load_error(model)


def test_a_truncated_file_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    file = own_copy(model, "audio_vae") / VAE_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "audio_vae" in load_error(model)


@pytest.mark.parametrize("part", ["audio_vae", "text_encoder", "tokenizer", "processor", "scheduler"])
def test_a_missing_component_is_named(part: str, make_model: MakeModel) -> None:
    model = make_model()
    (model / part).unlink()
    assert part in load_error(model)


def test_a_file_that_differs_from_the_digest_is_named(make_model: MakeModel) -> None:
    digest = json.loads((POCKET_FOLDER / "card.json").read_text())["digest"]
    model = make_model(digest=digest)
    config = own_copy(model, "scheduler") / "scheduler_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(EnvironmentFault, match=r"1 files that differ \(scheduler/scheduler_config.json\)"):
        open_pipeline(str(model))


def test_the_shipped_model_matches_its_digest() -> None:
    assert open_pipeline("pocket").source.card["digest"]


def test_random_weights_are_seeded_and_labelled(short_model: Path) -> None:
    request = Request("a red circle", seed=1, **(TINY | {"steps": 1}))  # type: ignore[arg-type]
    state = torch.random.get_rng_state()
    one, two = (open_pipeline(f"random:{short_model}").render(request) for _ in range(2))
    assert np.array_equal(one.frames, two.frames)
    assert torch.equal(state, torch.random.get_rng_state())
    assert one.record["model"]["weights"] == "random" and "noise" in one.record["model"]["label"]


def test_random_weights_in_bfloat16_keep_the_parts_that_stay_float32(short_model: Path) -> None:
    from videogen.config import Recipe

    pipe = open_pipeline(f"random:{short_model}", Recipe(dtype="bfloat16")).load("t2va")
    loaded = open_pipeline(str(short_model), Recipe(dtype="bfloat16")).load("t2va")
    for name in ("transformer", "vae", "audio_vae", "text_encoder"):
        built = {key: value.dtype for key, value in getattr(pipe, name).state_dict().items()}
        assert built == {key: value.dtype for key, value in getattr(loaded, name).state_dict().items()}, name


@pytest.mark.parametrize(
    ("name", "word"),
    [("nowhere", "model"), ("./nowhere", "model"), ("a/b/c", "model"), ("", "model")],
)
def test_a_wrong_model_name_is_refused(name: str, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        find_model(name)


def test_a_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "WanModularPipeline"}')
    with pytest.raises(RequestError, match="model family: got 'WanModularPipeline'"):
        find_model(str(tmp_path))
    (tmp_path / "modular_model_index.json").write_text("{")
    with pytest.raises(RequestError, match="JSON"):
        find_model(str(tmp_path))


def test_a_hub_id_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE"):
        find_model("nobody/nothing", offline=True)
