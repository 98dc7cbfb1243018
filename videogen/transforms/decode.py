"""H3's video decoder chunk by chunk: tiles batched, and every chunk turned into bytes before the next, so that memory stays level.

The geometry (tiles, overlaps, cross-fades) is the VAE's own; the stock decode holds all chunks, joins them in float32, and
hands over four bytes a value. With one tile a call the bytes are the stock ones; with more the decoder's products may round
differently.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from videogen.errors import bad

Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Spread = Callable[[list[torch.Tensor], Decode], list[torch.Tensor]]


def alone(tiles: list[torch.Tensor], decode: Decode) -> list[torch.Tensor]:
    """All tiles of a chunk on this device."""
    return decode(tiles)


def is_on_ladder(vae: Any, latents: torch.Tensor) -> bool:
    """Whether the latent frames are whole chunks; the stock decode pads and cuts other lengths."""
    return bool(vae.config.token_drop) and (latents.shape[2] + vae.config.token_drop) % vae.tokens_chunk_size == 0


def batched(tiles: list[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """The tiles in runs of nearly one size, at most `most` each: 28 tiles by 16 are 14 and 14, not 16 and 12."""
    calls = -(-len(tiles) // max(most, 1))
    size, longer = divmod(len(tiles), calls)
    cuts = [0]
    for index in range(calls):
        cuts.append(cuts[-1] + size + (index < longer))
    return [tiles[begin:end] for begin, end in pairwise(cuts)]


def decode_clip(vae: Any, latents: torch.Tensor, batch: int, spread: Spread = alone) -> torch.Tensor:
    """One chunk (1, C, T, h, w) to pixels (1, 3, F, H, W) in the VAE's own space, tiled and blended as the VAE is set to.

    `spread` has the tiles decoded, all of one shape, here or by several ranks.
    """
    ratio = vae.spatial_compression_ratio
    height, width = (side * ratio for side in latents.shape[-2:])
    if not vae.use_tiling:
        whole: torch.Tensor = vae.decoder(vae.post_quant_conv(latents))
        return whole
    tops, heights, overlaps_y = vae._split_tiles(height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height)
    lefts, widths, overlaps_x = vae._split_tiles(width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width)
    tiles = [
        latents[..., top // ratio : (top + tall) // ratio, left // ratio : (left + wide) // ratio]
        for top, tall in zip(tops, heights)
        for left, wide in zip(lefts, widths)
    ]

    def decode(some: list[torch.Tensor]) -> list[torch.Tensor]:
        return [piece for run in batched(some, batch) for piece in vae.decoder(vae.post_quant_conv(torch.cat(run))).split(1)]

    pixels = spread(tiles, decode)
    rows = [pixels[begin : begin + len(lefts)] for begin in range(0, len(pixels), len(lefts))]
    clip: torch.Tensor = vae._stitch_tiles(rows, overlaps_y, overlaps_x)
    return clip


def chunks(vae: Any, latents: torch.Tensor, batch: int, spread: Spread = alone) -> Iterator[torch.Tensor]:
    """The stretches of a clip on the ladder as they are finished, (1, 3, f, H, W) each; together they are `vae.decode`."""
    step = vae.tokens_chunk_size
    length = step * vae.temporal_compression_ratio
    fading: torch.Tensor | None = None
    for index in range((latents.shape[2] + vae.config.token_drop) // step - 1):
        clip = decode_clip(vae, latents[:, :, index * step : (index + 1) * step + vae.token_overlap], batch, spread)
        head, tail = (clip[:, :, begin : begin + length][:, :, vae.frame_pre_padding :] for begin in (0, length))
        yield head if fading is None else vae._blend(fading, head, vae.frame_overlap, dim=-3)
        fading = tail
    if fading is not None:
        yield fading


def as_bytes(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> NDArray[np.uint8]:
    """One stretch (1, 3, f, H, W) in the VAE's space to (f, H, W, 3) bytes, on the pixels' device.

    Raises RequestError for NaN, as writing the frames would.
    """
    unit = (pixels.float() * std + mean).clamp(0, 1)
    if bool(torch.isnan(unit).any()):
        raise bad("frames", "NaN", "finite values in [0, 1]", "decode or rescale it again")
    turned = (unit * 255).round().to(torch.uint8)[0].permute(1, 2, 3, 0).contiguous()  # on the device, where it costs nothing
    frames: NDArray[np.uint8] = turned.cpu().numpy()
    return frames


def stream_video(pipe: Any, latents: torch.Tensor, batch: int, spread: Spread = alone) -> NDArray[np.uint8]:
    """Latents (1, C, T, h, w) of a loaded pipeline to frames (F, H, W, 3); what diffusers' decode block and rounding give."""
    vae, device = pipe.vae, latents.device

    def column(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device).view(1, -1, 1, 1, 1)

    scaled = latents * column(vae.config.latents_std) + column(vae.config.latents_mean)
    scaled = scaled.to(next(vae.post_quant_conv.parameters()).dtype)
    mean, std = column(pipe.pixel_mean), column(pipe.pixel_std)
    return np.concatenate([as_bytes(each, mean, std) for each in chunks(vae, scaled, batch, spread)])
