"""Every common form of picture arrives as the upright RGB a person sees, or is refused with a reason before decode."""

import hashlib
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from videogen.errors import RequestError
from videogen.images import FORMATS, ImageFile, check_image, load_image, to_rgb

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def pixel(path: Path, x: int = 0, y: int = 0) -> tuple[int, ...]:
    value = load_image(path).getpixel((x, y))
    assert isinstance(value, tuple)
    return value


def refusal(path: Path) -> str:
    """The message that both entry points give."""
    with pytest.raises(RequestError) as checked:
        check_image(path)
    with pytest.raises(RequestError) as loaded:
        load_image(path)
    assert str(checked.value) == str(loaded.value)
    assert ": got " in str(checked.value) and ", expected " in str(checked.value)
    return str(checked.value)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, *chunks: tuple[bytes, bytes], rows: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = b"".join(png_chunk(*chunk) for chunk in chunks) + png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + body + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif", "jp2", "ppm"])
def test_common_formats_load_as_rgb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (32, 48), (200, 40, 40)).save(path)
    info = check_image(path)
    assert isinstance(info, ImageFile) and (info.width, info.height) == (32, 48) and info.format in FORMATS
    assert info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and info.path == path
    assert load_image(path).mode == "RGB" and np.allclose(pixel(path), (200, 40, 40), atol=6)


def test_every_reader_is_there_in_a_fresh_process(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), RED).save(tmp_path / "a.webp")
    program = "import sys, pathlib; from videogen.images import check_image; print(check_image(pathlib.Path(sys.argv[1])).format)"
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "a.webp"], capture_output=True, check=True).stdout == b"WEBP\n"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_exif_orientation_is_honoured(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = Image.new("RGB", (48, 32), WHITE)
    upright.paste(RED, (0, 0, 16, 16))  # seen top left
    upright.paste(BLUE, (32, 16, 48, 32))  # seen bottom right
    stored_by = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # orientation -> the Transpose a camera would have applied
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(stored_by[orientation]))
    path = tmp_path / f"o.{suffix}"
    stored.save(path, exif=exif, **({"quality": 95, "subsampling": 0} if suffix == "jpg" else {}))
    info = check_image(path)
    assert (info.width, info.height) == (48, 32) == load_image(path).size
    assert np.allclose(pixel(path, 4, 4), RED, atol=12) and np.allclose(pixel(path, 44, 28), BLUE, atol=12)


def test_alpha_is_composited_over_white_not_its_hidden_colour(tmp_path: Path) -> None:
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 0))  # red hidden under zero alpha
    half.putpixel((1, 0), (0, 0, 255, 255))
    half.putpixel((2, 0), (0, 0, 0, 128))
    half.save(tmp_path / "rgba.png")
    assert [pixel(tmp_path / "rgba.png", x) for x in range(3)] == [WHITE, BLUE, (127, 127, 127)]
    Image.new("LA", (8, 8), (0, 0)).save(tmp_path / "la.png")
    assert pixel(tmp_path / "la.png") == WHITE
    half.save(tmp_path / "rgba.tif")
    assert pixel(tmp_path / "rgba.tif") == WHITE


def test_pictures_in_memory_are_treated_like_files() -> None:
    assert to_rgb(Image.new("RGBA", (2, 2), (255, 0, 0, 0))).getpixel((0, 0)) == WHITE
    assert to_rgb(Image.fromarray(np.full((2, 2), 51400, np.uint16))).getpixel((0, 0)) == (200, 200, 200)
    with pytest.raises(RequestError, match=r"first frame: got 'grey values from 2 to 2'"):
        to_rgb(Image.fromarray(np.full((2, 2), 2, np.float32)), "first frame")


def test_palette_and_colour_key_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([*RED, *GREEN])
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "index.png", transparency=0)
    image.save(tmp_path / "bytes.png", transparency=bytes([0, 255]))
    image.save(tmp_path / "index.gif", transparency=0)
    for name in ("index.png", "bytes.png", "index.gif"):
        assert (pixel(tmp_path / name), pixel(tmp_path / name, 1)) == (WHITE, GREEN), name
    keyed = Image.new("RGB", (4, 4), RED)
    keyed.putpixel((1, 0), BLUE)
    keyed.save(tmp_path / "rgb.png", transparency=RED)
    assert (pixel(tmp_path / "rgb.png"), pixel(tmp_path / "rgb.png", 1)) == (WHITE, BLUE)


def test_16_bit_grey_keeps_its_ramp(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "g.png")
    Image.fromarray(ramp).save(tmp_path / "g.tif")
    Image.fromarray(ramp.astype(np.int32)).save(tmp_path / "i.tif")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "f.tif")
    for name in ("g.png", "g.tif", "i.tif", "f.tif"):
        got = np.asarray(load_image(tmp_path / name))
        assert np.array_equal(got[0, :, 0], np.arange(256)) and np.array_equal(got[..., 0], got[..., 2]), name


def test_16_bit_grey_is_rounded_to_the_nearest_level(tmp_path: Path) -> None:
    Image.fromarray((np.arange(255) * 257 + 200).astype(np.uint16)[None]).save(tmp_path / "g.png")
    assert np.array_equal(np.asarray(load_image(tmp_path / "g.png"))[0, :, 0], np.arange(1, 256))


