"""Reference pictures: checked before any weight loads, then read as upright 8-bit RGB; knows nothing of models or canvases."""

import hashlib
import io
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from videogen.errors import RequestError, bad

MAX_PIXELS = 100_000_000
MAX_SIDE_PX = 32_768
WHITE = (255, 255, 255, 255)

# A closed list: Pillow's other readers include one that starts Ghostscript (EPS) and ones without a signature (TGA).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM")
_READABLE = "a PNG, JPEG, WebP, AVIF, TIFF, GIF, BMP, JPEG 2000 or PPM picture"
_GREY_16 = ("I", "I;16", "I;16L", "I;16B", "I;16N")
# An embedded ICC profile describes one of these; palettes and the like are expanded to RGB first
_PROFILE_MODES = ("L", "RGB", "CMYK")
# What Pillow's readers raise on damaged files, besides its own classes.
DAMAGE = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError),
    *(AttributeError, RuntimeError, struct.error, zlib.error, ImageCms.PyCMSError),
)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture that decodes; the size is the one seen after EXIF rotation, `sha256` is of the file's bytes."""

    path: Path
    width: int
    height: int
    format: str
    sha256: str


def check_image(path: Path) -> ImageFile:
    """Decode `path` in full, exactly as `load_image` will; raises `RequestError` with the reason when it cannot be used."""
    with _opened(path) as (image, sha256):
        kind = str(image.format)
        width, height = to_rgb(image, _what(path)).size
    return ImageFile(path, width, height, kind, sha256)


def load_image(path: Path) -> Image.Image:
    """The picture as `to_rgb` gives it; raises `RequestError` when `check_image` would."""
    with _opened(path) as (image, _):
        return to_rgb(image, _what(path))


def to_rgb(image: Image.Image, what: str = "image") -> Image.Image:
    """An open picture as upright 8-bit RGB in sRGB; `what` names it in errors.

    Transparent parts are composited over white, so colours hidden under zero alpha never show. 16-bit grey is scaled by
    65535, floats by 1; `RequestError` when values lie outside. An embedded ICC profile is applied when it fits the picture.
    """
    profile = image.info.get("icc_profile")
    image = _narrow(ImageOps.exif_transpose(image), what)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        colours = _to_srgb(image.convert("RGB"), profile).convert("RGBA")
        colours.putalpha(image.getchannel("A"))
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), colours).convert("RGB")
    if image.mode not in _PROFILE_MODES:
        image = image.convert("RGB")
    return _to_srgb(image, profile).convert("RGB")


def _what(path: Path) -> str:
    return f"image {str(path)!r}"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Image.Image, str]]:
    """Open, hash and check the header; every way in which Pillow fails inside the block becomes a `RequestError`."""
    what = _what(path)
    _check_file(path, what)
    Image.init()  # registers every reader; a Pillow built without AVIF or JPEG 2000 lacks those two
    try:
        with warnings.catch_warnings(), path.open("rb") as stream:
            warnings.simplefilter("ignore")
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            with Image.open(stream, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                _check_header(image, what)
                yield image, sha256
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise bad(what, str(error), f"at most {MAX_PIXELS:,} pixels", "scale it down first") from error
    except UnidentifiedImageError as error:
        raise bad(what, "something else", _READABLE, "convert it to PNG or JPEG first") from error
    except MemoryError as error:
        raise bad(what, "more pixels than fit in memory", "a picture this machine can hold", "scale it down first") from error
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
        raise bad(what, reason, "a complete, undamaged picture", "export or copy it again") from error


def _check_file(path: Path, what: str) -> None:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise bad(what, reason, "an existing file", "check the path (job files: relative to the job file's folder)") from error
    if stat.S_ISDIR(status.st_mode):
        raise bad(what, "a folder", "a picture file", "name one file in it")
    if not stat.S_ISREG(status.st_mode):
        raise bad(what, "a device or pipe", "a regular file", "save the picture to a file first")
    if status.st_size == 0:
        raise bad(what, "an empty file", _READABLE, "export or copy it again")


def _check_header(image: Image.Image, what: str) -> None:
    """Refuse what must not be decoded: too many pixels, or more than one picture (a phone's MPO leads with the photo itself)."""
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE_PX:
        limit = f"at most {MAX_PIXELS:,} pixels and sides of at most {MAX_SIDE_PX:,}"
        raise bad(what, f"{width}x{height}", limit, "scale it down first")
    num_pictures = getattr(image, "n_frames", 1)
    if num_pictures > 1 and image.format != "MPO":
        expected = "a single still picture (which of them is meant is not ours to guess)"
        raise bad(what, f"an animated or multi-page {image.format} with {num_pictures} pictures", expected, "save the one you want as PNG")


def _narrow(image: Image.Image, what: str) -> Image.Image:
    """16-bit and float grey as 8-bit "L" (Pillow's own conversion clips at 255); every other mode as it is."""
    if image.mode == "F":
        top = 1.0
    elif image.mode in _GREY_16:
        top = 65535.0
    else:
        return image
    values = np.asarray(image, dtype=np.float32)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= top):  # also true for NaN
        got = f"grey values from {low:g} to {high:g}"
        raise bad(what, got, f"values from 0 to {top:g}", "rescale it, or save it as 8-bit")
    grey = Image.fromarray(np.rint(values * (255.0 / top)).astype(np.uint8))
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _to_srgb(image: Image.Image, icc: bytes | None) -> Image.Image:
    """Through the embedded profile to sRGB; unchanged without one, or when it is damaged or describes other channels."""
    if not icc:
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (OSError, ImageCms.PyCMSError):
        return image
    return image if converted is None else converted


def picture_of(media: object) -> Image.Image:
    """A picture given as a path or in memory, upright RGB."""
    return to_rgb(media) if isinstance(media, Image.Image) else load_image(Path(str(media)))
