"""The fast batched forward against the stock forward, sample by sample, in every workflow's layout."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

from videogen.pocket import packed, sizes


def tiny() -> MiniMaxH3Transformer3DModel:
    torch.manual_seed(0)
    return MiniMaxH3Transformer3DModel(**dict(sizes.TRANSFORMER, num_layers=2, hidden_size=64, num_attention_heads=1, ffn_dim=64)).eval()


@pytest.mark.parametrize("kind", ["t", "f", "l", "b", "r"])
def test_equals_the_stock_forward(kind: str) -> None:
    model = tiny()
    tags = [1, 1, 1, 1] if kind == "t" else [1, 0, 0, 1, 1]
    latents = (7, 4, 6)
    rows = packed.layout(tags, kind, latents, 9, (4, 4))
    g = torch.Generator().manual_seed(1)
    text = torch.randn(2, rows.text, sizes.TEXT_DIM, generator=g)
    condition = torch.randn(2, rows.condition, 96, generator=g)
    audio = torch.randn(2, rows.audio, sizes.AUDIO_CHANNELS, generator=g)
    video = torch.randn(2, rows.video, 96, generator=g)
    t_audio, t_video = torch.tensor([0.3, 0.8]), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        got_audio, got_video = packed.PackedForward(model, dtype=torch.float32)(rows, text, condition, audio, video, t_audio, t_video)
    begin = rows.text + rows.condition
    v_index = torch.cat([torch.arange(rows.text, begin), torch.arange(begin + rows.audio, rows.length)])
    a_index = torch.arange(begin, begin + rows.audio)
    row_tags = torch.tensor([{packed.TEXT: 1, packed.AUDIO: 2}.get(int(k), 0) for k in rows.groups])
    for i in range(2):
        t, index = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            v_index, a_index, rows.condition, 0, rows.text, float(t_video[i]), float(t_audio[i]), 0.999, 1.0
        )
        with torch.no_grad():
            want_video, want_audio = model(
                torch.cat([condition[i : i + 1], video[i : i + 1]], dim=1),
                audio[i : i + 1],
                text[i : i + 1],
                t,
                index,
                row_tags,
                rows.positions.double(),
                v_index,
                a_index,
                torch.arange(rows.text),
                return_dict=False,
            )
        torch.testing.assert_close(got_video[i], want_video[0, rows.condition :], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(got_audio[i], want_audio[0], atol=2e-5, rtol=1e-4)


def test_patchify_round_trip_matches_the_pipeline() -> None:
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    x = torch.randn(2, 3, 5, 4, 6)
    assert torch.equal(packed.patchify(x).flatten(0, 1), patchify_video_latents(x, (1, 2, 2)))
    assert torch.equal(packed.unpatchify(packed.patchify(x), (5, 4, 6)), x)