def test_16_bit_grey_with_a_colour_key_and_16_bit_rgb(tmp_path: Path) -> None:
    grey = png(2, 1, 16, 0, (b"tRNS", struct.pack(">H", 1000)), rows=b"\0" + struct.pack(">HH", 1000, 51400))
    (tmp_path / "key.png").write_bytes(grey)
    assert (pixel(tmp_path / "key.png"), pixel(tmp_path / "key.png", 1)) == (WHITE, (200, 200, 200))
    rgb = png(1, 1, 16, 2, rows=b"\0" + struct.pack(">HHH", 65535, 0x8000, 0))
    (tmp_path / "rgb.png").write_bytes(rgb)
    assert pixel(tmp_path / "rgb.png") == (255, 128, 0)


def test_grey_outside_its_range_is_refused_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 1.5, np.float32)).save(tmp_path / "f.tif")
    assert "values from 0 to 1;" in refusal(tmp_path / "f.tif")
    Image.fromarray(np.full((4, 4), -0.1, np.float32)).save(tmp_path / "low.tif")
    assert "-0.1" in refusal(tmp_path / "low.tif")
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "nan.tif")
    assert "nan" in refusal(tmp_path / "nan.tif")
    Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(tmp_path / "i.tif")
    assert "70000" in refusal(tmp_path / "i.tif")


@pytest.mark.parametrize(("mode", "colour", "seen"), [("CMYK", (0, 255, 255, 0), RED), ("1", 1, WHITE), ("YCbCr", (76, 85, 255), RED)])
def test_other_colour_models(tmp_path: Path, mode: str, colour: tuple[int, ...] | int, seen: tuple[int, ...]) -> None:
    options = {"compression": "jpeg", "quality": 95} if mode == "YCbCr" else {}
    Image.new(mode, (8, 8), colour).save(tmp_path / "a.tif", **options)
    assert np.allclose(pixel(tmp_path / "a.tif"), seen, atol=3)


def test_lab_is_converted_by_colour_not_by_channel(tmp_path: Path) -> None:
    Image.new("LAB", (8, 8), (255, 128, 128)).save(tmp_path / "white.tif")
    assert np.allclose(pixel(tmp_path / "white.tif"), WHITE, atol=3)


def swapped_profile() -> bytes:
    """An sRGB profile whose red and green columns (and name) are exchanged, so that applying it is plain to see."""
    raw = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    entries = range(132, 132 + 12 * struct.unpack_from(">I", raw, 128)[0], 12)
    at = {bytes(raw[entry : entry + 4]): entry for entry in entries}
    raw[at[b"rXYZ"] : at[b"rXYZ"] + 4], raw[at[b"gXYZ"] : at[b"gXYZ"] + 4] = b"gXYZ", b"rXYZ"
    return bytes(raw).replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))


def test_an_embedded_profile_is_applied_and_srgb_is_left_alone(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (250, 10, 20))
    image.save(tmp_path / "swap.png", icc_profile=swapped_profile())
    assert np.allclose(pixel(tmp_path / "swap.png"), (10, 250, 20), atol=3)
    image.putalpha(255)
    image.save(tmp_path / "alpha.png", icc_profile=swapped_profile())
    assert np.allclose(pixel(tmp_path / "alpha.png"), (10, 250, 20), atol=3)
    image.convert("RGB").quantize(2).save(tmp_path / "palette.png", icc_profile=swapped_profile())
    assert np.allclose(pixel(tmp_path / "palette.png"), (10, 250, 20), atol=3)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for name, profile in (("srgb.png", srgb), ("junk.png", b"not a profile")):
        Image.fromarray(noise).save(tmp_path / name, icc_profile=profile)
        assert np.array_equal(np.asarray(load_image(tmp_path / name)), noise)
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "other.tif", icc_profile=srgb)  # describes RGB, not CMYK
    assert np.allclose(pixel(tmp_path / "other.tif"), RED, atol=3)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_animated_files_are_refused_with_what_to_do(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (16, 16), RED).save(path, save_all=True, append_images=[Image.new("RGB", (16, 16), BLUE)])
    assert "with 2 pictures" in refusal(path) and "save the one you want as PNG" in refusal(path)


def test_a_phones_multi_picture_jpeg_gives_its_photo(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), RED).save(tmp_path / "a.mpo", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)])
    assert check_image(tmp_path / "a.mpo").format == "MPO" and np.allclose(pixel(tmp_path / "a.mpo"), RED, atol=3)


@pytest.mark.parametrize("size", [(12_000, 9_000), (40_000, 10), (10, 32_769), (30_000, 30_000), (2_000_000, 2_000_000)])
def test_huge_pictures_are_refused_before_decode(tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.png").write_bytes(png(*size, 8, 2))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "100,000,000 pixels" in refusal(tmp_path / "bomb.png")


def test_a_large_but_allowed_picture_warns_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 200)
    Image.new("RGB", (16, 16), RED).save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        assert check_image(tmp_path / "a.png").width == 16
        assert warnings.filters == before


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "tif", "bmp"])
def test_truncated_files_are_refused_at_any_cut(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"a.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole)
    data = whole.read_bytes()
    for part in (0.01, 0.1, 0.5, 0.9):
        whole.write_bytes(data[: int(len(data) * part)])
        refusal(whole)


def test_damaged_png_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.png").write_bytes(data)
    assert "undamaged" in refusal(tmp_path / "a.png")


def test_what_is_not_a_picture_file_is_refused_by_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    assert "No such file" in refusal(tmp_path / "none.png")
    assert "a folder" in refusal(tmp_path)
    assert "an empty file" in refusal(tmp_path / "empty.png")
    assert "convert it to PNG" in refusal(tmp_path / "text.png") and "convert it to PNG" in refusal(tmp_path / "page.eps")
    assert "a device or pipe" in refusal(Path("/dev/null"))
    assert "null" in refusal(tmp_path / "nul\0.png")
    assert "too long" in refusal(tmp_path / ("x" * 300))
