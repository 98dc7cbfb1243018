"""Streamed, batched decoding against the stock decode where tiling is forced, and where memory would otherwise grow."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from videogen.errors import RequestError
from videogen.media import to_uint8
from videogen.pipeline import Pipeline
from videogen.transforms.decode import as_bytes, batched, chunks, is_on_ladder, stream_video


@pytest.fixture
def pipe(tiny_pipeline: Pipeline) -> Any:
    """The pocket VAE with tiles of 48 pixels, so that 64x80 is 2 x 2 of them in each chunk."""
    pipe = tiny_pipeline.load("t2va")
    vae, names = pipe.vae, ("height", "width", "overlap_height", "overlap_width")
    before = [getattr(vae, f"tile_sample_min_{name}") for name in names]
    vae.enable_tiling(48, 48, 16, 16)
    yield pipe
    for name, value in zip(names, before):
        setattr(vae, f"tile_sample_min_{name}", value)


def stock(pipe: Any, latents: torch.Tensor) -> np.ndarray:
    state = PipelineState()
    state.set("latents", latents)
    state.set("output_type", "np")
    pipe._blocks.sub_blocks["decode.video"](pipe, state)
    return to_uint8(state.get("videos")[0])


@torch.no_grad()
def test_one_tile_a_call_gives_the_stock_bytes_and_more_are_within_one(pipe: Any) -> None:
    ratio = pipe.vae.spatial_compression_ratio
    latents = torch.randn(1, 24, 12, 64 // ratio, 80 // ratio, generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []
    handle = pipe.vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    try:
        wanted = stock(pipe, latents)
        assert set(sizes) == {1} and len(sizes) == 8  # two chunks of 2 x 2 tiles
        sizes.clear()
        one, four = stream_video(pipe, latents, 1), stream_video(pipe, latents, 4)
    finally:
        handle.remove()
    assert sizes == [1] * 8 + [4, 4] and wanted.shape == (39, 64, 80, 3)
    assert np.array_equal(one, wanted)
    assert np.abs(four.astype(int) - wanted).max() <= 1
    assert [piece.shape[2] for piece in chunks(pipe.vae, latents, 4)] == [17, 17, 5]


@torch.no_grad()
def test_without_tiling_and_off_the_ladder(pipe: Any) -> None:
    latents = torch.randn(1, 24, 7, 8, 8, generator=torch.Generator().manual_seed(1))
    pipe.vae.use_tiling = False
    try:
        assert np.array_equal(stream_video(pipe, latents, 4), stock(pipe, latents))
    finally:
        pipe.vae.use_tiling = True
    assert is_on_ladder(pipe.vae, latents) and not is_on_ladder(pipe.vae, latents[:, :, :6])


def test_tiles_are_shared_out_evenly_and_nan_is_refused() -> None:
    tiles = list(torch.zeros(28, 1))
    assert [len(run) for run in batched(tiles, 16)] == [14, 14] and [len(run) for run in batched(tiles, 9)] == [7] * 4
    assert [len(run) for run in batched(tiles, 28)] == [28] and [len(run) for run in batched(tiles[:5], 3)] == [3, 2]
    with pytest.raises(RequestError, match="frames: got 'NaN'"):
        as_bytes(torch.full((1, 3, 1, 1, 1), torch.nan), torch.zeros(1), torch.ones(1))
