"""`random:wan22-t2v` has A14B's sizes, and the workload MLPerf's settings; counted and settled without building a weight."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from eval.cases import find_workload, make_request
from videogen.cli.main import main
from videogen.config import Recipe
from videogen.source import RELEASED_WAN_FOLDER, find_model, open_family


@pytest.mark.parametrize(("part", "kind"), [("transformer", WanTransformer3DModel), ("transformer_2", WanTransformer3DModel)])
def test_each_expert_has_14_billion_parameters(part: str, kind: Any) -> None:
    with torch.device("meta"):
        model = kind.from_config(kind.load_config(RELEASED_WAN_FOLDER, subfolder=part))
    assert sum(p.numel() for p in model.parameters()) == 14_288_491_584


def test_the_other_parts() -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(RELEASED_WAN_FOLDER, subfolder="vae"))
        text = UMT5EncoderModel(UMT5Config.from_pretrained(RELEASED_WAN_FOLDER / "text_encoder"))
    assert sum(p.numel() for p in vae.parameters()) == 126_892_531
    assert sum(p.numel() for p in text.parameters()) == pytest.approx(5.68e9, rel=1e-3)


def test_the_mlperf_workload_settles_on_it_and_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    workload, family = find_workload("mlperf-wan22-t2v"), open_family(find_model("random:wan22-t2v"))
    resolved = family.resolve(make_request(workload, 1), Recipe())
    assert (resolved.width, resolved.height, resolved.frames, resolved.fps) == (1280, 720, 81, 16)
    assert (resolved.steps, resolved.guidance, resolved.boundary, resolved.seed) == (20, (4.0, 3.0), 0.875, 42)
    assert resolved.negative_prompt.startswith("vivid colors") and resolved.negative_prompt.endswith("walking backwards")
    assert family.estimate(resolved).rows == 75_600
    assert make_request(workload, 0).prompt != make_request(workload, 1).prompt
    if not torch.cuda.is_available():
        assert main(["bench", "--workload", "mlperf-wan22-t2v", "--device", "cpu"]) == 3
        assert "expected a GPU" in capsys.readouterr().err
