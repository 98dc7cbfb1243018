"""Wan folders at toy size, saved once."""

from pathlib import Path

import pytest

from tests.videogen.families.wan_toy import KINDS, save
from videogen.pipeline import Pipeline, open_pipeline


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wan")
    return {kind: save(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def two(folders: dict[str, Path]) -> Pipeline:
    return open_pipeline(str(folders["two"]), "plain", device="cpu")
