"""Measured block by block a clip is the clip that rendering makes, with one large model in memory at a time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import staged
from eval.block_times import attending, fastest, only_first_block, time_backends
from eval.cases import WORKLOADS, Workload, make_request
from eval.kernel_profile import kind_of
from eval.real_size import main
from eval.staged import Components, Meter, StagedClip, StandIn
from videogen.config import Recipe
from videogen.errors import RequestError
from videogen.pipeline import Pipeline

TINY = Workload("tiny", "pocket", (96, 64), 22, 2, reference=(96, 64))


def held(components: Components) -> set[str]:
    return {key.split(":")[1] for key, part in components.shared.items() if isinstance(part, torch.nn.Module)}


def test_staged_is_the_rendered_clip_and_the_two_large_models_never_meet(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "REPEAT_BELOW_S", 0.0)
    pipeline = tiny_pipeline.sharing(Recipe())  # the plain model, whatever recipes save
    request = make_request(TINY, 3)
    components = Components(pipeline.source, pipeline.device, pipeline.dtype)
    clip = StagedClip("tiny", pipeline.family.resolve(request, pipeline.recipe))
    meter = Meter(pipeline.device, lambda: None)
    clip.prepare(components, meter, seed=3)
    assert held(components) == {"text_encoder", "vae", "audio_vae"}
    loop = clip.open_loop(components)
    assert held(components) == {"transformer", "vae", "audio_vae"} and isinstance(
        components.shared["Qwen3VLForConditionalGeneration:text_encoder"], StandIn
    )
    assert {"transformer_ref", "text_encoder", "vae", "audio_vae"} == components.weights.keys()
    numbers = sum(parameter.numel() for parameter in loop.transformer.parameters())
    assert components.weights["transformer_ref"]["parameters_b"] == pytest.approx(numbers / 1e9, rel=1e-3)

    rows = time_backends(loop.transformer, loop.forward, ("native", "_native_math", "flash_hub", "flash"), lambda: None)
    assert [row["backend"] for row in rows if row["block_ms"]] == ["native", "_native_math"]
    assert rows[0]["relative_l2_to_native"] == 0 and 0 < rows[1]["relative_l2_to_native"] < 1e-4
    assert "nothing is downloaded" in rows[2]["reason"] and "flash-attn" in rows[3]["reason"]
    assert fastest(rows)["backend"] in ("native", "_native_math")
    with attending(loop.transformer, "native"), only_first_block(loop.transformer):
        assert len(loop.transformer.transformer_blocks) == 1
        loop.forward()
    assert loop.transformer.transformer_blocks[0].attn.processor._attention_backend is None

    while loop.done < loop.num_steps:
        loop.step()
    loop.close()
    clip.decode(loop.pipe, meter)
    rendered = pipeline.render(request)
    assert np.array_equal(np.rint(np.asarray(clip.state.get("videos"))[0] * 255).astype(np.uint8), rendered.frames)
    assert loop.num_rows > 0 and {"text_encoder", "vae_encoder", "decode.video", "decode.audio"} <= clip.stages.keys()


def test_a_report_says_how_many_forwards_it_rests_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("tiny", "pocket", (96, 64), 22, 4))
    monkeypatch.setitem(WORKLOADS, "huge", Workload("huge", "pocket", (96, 64), 22, 4))
    prepare = StagedClip.prepare

    def fails_if_huge(self: StagedClip, components: Components, meter: Meter, seed: int) -> None:
        if self.name == "huge":
            raise torch.OutOfMemoryError("out of memory")
        prepare(self, components, meter, seed)

    monkeypatch.setattr(StagedClip, "prepare", fails_if_huge)
    options = ["--model", str(tiny_model), "--workload", "huge", "--workload", "tiny", "--device", "cpu", "--attention", "native"]
    with caplog.at_level("INFO"):
        main([*options, "--forwards", "2", "--profile", "tiny", "--out", str(tmp_path / "r")])
    report = json.loads((tmp_path / "r" / "real_size.json").read_text())
    tiny = report["workloads"]["tiny"]
    assert "out of memory" in report["workloads"]["huge"]["error"]
    assert tiny["forward"]["runs"] == 2 and tiny["projection"]["label"] == "projected from 2 forwards"
    parts = sum(stage["median_s"] for stage in tiny["stages"].values()) + 4 * tiny["forward"]["median_s"]
    assert tiny["projection"]["clips_per_hour"] == pytest.approx(3600 / parts) and "encode" in tiny["stages"]
    for key in ("profile", "vae_profile"):
        assert {row["kind"] for row in tiny[key]["kinds"]} >= {"attention", "gemm"}
    assert 0 < tiny["vae_decode_s"] < tiny["stages"]["decode.video"]["max_s"]
    assert caplog.messages[-1].strip() == (tmp_path / "r" / "real_size.md").read_text().strip()
    with pytest.raises(RequestError, match="--overwrite"):
        main([*options, "--out", str(tmp_path / "r")])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor>", "elementwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized", "copy, cat, index"),
        ("Memcpy DtoH (Device -> Pageable)", "copy, cat, index"),
        ("sm90_xmma_fprop_implicit_gemm", "gemm"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
