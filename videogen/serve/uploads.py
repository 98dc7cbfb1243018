"""Uploaded pictures: decoded under limits and stored again as plain pixels under a name of our own; nothing else of a file survives."""

import io
import secrets
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from videogen.errors import RequestError, bad
from videogen.images import DAMAGE, FORMATS, load_image


def store_picture(data: bytes, folder: Path, *, field: str, max_pixels: int) -> Path:
    """The picture as a PNG of its upright RGB pixels, so that what a file hides beside its pixels is gone.

    Raises RequestError naming the field when it is no picture we read, or has more pixels than `max_pixels`.
    """
    _check_header(data, field, max_pixels)
    folder.mkdir(parents=True, exist_ok=True)
    name = secrets.token_hex(16)
    raw, final = folder / f"{name}.part", folder / f"{name}.png"
    try:
        raw.write_bytes(data)
        picture = load_image(raw)
        picture.info.clear()
        picture.save(raw, format="PNG", compress_level=1)
        raw.replace(final)
    except RequestError as error:
        raise RequestError(str(error).replace(f"image {str(raw)!r}", field)) from None
    finally:
        raw.unlink(missing_ok=True)
    return final


def _check_header(data: bytes, field: str, max_pixels: int) -> None:
    """Refuse by the header alone, before a pixel is decoded."""
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                width, height = image.size
    except (UnidentifiedImageError, Image.DecompressionBombError, *DAMAGE) as error:
        told = "too many pixels" if isinstance(error, Image.DecompressionBombError) else "no picture"
        raise bad(field, told, "a PNG, JPEG, WebP, AVIF, TIFF, GIF, BMP, JPEG 2000 or PPM picture", "upload another file") from None
    if width * height > max_pixels:
        raise bad(field, f"{width}x{height}", f"at most {max_pixels:,} pixels", "scale it down first")
