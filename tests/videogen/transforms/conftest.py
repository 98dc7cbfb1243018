"""A model of pocket's classes with two blocks and seeded random weights, so that a clip takes a tenth of a second."""

import json
from pathlib import Path

import pytest

from tests.conftest import link_model
from videogen.pipeline import Pipeline, open_pipeline

SMALL = {
    "transformer": {"num_layers": 3, "hidden_size": 128, "num_attention_heads": 2, "ffn_dim": 192, "time_embed_hidden_dim": 128},
    "vae": {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "decoder_num_layers": 2, "decoder_num_attention_heads": 2},
}


def small_model(target: Path) -> Path:
    """Pocket's folder with smaller configs; to be opened as `random:FOLDER`."""
    folder = link_model(target)
    for name, changes in SMALL.items():
        config = json.loads((folder / name / "config.json").read_text()) | changes
        (folder / name).unlink()
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The small model, opened with the plain recipe."""
    return open_pipeline(f"random:{small_model(tmp_path_factory.mktemp('small') / 'model')}", "plain")
