"""Reference pictures: every format and mode, then truncated, lying about their size, misnamed, animated, with odd tags."""

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image

from tests.fuzz.box import Box, Broken
from tests.fuzz.values import broken_bytes
from videogen.images import MAX_PIXELS, MAX_SIDE_PX, check_image, load_image
from videogen.serve.uploads import store_picture

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "TIFF",
    "BMP",
    "AVIF",
    "JPEG2000",
    "PPM",
    "ICO",
    "TGA",
    "PCX",
    "EPS",
    "PDF",
    "ICNS",
    "SGI",
    "DDS",
    "IM",
)
ENDINGS = (".png", ".jpg", ".webp", ".gif", ".tif", ".bmp", ".avif", ".jp2", ".ppm", ".txt", "", ".PNG")
SIZES = ((1, 1), (2, 3), (16, 9), (40, 30), (64, 64), (300, 1), (1, 300))
CLAIMS = ((2**31 - 1, 2**31 - 1), (65_535, 65_535), (40_000, 2), (2, 40_000), (0, 0), (2**32 - 1, 1), (9_000, 9_000))
TEXTS = (
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"%!PS-Adobe\n",
    b"%PDF-1.4\n",
    b"",
    b"\0" * 100,
    b"GIF89a",
    b"\x89PNG\r\n\x1a\n",
    b"P6 99999 99999 255\n",
    b"P6 9 9",
)


def chunk(kind: bytes, body: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int = 8, colour: int = 2, extra: bytes = b"", rows: bytes = b"\0" * 1000) -> bytes:
    """A PNG that says of itself what you like."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _crafted(rng: random.Random) -> bytes:
    width, height = rng.choice(CLAIMS)
    kind = rng.randrange(7)
    if kind == 0:
        return png(width, height, rng.choice([1, 8, 16, 3]), rng.choice([0, 2, 3, 4, 6, 7]))
    if kind == 1:
        bomb = zlib.compress(b"\0" * 30_000_000)
        name = rng.choice([b"iCCP", b"zTXt"])
        return png(8, 8, extra=chunk(name, b"x\0\0" + bomb))
    if kind == 2:
        return b"P6 %d %d 255\n" % (width, height) + b"\0" * 100
    if kind == 3:
        return (
            b"BM"
            + struct.pack(
                "<IHHIIiiHHIIiiII",
                1000,
                0,
                0,
                54,
                40,
                *(x - 2**32 if x > 2**31 - 1 else x for x in (width, height)),
                1,
                24,
                0,
                0,
                0,
                0,
                0,
                0,
            )
            + b"\0" * 50
        )
    if kind == 4:
        entries = b"".join(
            struct.pack("<HHII", tag, 4, rng.choice([1, 2**31]), rng.choice([width, height, 8, 2**31]))
            for tag in (256, 257, 258, 259, 262, 273, 278, 279)
        )
        return b"II*\0" + struct.pack("<IH", 8, 8) + entries + struct.pack("<I", rng.choice([0, 8]))
    if kind == 5:
        return b"GIF89a" + struct.pack("<HHBBB", width & 0xFFFF, height & 0xFFFF, 0xF7, 0, 0) + b"\0" * 768 + b"," + b"\0" * 20
    return rng.choice(TEXTS)


def _saved(rng: random.Random) -> bytes:
    stream, image = io.BytesIO(), Image.new(rng.choice(MODES), rng.choice(SIZES))
    if image.mode in ("L", "RGB", "RGBA") and rng.random() < 0.5:
        image = Image.effect_noise(image.size, 60).convert(image.mode)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.choice([0, 1, 3, 6, 8, 9, 2**15])
        options["exif"] = exif.tobytes() if rng.random() < 0.7 else b"Exif\0\0" + rng.randbytes(40)
    if rng.random() < 0.2:
        options["icc_profile"] = rng.randbytes(200)
    if rng.random() < 0.2:
        options |= {"save_all": True, "append_images": [image.copy() for _ in range(rng.randint(1, 3))]}
    if rng.random() < 0.1:
        options["transparency"] = rng.choice([0, 255, b"\0\1"])
    kind = rng.choice(FORMATS)
    try:
        image.save(stream, kind, **({} if kind == "AVIF" else options))  # Pillow 12's AVIF writer crashes on damaged EXIF and profiles
    except Exception:  # noqa: BLE001 - what Pillow cannot write
        stream = io.BytesIO()
        image.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def make(rng: random.Random) -> tuple[str, bytes]:
    """(ending of the name, bytes)."""
    data = _crafted(rng) if rng.random() < 0.3 else _saved(rng)
    return rng.choice(ENDINGS), broken_bytes(rng, data, (_saved(rng),)) if rng.random() < 0.55 else data


def check(case: tuple[str, bytes], box: Box) -> None:
    """Checked, loaded and stored as an upload; all three agree, and what comes out is RGB within the limits."""
    ending, data = case
    path = box.work / f"picture{ending}"
    path.write_bytes(data)
    try:
        info = check_image(path)
    except Exception as error:
        try:
            load_image(path)
        except type(error):
            _refuse_upload(data, box)
            raise error from None
        raise Broken(f"loaded what was refused: {error}") from error
    image = load_image(path)
    if (
        image.mode != "RGB"
        or image.size != (info.width, info.height)
        or image.width * image.height > MAX_PIXELS
        or max(image.size) > MAX_SIDE_PX
    ):
        raise Broken(f"{image.mode} {image.size} of {info}")
    image.close()
    store_picture(data, box.work / "uploads", field="image", max_pixels=MAX_PIXELS)


def _refuse_upload(data: bytes, box: Box) -> None:
    """The server says no to the same, in its own way of saying it."""
    try:
        store_picture(data, box.work / "uploads", field="image", max_pixels=MAX_PIXELS)
    except ValueError as error:  # RequestError is one
        if type(error).__name__ != "RequestError" or str(box.root) in str(error):
            raise
        return
    raise Broken("the server stored what the command line refuses")
