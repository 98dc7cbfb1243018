"""Shared fixtures: the shipped model with short clips allowed, so that a clip takes a fraction of a second."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from videogen.pipeline import Pipeline, open_pipeline
from videogen.source import POCKET_FOLDER

TINY = {"size": (96, 64), "frames": 22, "steps": 2}


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
def pipeline(short_model: Path) -> Pipeline:
    """The same, opened once for the whole session."""
    return open_pipeline(str(short_model))


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Builds a model folder whose parts a test may break."""

    def make(**card: object) -> Path:
        return link_model(tmp_path / "model", **card)

    return make
