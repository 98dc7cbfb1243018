"""Shared fixtures: the shipped model with short clips allowed, so that a clip takes a fraction of a second."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel

from videogen.config import Recipe
from videogen.pipeline import Pipeline, open_pipeline
from videogen.pocket import sizes
from videogen.recipes import EXACT
from videogen.source import POCKET_FOLDER

TINY = {"size": (96, 64), "frames": 22, "steps": 2}


@pytest.fixture(scope="session", autouse=True)
def _without_device_profiles() -> Iterator[None]:
    """Nothing that doctor measured on this machine decides a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIDEOGEN_DEVICE_PROFILES", "")
        yield


def link_model(target: Path, **card: object) -> Path:
    """A model folder that shares the shipped weights and has a card of its own."""
    target.mkdir(parents=True)
    for item in POCKET_FOLDER.iterdir():
        if item.name != "card.json":
            (target / item.name).symlink_to(item)
    shipped = json.loads((POCKET_FOLDER / "card.json").read_text())
    kept = {key: shipped[key] for key in ("name", "trained") if key in shipped}
    (target / "card.json").write_text(json.dumps(kept | {"min_frames": 22} | card))
    return target


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped pocket model, with clips from 22 frames allowed."""
    return link_model(tmp_path_factory.mktemp("model") / "short")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model around a small random transformer, for tests of what surrounds it: a forward takes a few milliseconds."""
    folder = link_model(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "transformer").unlink()
    small = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 1, "ffn_dim": 96}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MiniMaxH3Transformer3DModel(**sizes.TRANSFORMER | small).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_model: Path) -> Pipeline:
    """The same, opened once for the whole session; bit-identical on every machine."""
    return open_pipeline(str(tiny_model), Recipe("exact", savings=EXACT))


@pytest.fixture(scope="session")
def pipeline(short_model: Path) -> Pipeline:
    """The same, opened once for the whole session; bit-identical on every machine."""
    return open_pipeline(str(short_model), Recipe("exact", savings=EXACT))


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Builds a model folder whose parts a test may break."""

    def make(**card: object) -> Path:
        return link_model(tmp_path / "model", **card)

    return make
