"""A built folder is complete, honest about being untrained, and its text encoder keeps words apart."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration

from videogen.pocket import sizes
from videogen.pocket.build import build_folder
from videogen.pocket.train_text import features_during, live_language

WEIGHTS = Path(__file__).parents[3] / "videogen" / "pocket" / "weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pocket")
    build_folder(path, seed=3)
    return path


def test_every_indexed_component_exists_and_the_card_says_untrained(folder: Path) -> None:
    index = json.loads((folder / "modular_model_index.json").read_text())
    for entry in (value for value in index.values() if isinstance(value, list)):
        assert (folder / entry[2]["subfolder"]).is_dir()
    card = json.loads((folder / "card.json").read_text())
    assert card["trained"] is False
    assert set(card["digest"]) == {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "card.json"}


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    build_folder(tmp_path, seed=3)
    assert json.loads((folder / "card.json").read_text())["digest"] == json.loads((tmp_path / "card.json").read_text())["digest"]


def test_text_features_come_from_the_live_layers_and_differ_by_word(folder: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    tokenizer = Qwen2TokenizerFast.from_pretrained(folder / "tokenizer")
    ids = torch.tensor([tokenizer("a large red circle moves right")["input_ids"]])
    with torch.no_grad():
        want = model.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[50]
        language = live_language(model)
        assert len(language.layers) == sizes.TEXT_FEATURE_LAYERS + sizes.TEXT_HEAD_LAYERS
        got = features_during(language, lambda: language(input_ids=ids, use_cache=False))
    assert torch.equal(got, want)
    assert 0.5 < float(want.std()) < 2
    cosine = torch.nn.functional.cosine_similarity(want[0, 1:], want[0, :-1], dim=-1)
    assert cosine.abs().mean() < 0.35


def test_the_shipped_folder_matches_its_card_and_fits() -> None:
    card = json.loads((WEIGHTS / "card.json").read_text())
    files = [p for p in WEIGHTS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 36e6
    assert max(p.stat().st_size for p in files) < 15e6
    for name, digest in card["digest"].items():
        assert hashlib.sha256((WEIGHTS / name).read_bytes()).hexdigest() == digest, name
