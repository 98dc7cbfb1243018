"""The 2-D form of the video encoder against the stock encoder, and captured steps' CPU path."""

import pytest
import torch

from videogen.pocket.build import new_video_vae
from videogen.pocket.fast_vae import encode_window, from_vae, to_vae
from videogen.pocket.train_vae import decode_latents


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 16, 16), (22, 16, 32), (39, 32, 16)])
def test_equals_the_stock_encoder(frames: int, height: int, width: int) -> None:
    torch.manual_seed(0)
    vae = new_video_vae().eval()
    x = torch.randn(2, 3, frames, height, width)
    with torch.no_grad():
        want = vae._encode(x)
        got = encode_window(vae, x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_one_stage_of_decode_is_a_22_frame_decode() -> None:
    torch.manual_seed(0)
    vae = new_video_vae().eval()
    z = torch.randn(1, 24, 7, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(decode_latents(vae, z), vae.decode(z).sample.permute(0, 2, 3, 4, 1))


def test_pixel_conventions_invert() -> None:
    x = torch.rand(2, 4, 4, 3)
    torch.testing.assert_close(from_vae(to_vae(x)), x)
