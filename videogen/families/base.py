"""What every model family answers before a weight loads; knows no family by name."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from videogen.config import Media, Recipe, Request
from videogen.errors import bad
from videogen.identity import hash_file, hash_picture
from videogen.images import check_image
from videogen.sampling import Sigmas
from videogen.text.source import TextSource


@dataclass(frozen=True, slots=True)
class Input:
    """One picture a clip is conditioned on: its role (`image`, `last_image`, `reference`), content and size in pixels."""

    role: str
    media: Path | Image.Image
    name: str
    sha256: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request with every value settled for one model. Two equal `Resolved` on one machine give equal clips.

    shifts are those of video and audio; explicit sigmas of video and audio, where an adapter has them, stand above them;
    adapters is their identity.
    """

    workflow: str
    prompt: str
    width: int
    height: int
    frames: int
    fps: float
    steps: int
    shifts: tuple[float, float]
    seed: int | None
    dtype: str
    recipe: str
    sigmas: Sigmas | None = None
    adapters: str = ""
    inputs: tuple[Input, ...] = ()
    notes: tuple[str, ...] = ()
    expand: TextSource | None = None

    @property
    def stratum(self) -> str:
        """What a certificate tells requests apart by, beside canvas, length and schedule."""
        return self.workflow

    @property
    def cache_code(self) -> tuple[str, ...]:
        """The family's own modules that decide about steps, beside those of `caches`."""
        return ()

    @property
    def seconds(self) -> float:
        """Length of the clip in seconds."""
        return self.frames / self.fps


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a clip costs, before anything is loaded: rows of the sequence, arithmetic, disk."""

    rows: int
    tflop: float
    disk_bytes: int


class Family(Protocol):
    """Checks and settles requests for one model folder; reads configs only."""

    def resolve(self, request: Request, recipe: Recipe) -> Resolved:
        """Settle every value, or raise RequestError."""
        ...

    def estimate(self, resolved: Resolved) -> Estimate:
        """The cost of a clip."""
        ...

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """The model's own size (width, height) for an aspect ratio."""
        ...

    def lengths_s(self) -> tuple[float, float, float]:
        """Seconds of the shortest, the usual and the longest clip to offer."""
        ...


def open_input(role: str, media: Media) -> Input:
    """Check one picture (decoded once, not kept) and name it by its content.

    Raises RequestError when it is missing, unreadable, animated or too large.
    """
    if isinstance(media, Image.Image):
        return Input(role, media, f"<{media.width}x{media.height} picture>", hash_picture(media), media.width, media.height)
    if not isinstance(media, str | Path) or not str(media):
        raise bad(role, media, "a path or a PIL picture", "pass the file's path")
    file = check_image(Path(media))
    return Input(role, file.path, file.path.name, file.sha256, file.width, file.height)


def check_unchanged(inputs: Sequence[Input]) -> None:
    """Whether the picture files are still those that were checked: hours may lie between.

    Raises RequestError for one that is gone or was written to.
    """
    for each in inputs:
        if isinstance(each.media, Path):
            try:
                found = hash_file(each.media)
            except OSError as error:
                raise bad(f"{each.role} {str(each.media)!r}", error.strerror, "the file that was planned with", "put it back") from None
            if found != each.sha256:
                advice = "put it back, or run the command again to use the new one"
                raise bad(f"{each.role} {str(each.media)!r}", "another content than when the job was planned", "an unchanged file", advice)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One JSON object of a model folder. Raises RequestError where it is missing or none."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad("model folder", str(folder), f"a file {name}", "check the path, or download the model again") from None
    except (ValueError, RecursionError) as error:
        raise bad(f"model file {path}", str(error), "valid JSON", "download the model again") from None
    if not isinstance(value, dict):
        raise bad(f"model file {path}", type(value).__name__, "a JSON object", "download the model again")
    return value
