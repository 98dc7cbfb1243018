"""The geometry read without torch equals diffusers' own; every limit is met before weights load."""

from pathlib import Path

import pytest
from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as reference
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from videogen.config import Recipe, Request
from videogen.errors import RequestError
from videogen.families.h3 import H3Family, H3Geometry, canvas_for_aspect, latent_frames, snap_frames
from videogen.source import find_model, open_family

RELEASED = H3Geometry(
    canvas_multiple=32,
    canvas_short_edge=768,
    canvas_max_pixels=768 * 1344,
    reference_short_edge=2048,
    frames_per_chunk=17,
    latents_per_chunk=5,
    min_frames=120,
    hidden_size=5120,
    num_layers=50,
    ffn_dim=13824,
    attention_dim=5120,
    default_steps=49,
    video_shift=12.0,
    audio_shift=3.0,
)


def resolve(family: H3Family, prompt: str = "p", **values: object) -> object:
    return family.resolve(Request(prompt, **values), Recipe())  # type: ignore[arg-type]


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_canvas_equals_diffusers(width: int, height: int) -> None:
    if not 0.25 <= width / height <= 4:
        return
    high, wide = reference.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    assert canvas_for_aspect(width, height, RELEASED) == (wide, high)


@given(st.integers(1, 400))
def test_the_frame_ladder_equals_diffusers(frames: int) -> None:
    snapped = reference.align_num_frames(frames, 17, 5)
    assert snap_frames(frames, RELEASED) == snapped
    assert latent_frames(snapped, RELEASED) == reference.video_latent_num_frames(snapped, 17, 5)


def test_length_limits_of_the_released_model() -> None:
    family = H3Family(RELEASED)
    assert RELEASED.max_frames == 345
    for asked, made in ((108, 124), (124, 124), (125, 141), (345, 345)):
        assert resolve(family, frames=asked).frames == made  # type: ignore[attr-defined]
    assert resolve(family, seconds=5).frames == 124  # type: ignore[attr-defined]
    assert resolve(family, seconds=14.375).frames == 345  # type: ignore[attr-defined]
    for wrong in ({"frames": 107}, {"frames": 346}, {"seconds": 15.0}, {"seconds": 4.0}):
        with pytest.raises(RequestError, match=r"length: got .*, expected 124 to 345 frames \(5\.167 to 14\.375 s"):
            resolve(family, **wrong)


def test_a_snapped_length_is_said() -> None:
    resolved = resolve(H3Family(RELEASED), frames=125)
    assert "125 frames made 141" in resolved.notes[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", range(64, 97))
def test_every_width_is_taken_or_refused_with_a_way_out(width: int) -> None:
    family = H3Family(RELEASED)
    if width % 32 == 0:
        assert resolve(family, size=(width, 64)).width == width  # type: ignore[attr-defined]
        return
    with pytest.raises(RequestError, match="both sides multiples of 32; use"):
        resolve(family, size=(width, 64))
    rounded = resolve(family, size=(width, 64), round_size=True)
    assert rounded.width % 32 == 0 and "rounded" in rounded.notes[0]  # type: ignore[attr-defined]


def test_the_canvas_follows_the_first_frame_and_its_aspect_is_checked(tmp_path: Path) -> None:
    tall, flat = tmp_path / "tall.png", tmp_path / "flat.png"
    Image.new("RGB", (300, 400)).save(tall)
    Image.new("RGB", (900, 100)).save(flat)
    family = H3Family(RELEASED)
    resolved = resolve(family, image=tall)
    assert (resolved.width, resolved.height) == (768, 1024)  # type: ignore[attr-defined]
    for wrong in ({"image": flat}, {"references": (flat,)}, {"size": (960, 96)}):
        with pytest.raises(RequestError, match="1:4 to 4:1"):
            resolve(family, **wrong)
    with pytest.raises(RequestError, match="image"):
        resolve(family, image=tmp_path / "none.png")
    with pytest.raises(RequestError, match="at most 9"):
        resolve(family, references=(tall,) * 10)


def test_estimated_rows_equal_the_tables_of_the_released_model() -> None:
    family = H3Family(RELEASED)
    text = 200
    rows = family.estimate(resolve(family, prompt="x" * (4 * text - 4), size=(1344, 768))).rows  # type: ignore[arg-type]
    assert rows == text + 414 + 37_296


def test_the_shipped_model_reads_without_torch_facts_missing() -> None:
    geometry = open_family(find_model("pocket")).geometry
    assert geometry.frames_per_chunk == 17 and geometry.latents_per_chunk == 5
    assert canvas_for_aspect(16, 9, geometry) == (160, 96)
