"""Hashes that name things by their content: settings, files, pictures, model folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

from PIL import Image

_SAMPLE_BYTES = 65_536
_SMALL_BYTES = 4 * 1024 * 1024


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def hash_text(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, as hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def hash_settings(settings: Any) -> str:
    """The identity of plain settings: SHA-256 of their canonical JSON, as hex."""
    return hash_text(canonical_json(settings))


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_picture(image: Image.Image) -> str:
    """SHA-256 of a picture's mode, size and pixels, as hex."""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def _weight_sample(path: Path, size: int) -> bytes:
    """The head, middle and tail of a large file: enough to tell retrained weights of equal shape apart."""
    with path.open("rb") as file:
        parts = []
        for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)


def hash_folder(folder: Path, *, without: str) -> str:
    """The identity of a model folder: small files whole, large ones by size and three samples; one sub-folder is left out.

    Reading 66 GB to name a model would cost minutes at every start; a changed weight file is still seen unless it
    differs nowhere in its header, middle or end.
    """
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in sorted(path for path in files if folder / without not in path.parents):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size} ".encode())
        digest.update(path.read_bytes() if size <= _SMALL_BYTES else _weight_sample(path, size))
    return digest.hexdigest()


def hash_bytes(data: bytes | memoryview) -> str:
    """SHA-256 of bytes, or of what lies in one piece of memory, as hex."""
    return hashlib.sha256(data).hexdigest()
