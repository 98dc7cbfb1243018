"""`random:h3` has the released model's sizes, counted without building a weight."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel

from videogen.source import RELEASED_FOLDER, find_model, open_family


@pytest.mark.parametrize(
    ("part", "kind", "billions"),
    [
        ("transformer", MiniMaxH3Transformer3DModel, 33.123),
        ("vae", AutoencoderKLMiniMaxH3, 2.604),
        ("audio_vae", AutoencoderKLMiniMaxH3Audio, 0.151),
    ],
)
def test_parameter_counts_equal_the_published_file_sizes(part: str, kind: Any, billions: float) -> None:
    with torch.device("meta"):
        model = kind.from_config(kind.load_config(RELEASED_FOLDER, subfolder=part))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_geometry_of_the_released_model() -> None:
    source = find_model("random:h3")
    geometry = open_family(source).geometry
    assert (geometry.canvas_multiple, geometry.canvas_short_edge, geometry.max_frames) == (32, 768, 345)
    assert "noise" in source.label
